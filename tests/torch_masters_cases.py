"""Shared by test_torch_masters, test_torch_masters_gradients, test_torch_masters_state."""

from __future__ import annotations

import pytest
import torch
from torch_scaler_cases import INF, batches, mlp

import polyamp.torch as amp

LOW = [torch.float16, torch.bfloat16]
low = pytest.mark.parametrize("dtype", LOW, ids=["float16", "bfloat16"])
INNER = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}
inners = pytest.mark.parametrize("build", INNER.values(), ids=list(INNER))


def sgd(*params, lr=1.0, **options):
    return amp.MasterWeights(torch.optim.SGD(list(params), lr=lr, **options))


def loss_of(model, inputs, targets):
    dtype = next(model.parameters()).dtype
    return torch.nn.functional.mse_loss(model(inputs.to(dtype)).float(), targets)


def by_hand(dtype, build, trace):
    """Masters stepped the long way: widen, step, round."""
    model = mlp().to(dtype)
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = build(masters)
    for symbol, batch in zip(trace, batches(len(trace)), strict=True):
        model.zero_grad()
        loss_of(model, *batch).backward()
        if symbol == "x":
            continue
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
    return model, masters, optimizer


def trained(dtype, build, trace, scaler=None, clip=None):
    model = mlp().to(dtype)
    optimizer = amp.MasterWeights(build(model.parameters()))
    for symbol, batch in zip(trace, batches(len(trace)), strict=True):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if symbol == "x":
            model[2].weight.grad[1, 1] = INF
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer) if clip is None else scaler.clip_and_step(optimizer, clip)
            scaler.update()
    return model, optimizer


def everything(model, masters, optimizer):
    out = [p.detach() for p in (*model.parameters(), *masters)]
    for master in masters:
        state = optimizer.state[master]
        out += [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)]
    return out
