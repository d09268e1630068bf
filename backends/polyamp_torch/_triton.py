"""One pass over gradients on CUDA: largest magnitude, finite or not, and unscaling if wanted.

Without Triton, on other devices, while a graph is captured, and for what the kernel does not take
(float64, tensors with gaps) the callers do it in several passes, as ever.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor

BLOCK = 4096
_TYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class Found(NamedTuple):
    """What one pass found; 0-d, on the tensors' device."""

    amax: Tensor
    """f32: largest magnitude as it came; NaN and infinity come through."""
    finite: Tensor
    """bool: as it came, and as it was written back."""


class _Blocks(NamedTuple):
    """How tensors of some sizes are cut into blocks; see `_triton_kernel.pass_over`."""

    sizes: Tensor
    owners: Tensor
    starts: Tensor


def usable(values: Sequence[Tensor]) -> bool:
    """Whether `one_pass` takes these tensors, which are not empty and on one device."""
    device = values[0].device
    if device.type != "cuda" or not all(map(_is_plain, values)):
        return False
    return not torch.cuda.is_current_stream_capturing() and _works(device)


def _is_plain(value: Tensor) -> bool:
    if type(value) is not Tensor or value.dtype not in _TYPES:
        return False
    last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    return last or value.is_contiguous()


@functools.cache
def _works(device: torch.device) -> bool:
    """Whether Triton is there and the kernel finds what is in a small tensor; waits, once."""
    if importlib.util.find_spec("triton") is None or os.environ.get("POLYAMP_TRITON") == "0":
        return False
    nan, inverse = torch.tensor([1.0, -3.0, torch.nan], device=device), torch.tensor(0.5)
    try:
        found = one_pass([nan[:2]], inverse.to(device))
        lost = one_pass([nan])
        right = nan.tolist()[:2] == [0.5, -1.5] and found.amax.item() == 3.0 and bool(found.finite)
        right = right and bool(lost.amax.isnan()) and not lost.finite
    except Exception as error:  # no compiler, no driver of its version, ...
        warnings.warn(
            f"Triton does not work on {device} ({type(error).__name__}: {error}); gradients are"
            " measured in several passes. POLYAMP_TRITON=0 in the environment silences this",
            stacklevel=2,
        )
        return False
    return right


@torch.no_grad()
def one_pass(values: Sequence[Tensor], inverse: Tensor | None = None) -> Found:
    """Look at tensors in one pass, and multiply them in place where `inverse` is given.

    Args:
        values: float32, float16 or bfloat16, without gaps, not empty, on one device.
        inverse: f32, 0-d, on that device. Products are taken in float32.
    """
    from polyamp_torch import _triton_kernel

    device = values[0].device
    out = torch.zeros(2, dtype=torch.int32, device=device)
    launches = []
    for dtype in dict.fromkeys(value.dtype for value in values):
        group = [value for value in values if value.dtype == dtype]
        addresses = [value.data_ptr() for value in group]
        blocks = _blocks(tuple(value.numel() for value in group), device)
        aligned = all(address % 16 == 0 for address in addresses)
        tensors = (_to(addresses, device), *blocks, out, out if inverse is None else inverse)
        launches.append((tensors, _TYPES[dtype], aligned))
    for tensors, name, aligned in launches:  # only now, so that an error above changes nothing
        _launch(_triton_kernel, tensors, name, aligned, inverse is not None)
    if inverse is not None:
        tracked = [value for value in values if not value.is_inference()]
        torch.autograd.graph.increment_version(tracked)
    return Found(out[0].view(torch.float32), out[1] == 0)


def _launch(
    kernel: Any, tensors: tuple[Tensor, ...], name: str, aligned: bool, multiply: bool
) -> None:
    import triton.language as tl

    device = tensors[0].device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel.pass_over[(len(tensors[2]),)](
            *tensors,
            dtype=getattr(tl, name),
            block=BLOCK,
            aligned=aligned,
            multiply=multiply,
            num_warps=8,
            enable_fp_fusion=False,
        )


@functools.lru_cache(maxsize=32)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> _Blocks:
    """Made once; waits, since other streams will read it too."""
    owners = [i for i, size in enumerate(sizes) for _ in range(0, size, BLOCK)]
    starts = [start for size in sizes for start in range(0, size, BLOCK)]
    with torch.inference_mode(False):
        return _Blocks(
            torch.tensor(sizes, dtype=torch.int64, device="cpu").to(device),
            torch.tensor(owners, dtype=torch.int32, device="cpu").to(device),
            torch.tensor(starts, dtype=torch.int64, device="cpu").to(device),
        )


def _to(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Numbers, i64, on the device; nothing waits."""
    pinned = device.type == "cuda"
    there = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=pinned)
    return there.to(device, non_blocking=pinned)
