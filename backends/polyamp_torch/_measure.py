"""The eight numbers of `polyamp._statistics.RAW` of tensors, on their device.

    while a step runs   take(tensor): its smallest and largest entry, of all; a copy of every n-th
                        entry, at most `SAMPLED`
    at its end          numbers(samples): everything else, for all tensors at once

so what a step pays is one pass over each tensor and a few small kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from polyamp._statistics import BAD_BITS, FAR_BITS, RAW, SUB_BITS
from polyamp_torch._cast import map_tensors
from polyamp_torch._inspect import dense

Tensor = torch.Tensor

SAMPLED = 2048


class Sample(NamedTuple):
    """One tensor."""

    ends: tuple[Tensor, Tensor]
    """Smallest and largest entry, 0-d; NaN where one entry is."""
    part: Tensor
    """Some of the entries, 1-d f32; none where only the ends are wanted."""
    size: int
    """Entries of the tensor."""


def sampled(tensor: Tensor, entries: int = SAMPLED) -> Tensor:
    """Every n-th entry, 1-d: all of up to `entries`, else fewer; n is odd, as few sizes are."""
    flat = tensor.reshape(-1)
    size = flat.shape[0]
    return flat if size <= entries else flat[:: -(-size // entries) | 1]


@torch.no_grad()
def take(tensor: Tensor, shares: bool = True) -> Sample | None:
    """A sample of a tensor; None of one without entries.

    Args:
        tensor: floating or complex, dense or sparse.
        shares: False where its largest entry is all that counts.
    """
    values = dense(tensor.detach())
    if not values.numel():
        return None
    low, high = torch.aminmax(values)
    entries = sampled(values) if shares else values.reshape(-1)[:0]
    return Sample((low, high), entries.to(torch.float32, copy=True), values.numel())


def take_all(tree: Any, shares: bool = True) -> list[Sample]:
    """Samples of all floating tensors in a tree."""
    found: list[Sample] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            sample = take(tensor, shares)
            if sample is not None:
                found.append(sample)
        return tensor

    map_tensors(tree, note)
    return found


@torch.no_grad()
def numbers(samples: Sequence[Sample]) -> Tensor:
    """f32 (samples, 8), one row each."""
    ends = torch.stack([end.float() for sample in samples for end in sample.ends])
    top = ends.abs().reshape(-1, 2).amax(1)
    size = torch.tensor([float(s.size) for s in samples], device=top.device)
    lost = (~torch.isfinite(top)).float()
    zero = torch.zeros_like(top)
    found = torch.stack([torch.where(lost > 0, 0.0, top), zero, size, lost, *[zero] * 4], dim=1)
    full = [row for row, sample in enumerate(samples) if len(sample.part)]
    if full:
        rows = torch.tensor(full, device=top.device)
        shares = _shares([samples[row] for row in full], top[rows], size[rows])
        found = found.index_copy(0, rows, shares)
    return found


def _shares(samples: Sequence[Sample], top: Tensor, size: Tensor) -> Tensor:
    """Rows of samples that have a part."""
    parts = torch.nn.utils.rnn.pad_sequence([s.part for s in samples], batch_first=True).abs()
    counted = torch.tensor([float(len(s.part)) for s in samples], device=top.device)
    share = size / counted
    sound = torch.isfinite(top)
    finite = torch.isfinite(parts)
    lost = torch.where(sound, 0.0, ((~finite).sum(1) * share).clamp(min=1.0))
    parts = torch.where(finite, parts, 0.0)
    amax = torch.where(sound, top, parts.amax(1))
    limits = (2.0**-SUB_BITS, 2.0**-BAD_BITS, (amax * 2.0**-FAR_BITS)[:, None])
    zeros = (parts == 0).sum(1)
    below = [((parts < limit).sum(1) - zeros).clamp(min=0) * share for limit in limits]
    nonzero = (parts.shape[1] - zeros) * share
    square = (parts * parts).sum(1) * share
    return torch.stack([amax, square, size, lost, nonzero, *below], dim=1)


def raw(tensor: Tensor) -> Tensor:
    """f32 (8,) of one tensor; zeros for one without entries."""
    sample = take(tensor)
    return torch.zeros(len(RAW), device=tensor.device) if sample is None else numbers([sample])[0]


def together(raws: Sequence[Tensor]) -> Tensor:
    """Several tensors' numbers as one's: `polyamp._statistics.merged` on the device."""
    rows = torch.stack(list(raws))
    return torch.cat([rows[:, :1].amax(0), rows[:, 1:].sum(0)])
