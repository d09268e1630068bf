"""One step of a LossScaleOptimizer: measure, decide, apply or skip.

Where values can be read (eager TensorFlow and JAX, torch always) the state machine runs on Python
numbers and a skip is a Python branch. In a graph or under jit it runs on 0-d tensors, and a skip is
the framework's conditional. Where replicas train together they agree before the branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import keras
from keras import ops

from polyamp._scaling import Rule, Transition, bind
from polyamp._state import ScalerState, Signal
from polyamp._xp import host
from polyamp_keras import _state
from polyamp_keras._cast import on_values, unscale, unscale_own
from polyamp_keras._distributed import cross_replica, first_local, reduce, replica_context
from polyamp_keras._inspect import inspect, inspect_for, quickly_finite
from polyamp_keras._ops import FRAMEWORK, cond, traced, xp


def step(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]) -> None:
    """Apply `grads`, which still carry the scale, to `variables`, or skip; advance the state."""
    context = replica_context()
    if context is not None:
        _together(optimizer, grads, variables, context)
    elif traced():
        _in_graph(optimizer, grads, variables)
    else:
        _on_host(optimizer, grads, variables)


def _on_host(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]) -> None:
    old = _state.numbers(optimizer._state)
    easy = not (optimizer.rule.wants_amax or optimizer._narrow)
    if easy and quickly_finite(grads, old.loss_scale):
        signal = Signal(True)
    else:
        found = _measure(optimizer, grads, variables, old)
        amax = None if found.amax is None else float(found.amax)
        signal = Signal(bool(found.finite), amax=amax, sub=float(found.sub))
    new = _on_numbers(optimizer.rule)(old, signal)
    if new.skipped_in_a_row == 0:
        _apply(optimizer, grads, variables, old.loss_scale)
    _state.write(optimizer._state, new, old)
    optimizer._report(new, stacklevel=4)


@lru_cache(maxsize=16)
def _on_numbers(rule: Rule) -> Transition:
    return bind(rule, host)


def _in_graph(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]) -> None:
    old = _state.tensors(optimizer._state)
    new = _decide(optimizer, old, _measure(optimizer, grads, variables, old))

    def go() -> None:
        _apply(optimizer, grads, variables, old.loss_scale)

    applied = ops.equal(new.skipped_in_a_row, 0)
    if FRAMEWORK == "jax":
        _functional(applied, optimizer, go)
    else:
        cond(applied, go, _nothing)
    _state.write(optimizer._state, new, old)


def _together(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], context: Any) -> None:
    """The step of one of several TensorFlow replicas."""
    old = _state.tensors(optimizer._state)
    scale = old.loss_scale
    signal = reduce(_measure(optimizer, grads, variables, old), context)

    def go(grads: Sequence[Any], scale: Any) -> None:
        _apply(optimizer, grads, variables, scale)

    def decide(distribution: Any, signal: Signal, grads: Sequence[Any], scale: Any) -> None:
        agreed = Signal(*(first_local(distribution, part) for part in signal))
        new = _decide(optimizer, _state.tensors(optimizer._state), agreed)

        def go_all() -> None:
            if distribution is None:
                go(grads, scale)
            else:
                distribution.extended.call_for_each_replica(go, args=(grads, scale))

        cond(ops.equal(new.skipped_in_a_row, 0), go_all, _nothing)
        _state.write(optimizer._state, new)

    cross_replica(context, decide, signal, grads, scale)


def _functional(applied: Any, optimizer: Any, go: Any) -> None:
    """`go` where `applied`, as a function of values: JAX has no assignment in a branch.

    `ops.cond` makes rejection branch 0, which needs the least temporary memory.
    """
    variables = [*optimizer._trainable_variables, *optimizer.inner_optimizer.variables]
    before = [v.value for v in variables]

    def after() -> list[Any]:
        with keras.StatelessScope(list(zip(variables, before, strict=True))) as scope:
            go()
        return [scope.get_current_value(v) for v in variables]

    def unchanged() -> list[Any]:
        return before

    for variable, value in zip(variables, cond(applied, after, unchanged), strict=True):
        variable.assign(value)


def _nothing() -> None:
    return None


def _decide(optimizer: Any, old: ScalerState, signal: Signal) -> ScalerState:
    return bind(optimizer.rule, xp)(old, signal)


def _measure(
    optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], old: ScalerState
) -> Signal:
    """`inspect_for` of the scaled gradients, with the finiteness of the others."""
    others = [_overwrites(v) for v in variables]
    scaled = [g for g, other in zip(grads, others, strict=True) if not other]
    targets = [v for v, other in zip(variables, others, strict=True) if not other]
    signal = inspect_for(targets, scaled, old.loss_scale, amax=optimizer.rule.wants_amax)
    signal = signal._replace(sub=_share_if_due(optimizer.rule, scaled, old.step))
    if optimizer._narrow and FRAMEWORK != "tensorflow":
        fits = _fit(scaled, targets, old.loss_scale)
        signal = signal._replace(finite=signal.finite & fits)
    if not any(others):
        return signal
    rest = [g for g, other in zip(grads, others, strict=True) if other]
    return signal._replace(finite=signal.finite & inspect(rest, 1.0).finite)


def _share_if_due(rule: Rule, grads: Sequence[Any], step: Any) -> Any:
    """`Signal.sub` on the steps the rule wants it, else -1."""
    if not rule.sub_interval:
        return -1.0

    def share() -> Any:
        return inspect(grads, 1.0, sub=True).sub

    return cond(step % rule.sub_interval == 0, share, lambda: xp.c(-1.0, "f32"))


def _apply(optimizer: Any, grads: Sequence[Any], variables: Sequence[Any], scale: Any) -> None:
    scaled = [None if _overwrites(v) else g for g, v in zip(grads, variables, strict=True)]
    true = list(grads)
    if not unscale_own(scaled, variables, 1.0 / scale):
        true = [
            g if t is None else t for g, t in zip(grads, unscale(scaled, 1.0 / scale), strict=True)
        ]
    optimizer.inner_optimizer.apply(true, variables)


def _fit(grads: Sequence[Any], variables: Sequence[Any], scale: Any) -> Any:
    """0-d bool: unscaled gradients of float16 variables are finite in float16."""
    pairs = zip(grads, variables, strict=True)
    narrow = [g for g, v in pairs if keras.backend.standardize_dtype(v.dtype) == "float16"]

    def rounded(values: Any) -> Any:
        return ops.cast(values, "float16")

    true = [None if g is None else on_values(g, rounded) for g in unscale(narrow, 1.0 / scale)]
    return inspect(true, 1.0).finite


def _overwrites(variable: Any) -> bool:
    """Whether a "gradient" is the variable's new value (float8 scales), which no scale touches."""
    return bool(getattr(variable, "overwrite_with_gradient", False))
