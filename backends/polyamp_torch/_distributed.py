"""Agreement over ranks: every rank must take the same decision at the same step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from polyamp._state import Signal


def reduce(signal: Signal, group: Any = None) -> Signal:
    """`signal` agreed over the ranks of a process group: finite only if so on all, largest amax.

    Args:
        signal: what this rank measured, as 0-d tensors or Python values.
        group: a torch process group; None means that there are no ranks to agree with, and leaves
            the signal as it is (`torch.distributed.group.WORLD` is all of them).

    Returns:
        The agreed signal as 0-d tensors. One all-reduce (MAX) of four float32. `sub` is the
        largest over the ranks; a NaN amax counts as infinite.
    """
    if group is None:
        return signal
    home = next((v.device for v in signal if isinstance(v, torch.Tensor)), _device_of(group))
    amax = -1.0 if signal.amax is None else signal.amax
    bad = [_flag(signal.finite, home), _flag(signal.loss_finite, home)]
    rest = [torch.as_tensor(v, dtype=torch.float32, device=home) for v in (amax, signal.sub)]
    packed = torch.nan_to_num(torch.stack([*bad, *rest]), nan=float("inf"), posinf=float("inf"))
    dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=group)
    return Signal(
        finite=packed[0] == 0,
        loss_finite=packed[1] == 0,
        amax=None if signal.amax is None else packed[2],
        sub=packed[3],
    )


def _device_of(group: Any) -> torch.device:
    return torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")


def _flag(good: Any, home: torch.device) -> torch.Tensor:
    return torch.as_tensor(good, device=home).logical_not().to(torch.float32)
