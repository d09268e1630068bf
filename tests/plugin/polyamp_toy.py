"""A polyamp backend on numpy, written as a third party would: one module with the protocol's names.

A tree is a list of arrays; an entry may be None where a parameter got no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import polyamp
from polyamp.testing import MOMENTUM, Signals, Training, gradients

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


def modes(kind: str) -> list[str]:
    """The ways in which `replay` and `toy_train` run."""
    return ["eager"]


def replay(
    rule: polyamp.Rule, sequences: Sequence[Signals], mode: str, device: str
) -> list[polyamp.ScalerState]:
    """The transition over whole sequences of signals, each from a fresh state."""
    return [_replayed(rule, signals) for signals in sequences]


def _replayed(rule: polyamp.Rule, signals: Signals) -> polyamp.ScalerState:
    step, state, states = polyamp.bind(rule, xp), rule.init(xp), []
    for number in range(len(signals.finite)):
        finite, loss_finite, amax, sub = signals.at(number)
        amax = None if amax is None else xp.c(amax, "f32")
        measured = (np.bool_(finite), np.bool_(loss_finite), amax, xp.c(sub, "f32"))
        state = step(state, polyamp.Signal(*measured))
        states.append(state)
    *head, memory = zip(*states, strict=True)
    return polyamp.ScalerState(
        *map(np.stack, head), tuple(map(np.stack, zip(*memory, strict=True)))
    )


def toy_train(training: Training) -> list[tuple[list[Any], polyamp.ScalerState]]:
    """Steps of SGD or Adam on the contract's network, whose gradients numpy has to be given."""
    rule = training.rule
    state = rule.init() if training.state is None else training.state
    weights = [np.array(w, np.float32) for w in training.weights]
    moments = [(np.zeros_like(w), np.zeros_like(w)) for w in weights]
    rows = []
    for batch in training.batches:
        loss, grads = gradients(weights, batch, state.loss_scale, training.dtype)
        measured = inspect(grads, state.loss_scale, loss, amax=rule.wants_amax)
        finite, loss_finite, amax, _ = reduce(measured)
        amax = None if amax is None else float(amax)
        old, signal = state, polyamp.Signal(bool(finite), bool(loss_finite), amax)
        state = polyamp.transition(rule, old, signal)
        verdict = polyamp.decision(old, state)
        true = unscale(grads, 1.0 / verdict.scale_used)
        with np.errstate(all="ignore"):
            updates = [_update(training, g, m) for g, m in zip(true, moments, strict=True)]
        new = [w - step for w, (step, _) in zip(weights, updates, strict=True)]
        weights = select(verdict.applied, new, weights)
        moments = [
            tuple(select(verdict.applied, moved, kept))
            for (_, moved), kept in zip(updates, moments, strict=True)
        ]
        rows.append((weights, state))
    return rows


def _update(training: Training, grad: Any, moments: Any) -> tuple[Any, Any]:
    """What to subtract, and the new moments."""
    rate, (first, second) = np.float32(training.learning_rate), moments
    if training.optimizer == "adam":  # without its correction of the first steps
        first = np.float32(0.9) * first + np.float32(0.1) * grad
        second = np.float32(0.999) * second + np.float32(0.001) * grad * grad
        return rate * first / (np.sqrt(second) + np.float32(1e-7)), (first, second)
    decay = np.float32(MOMENTUM if training.optimizer == "momentum" else 0.0)
    first = decay * first + grad
    return rate * first, (first, second)
