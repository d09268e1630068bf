"""Real training steps through the public API, for the contract."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from polyamp._interchange import scaler_to_dict
from polyamp._state import ScalerState
from polyamp_torch._cast import cast
from polyamp_torch._scaler import GradScaler

if TYPE_CHECKING:
    from polyamp.testing import Training

Tensor = torch.Tensor


def toy_train(training: Training) -> list[tuple[list[Any], ScalerState]]:
    """See `polyamp.Backend.toy_train`. "compiled" compiles the loss, and its backward with it."""
    rule, device = training.rule, torch.device(training.device)
    weights = [torch.nn.Parameter(torch.tensor(w, device=device)) for w in training.weights]
    optimizer = _optimizer(training, weights)
    start = rule.init() if training.state is None else training.state
    scaler = GradScaler.from_dict(scaler_to_dict(rule, start), device=device.type)
    loss_of: Any = partial(_loss, dtype=training.dtype, nchw=training.mode == "channels_last")
    if training.mode == "compiled":
        loss_of = partial(torch.compile(_loss, fullgraph=True, dynamic=False), dtype=training.dtype)
    rows = []
    for batch in training.batches:
        optimizer.zero_grad()
        scaler.scale(loss_of(weights, [torch.tensor(b, device=device) for b in batch])).backward()
        scaler.step(optimizer)
        scaler.update()
        rows.append(([w.detach().cpu().numpy().copy() for w in weights], scaler.state))
    return rows


def _optimizer(training: Training, weights: list[Any]) -> Any:
    if training.optimizer == "adam":
        return torch.optim.Adam(weights, training.learning_rate)
    from polyamp.testing import MOMENTUM

    momentum = MOMENTUM if training.optimizer == "momentum" else 0.0
    return torch.optim.SGD(weights, training.learning_rate, momentum)


def _loss(
    weights: Sequence[Tensor], batch: Sequence[Tensor], dtype: str, nchw: bool = False
) -> Tensor:
    x, target, root, shift = batch
    if len(weights) == 1:
        out = cast(weights[0], dtype)
    elif nchw:
        out = _convolved(*cast([x, *weights], dtype))
    else:
        x, first, second = cast([x, *weights], dtype)
        out = torch.relu(x @ first) @ second
    wide = out.float()
    loss: Tensor = (wide * target).sum() + (wide * root + shift).sqrt().sum()
    return loss


def _convolved(x: Tensor, first: Tensor, second: Tensor) -> Any:
    """The network as convolutions: the samples are the pixels of an image in channels_last."""
    last = torch.channels_last
    image = x.T.reshape(1, x.shape[1], 2, -1).contiguous(memory_format=last)
    kernels = [w.T[:, :, None, None].contiguous(memory_format=last) for w in (first, second)]
    with torch.backends.cudnn.flags(allow_tf32=False):
        hidden = torch.relu(torch.nn.functional.conv2d(image, kernels[0]))
        out = torch.nn.functional.conv2d(hidden, kernels[1])
    return out.flatten(2)[0].T
