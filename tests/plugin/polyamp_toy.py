"""A polyamp backend on numpy, written as a third party would: one module with the protocol's names.

A tree is a list of arrays; an entry may be None where a parameter got no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import polyamp

NAME = "toy"
"""The name under which `polyamp.backend` finds this module."""

Tree = Sequence[Any]

_TYPES = {"f32": np.float32, "i32": np.int32}


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` without numpy's warnings: overflow is what a loss scaler lives on."""

    def call(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args)

    return call


class Ops:
    """`polyamp.Namespace` over 0-d numpy values."""

    where = staticmethod(np.where)
    minimum = staticmethod(np.minimum)
    maximum = staticmethod(np.maximum)
    isfinite = staticmethod(np.isfinite)
    logical_not = staticmethod(np.logical_not)
    logical_or = staticmethod(np.logical_or)
    multiply = staticmethod(_quiet(np.multiply))
    left_shift = staticmethod(np.left_shift)
    right_shift = staticmethod(np.right_shift)
    max = staticmethod(np.max)
    c = staticmethod(_quiet(lambda value, kind: _TYPES[kind](value)))

    def bits(self, a: Any) -> Any:
        """The bits of an f32 as i32."""
        return np.asarray(a, np.float32).view(np.int32)

    def from_bits(self, a: Any) -> Any:
        """The f32 whose bits an i32 holds."""
        return np.asarray(a, np.int32).view(np.float32)

    def as_f32(self, a: Any) -> Any:
        """An i32 as f32."""
        return np.asarray(a).astype(np.float32)

    def arange(self, count: int) -> Any:
        """i32 array 0 .. count - 1."""
        return np.arange(count, dtype=np.int32)


xp = Ops()
"""The array functions of a transition."""


@_quiet
def _largest(grads: Tree) -> Any:
    """Largest magnitude as f32, NaN and infinity passed on; 0 for nothing."""
    tops = [np.max(np.abs(g)) for g in grads if g is not None and np.size(g)]
    return np.max(np.asarray([0.0, *tops])).astype(np.float32)


def inspect(
    grads: Tree, loss_scale: Any, loss: Any = None, amax: bool = False, sub: bool = False
) -> polyamp.Signal:
    """Measure gradients that still carry `loss_scale`; `sub` is left unknown."""
    largest = _largest(grads)
    unscaled = xp.multiply(largest, np.float32(1) / np.float32(loss_scale))
    return polyamp.Signal(
        finite=np.isfinite(largest) & np.isfinite(unscaled),
        loss_finite=True if loss is None else np.isfinite(loss).all(),
        amax=largest if amax else None,
    )


def unscale(grads: Tree, inverse: Any) -> list[Any]:
    """New gradients, multiplied by `inverse` in float32 or wider."""
    factor = np.float32(inverse)
    return [
        None if g is None else xp.multiply(g.astype(np.promote_types(g.dtype, np.float32)), factor)
        for g in grads
    ]


def select(flag: Any, new: Tree, old: Tree) -> list[Any]:
    """`new` where `flag`, else `old`."""
    return [np.where(flag, n, o) for n, o in zip(new, old, strict=True)]


def cast(tree: Tree, dtype: str) -> list[Any]:
    """Floating arrays in `dtype`, the rest as it is."""
    import ml_dtypes

    target = np.dtype(getattr(ml_dtypes, dtype, dtype))
    kinds = (np.floating, ml_dtypes.bfloat16)
    return [a.astype(target) if isinstance(a.dtype.type(0), kinds) else a for a in tree]


def reduce(signal: polyamp.Signal, group: Any = None) -> polyamp.Signal:
    """numpy has no ranks to agree with."""
    if group is not None:
        raise polyamp.BackendError(f"the toy backend has no process groups, got {group!r}")
    return signal


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """numpy has no compiler."""
    return fn


def devices() -> list[str]:
    """The usable devices."""
    return ["cpu"]


def toy_step(
    weights: Any, batch: Any, rule: polyamp.Rule, state: polyamp.ScalerState | None = None
) -> tuple[Any, polyamp.ScalerState]:
    """One step of SGD, learning rate 1, on loss = sum(weights * batch)."""
    old = rule.init() if state is None else state
    with np.errstate(all="ignore"):
        loss = np.sum(weights * batch)
        grads = [batch * np.float32(old.loss_scale)]
    measured = reduce(inspect(grads, old.loss_scale, loss))
    signal = polyamp.Signal(bool(measured.finite), bool(measured.loss_finite))
    new = polyamp.transition(rule, old, signal)
    verdict = polyamp.decision(old, new)
    (grad,) = unscale(grads, 1.0 / verdict.scale_used)
    (after,) = select(verdict.applied, [weights - grad], [weights])
    return after, new
