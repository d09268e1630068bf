"""Pairs of a low-precision parameter and its float32 master, and how gradients get across."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from polyamp_torch._cast import LOW

Tensor = torch.Tensor


def _gone() -> None:
    """In the place of a weak reference: a gradient that no gradient is equal to."""


class Pair:
    """A parameter of the model, its master, and what was last carried over between them.

    Attributes:
        param: float16 or bfloat16. master: float32, same shape.
        written: `param._version` when the two were last equal but for rounding.
    """

    __slots__ = ("_given", "_given_version", "_seen", "_seen_version", "master", "param", "written")

    def __init__(self, param: Tensor, master: Tensor) -> None:
        self.param, self.master = param, master
        self.written = param._version
        self.note(None)

    def is_current(self) -> bool:
        """Whether the parameter's gradient is the one last carried over, unchanged."""
        grad = self.param.grad
        if grad is None or self._seen is None:
            return grad is None and self._seen is None
        return self._seen() is grad and self._seen_version == grad._version

    def was_touched(self) -> bool:
        """Whether the master's gradient was changed in place or set since it was given."""
        grad = self.master.grad
        return grad is not self._given or (
            grad is not None and grad._version != self._given_version
        )

    def note(self, grad: Tensor | None) -> None:
        """Remember `grad` of the parameter as carried over, and what the master now has."""
        self._seen: Any = None if grad is None else weakref.ref(grad)
        self._seen_version = 0 if grad is None else grad._version
        self._given = self.master.grad
        self._given_version = 0 if self._given is None else self._given._version

    def forget(self) -> None:
        """What is carried over is used up: whatever comes next, None included, is new."""
        self._seen = _gone

    def buffer(self, grad: Tensor) -> Tensor:
        """The master's gradient as memory for a widened dense `grad`, new where it must be."""
        kept = self.master.grad
        if kept is None or kept.is_sparse or kept is not self._given:
            kept = self.master.grad = torch.empty_like(grad, dtype=torch.float32)
        return kept

    def follow(self) -> None:
        """Take over entries of the parameter that are not the master's, rounded."""
        if self.written != self.param._version:
            same = self.master.to(self.param.dtype) == self.param
            self.master.copy_(torch.where(same, self.master, self.param.to(torch.float32)))
            self.written = self.param._version


def widen(pairs: Sequence[Pair]) -> None:
    """Copy the gradients of parameters to their masters: one pass, and sparse ones one by one."""
    targets, sources = [], []
    for pair in pairs:
        grad = pair.param.grad
        if grad is None:
            pair.master.grad = None
        elif grad.is_sparse:
            pair.master.grad = grad.to(torch.float32).coalesce()
        else:
            targets.append(pair.buffer(grad))
            sources.append(grad)
    if targets:
        torch._foreach_copy_(targets, sources)
    for pair in pairs:
        pair.note(pair.param.grad)


def move(pairs: Sequence[Pair]) -> None:
    """Add the gradients of parameters to those of their masters, and set them to None."""
    first: list[Pair] = []
    wide: list[Tensor] = []
    narrow: list[Tensor] = []
    for pair in pairs:
        grad, total = pair.param.grad, pair.master.grad
        if grad is None:
            continue
        if total is None:
            first.append(pair)
        elif grad.is_sparse or total.is_sparse:
            sparse, other = (grad, total) if grad.is_sparse else (total, grad)
            pair.master.grad = other.to(torch.float32) + sparse.to(torch.float32)
        else:
            wide.append(total)
            narrow.append(grad)
    widen(first)
    if wide:
        torch._foreach_add_(wide, narrow)
    for pair in pairs:
        pair.param.grad = None
        pair.note(None)


def widened(state: Any) -> Any:
    """Optimizer state with every low-precision tensor in float32."""
    if isinstance(state, Tensor):
        return state.to(torch.float32) if state.dtype in LOW else state
    if isinstance(state, dict):
        return {key: widened(value) for key, value in state.items()}
    return [widened(item) for item in state] if isinstance(state, list) else state
