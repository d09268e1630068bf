"""The array functions of a transition (`polyamp.Namespace`) on torch tensors of one device."""

from __future__ import annotations

from typing import Any

import torch

from polyamp._xp import Kind

Tensor = torch.Tensor

_DTYPES = {"f32": torch.float32, "i32": torch.int32}


class Ops:
    """`polyamp.Namespace` over 0-d tensors on `device`; nothing here waits for the device."""

    minimum = staticmethod(torch.minimum)
    maximum = staticmethod(torch.maximum)
    isfinite = staticmethod(torch.isfinite)
    logical_not = staticmethod(torch.logical_not)
    logical_or = staticmethod(torch.logical_or)
    multiply = staticmethod(torch.mul)
    left_shift = staticmethod(torch.bitwise_left_shift)
    right_shift = staticmethod(torch.bitwise_right_shift)

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def where(self, condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
        """`yes` where `condition`, else `no`."""
        return torch.where(condition, yes, no)

    def c(self, value: float, kind: Kind) -> Tensor:
        """A typed 0-d constant on the device."""
        return torch.full((), value, dtype=_DTYPES[kind], device=self.device)

    def bits(self, a: Tensor) -> Tensor:
        """The bits of an f32 as i32."""
        return a.view(torch.int32)

    def from_bits(self, a: Tensor) -> Tensor:
        """The f32 whose bits an i32 holds."""
        return a.view(torch.float32)

    def as_f32(self, a: Tensor) -> Tensor:
        """An i32 as f32."""
        return a.to(torch.float32)


xp = Ops()
"""The namespace on the CPU."""


def compiled(fn: Any) -> Any:
    """`fn` under torch.compile, refusing graph breaks."""
    return torch.compile(fn, fullgraph=True)


def devices() -> list[str]:
    """Names of the usable devices, "cpu" first."""
    found = ["cpu"]
    if torch.cuda.is_available():
        found += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return found


def select(flag: Any, new: Any, old: Any) -> Any:
    """`new` where `flag` (bool or 0-d bool tensor) is true, else `old`; lists, tuples and dicts.

    A select, not a product: NaN in the branch not taken does no harm.
    """
    if isinstance(new, Tensor):
        chosen = flag if isinstance(flag, Tensor) else torch.tensor(flag, device=new.device)
        return torch.where(chosen, new, old)
    if isinstance(new, dict):
        return type(new)({key: select(flag, new[key], old[key]) for key in new})
    if isinstance(new, tuple) and hasattr(new, "_fields"):
        return type(new)(*(select(flag, n, o) for n, o in zip(new, old, strict=True)))
    if isinstance(new, (list, tuple)):
        return type(new)(select(flag, n, o) for n, o in zip(new, old, strict=True))
    return new if bool(flag) else old
