"""The eight numbers of `polyamp._statistics.RAW` of a tensor, on its device.

Largest entry and finiteness are of all entries, in one pass; the shares are of every n-th entry, so
that at most `SAMPLED` are looked at more than once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from polyamp._statistics import BAD_BITS, FAR_BITS, RAW, SUB_BITS
from polyamp_torch._cast import map_tensors
from polyamp_torch._inspect import dense

Tensor = torch.Tensor

SAMPLED = 1 << 16


def sampled(tensor: Tensor, entries: int = SAMPLED) -> Tensor:
    """Every n-th entry, 1-d: all of up to `entries`, else about as many; n is odd, as few sizes
    are."""
    flat = tensor.reshape(-1)
    size = flat.shape[0]
    return flat if size <= entries else flat[:: (size // entries) | 1]


@torch.no_grad()
def raw(tensor: Tensor) -> Tensor:
    """f32, shape (8,); a tensor without entries gives zeros."""
    values = dense(tensor.detach())
    if not values.numel():
        return torch.zeros(len(RAW), device=tensor.device)
    low, high = torch.aminmax(values)
    largest = torch.maximum(low.abs(), high.abs()).float()
    part = sampled(values).float().abs()
    share = values.numel() / part.numel()
    finite = torch.isfinite(part)
    part = torch.where(finite, part, 0.0)
    amax = torch.where(torch.isfinite(largest), largest, part.amax())
    lost = (~finite).sum() * share
    lost = torch.where(torch.isfinite(largest), 0.0, lost.clamp(min=1.0))
    nonzero = part > 0
    counts = [
        (nonzero & (part < limit)).sum() * share
        for limit in (2.0**-SUB_BITS, 2.0**-BAD_BITS, amax * 2.0**-FAR_BITS)
    ]
    square = (part * part).sum() * share
    size = torch.full_like(amax, values.numel())
    numbers = [amax, square, size, lost, nonzero.sum() * share, *counts]
    return torch.stack([number.float() for number in numbers])


def together(raws: Iterable[Tensor]) -> Tensor:
    """Several tensors' numbers as one's: `polyamp._statistics.merged` on the device."""
    rows = torch.stack(list(raws))
    return torch.cat([rows[:, :1].amax(0), rows[:, 1:].sum(0)])


def raw_of(tree: Any) -> Tensor | None:
    """The numbers of all floating tensors in a tree together; None if there is none."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            found.append(raw(tensor))
        return tensor

    map_tensors(tree, note)
    return together(found) if found else None
