"""One real training step through the public API, for the backend contract."""

from __future__ import annotations

from typing import Any

import torch

from polyamp._interchange import scaler_to_dict
from polyamp._scaling import Rule
from polyamp._state import ScalerState
from polyamp_torch._scaler import GradScaler


def toy_step(
    weights: Any, batch: Any, rule: Rule, state: ScalerState | None = None
) -> tuple[Any, ScalerState]:
    """See `polyamp.Backend.toy_step`: loss = sum(weights * batch), SGD, learning rate 1."""
    param = torch.nn.Parameter(torch.tensor(weights, dtype=torch.float32))
    optimizer = torch.optim.SGD([param], lr=1.0)
    start = rule.init() if state is None else state
    scaler = GradScaler.from_dict(scaler_to_dict(rule, start), device="cpu")
    loss = (param * torch.tensor(batch, dtype=torch.float32)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return param.detach().numpy().copy(), scaler.state
