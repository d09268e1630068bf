"""The loss-scaler state machine: written once, run in every framework.

    good        = gradients finite and loss finite
    change      = rule(state, good, signal)            # scale, clean, left, memory, reason, fault
    new.step    = step + 1
    new.skipped = skipped + (0 if good else 1)
    in a row    = 0 if good else in a row + 1
    fault       = the first of: one already set, MAX_SKIPS if in a row >= max_skips_in_a_row,
                  the rule's own
    reason      = LOSS_NOT_FINITE if the loss is not finite else the rule's own

`Dynamic` is one rule with the parameters of every counter-based scaler in use; its docstring has
its part. Parity with a native kernel holds for factors that float32 represents exactly.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar, NamedTuple

from polyamp._errors import RuleError
from polyamp._state import Fault, Reason, ScalerState, Signal
from polyamp._xp import F32_MAX, F32_TINY, Namespace, host

MIN_SCALE = F32_TINY
"""No rule has a floor below this: 2**-126."""
MAX_SCALE = 2.0**126
"""Default ceiling. Up to float32's largest may be asked for, which means: no ceiling."""

Transition = Callable[[ScalerState, Signal], ScalerState]
"""A bound transition: old state and signal in, new state out."""


class Change(NamedTuple):
    """The part of a transition that is the rule's own. Fields as in `ScalerState`."""

    loss_scale: Any
    clean: Any
    left: Any
    reason: Any
    fault: Any
    memory: tuple[Any, ...]


class Rule(ABC):
    """Base of loss-scaling rules: frozen, hashable, equal rules have equal hashes."""

    wants_amax: ClassVar[bool] = False
    """Whether `Signal.amax` must be measured for this rule."""
    sub_interval: int = 0
    """`Signal.sub` is to be measured on every step whose number (`ScalerState.step` before it) is a
    multiple of this; 0 for never."""
    init_scale: float
    min_scale: float
    max_scale: float
    max_skips_in_a_row: int | None

    @abstractmethod
    def init(self, xp: Namespace = host) -> ScalerState:
        """The state before the first step, in the framework of `xp`."""

    @abstractmethod
    def bind_change(self, xp: Namespace) -> Callable[[ScalerState, Any, Signal], Change]:
        """The rule's function `(state, good, signal) -> Change` with its constants prepared."""

    def memory_range(self) -> tuple[tuple[int, int], ...]:
        """Least and largest value of each entry of `ScalerState.memory`."""
        return ()

    def can_fault(self) -> bool:
        """Whether this rule can ever set `ScalerState.fault`."""
        return self.max_skips_in_a_row is not None


def bind(rule: Rule, xp: Namespace = host) -> Transition:
    """Prepare `transition` for one rule and one framework; the result is called once a step.

    Args:
        rule: `Static`, `Dynamic` or another `Rule`.
        xp: array functions of the framework and device; plain Python numbers by default.

    Returns:
        A pure function `(state, signal) -> state`, fit for jit, scan and compiled graphs.
    """
    if not isinstance(rule, Rule):
        raise RuleError(f"bind() needs a Rule such as Dynamic(), got {rule!r}")
    change = rule.bind_change(xp)
    zero, one = xp.c(0, "i32"), xp.c(1, "i32")
    loss_bad = xp.c(Reason.LOSS_NOT_FINITE, "i32")
    can_fault, limited = rule.can_fault(), rule.max_skips_in_a_row is not None
    limit = xp.c(rule.max_skips_in_a_row or 0, "i32")
    max_skips = xp.c(Fault.MAX_SKIPS, "i32")
    where = xp.where

    def step(state: ScalerState, signal: Signal) -> ScalerState:
        loss_known_good = signal.loss_finite is True
        good = signal.finite if loss_known_good else signal.finite & signal.loss_finite
        new = change(state, good, signal)
        row = where(good, zero, state.skipped_in_a_row + one)
        reason = new.reason
        if not loss_known_good:
            known_bad = signal.loss_finite is False
            reason = loss_bad if known_bad else where(signal.loss_finite, reason, loss_bad)
        fault = state.fault
        if can_fault:
            fresh = where(row >= limit, max_skips, new.fault) if limited else new.fault
            fault = where(fault > zero, fault, fresh)
        return ScalerState(
            new.loss_scale,
            new.clean,
            new.left,
            state.step + one,
            where(good, state.skipped, state.skipped + one),
            row,
            reason,
            fault,
            new.memory,
        )

    return step


def transition(rule: Rule, state: ScalerState, signal: Signal, xp: Namespace = host) -> ScalerState:
    """One step of the state machine: what `rule` makes of `signal` in `state`.

    Args:
        rule: the rule in force.
        state: state before the step; not changed.
        signal: what was measured of this step's gradients.
        xp: array functions of the framework the state lives in.

    Returns:
        The state after the step. `decision(state, new)` tells what to do with the gradients.
    """
    return bind(rule, xp)(state, signal)


def check_number(rule: Rule, name: str, low: float, high: float, why: str) -> None:
    """Refuse a parameter of a rule that is not a finite number in [low, high]; make it a float."""
    value: Any = getattr(rule, name)
    known = isinstance(value, Real) and not isinstance(value, bool)
    if not known:
        raise RuleError(f"{type(rule).__name__}: {name} must be a number, got {value!r}")
    number = math.inf if value > F32_MAX else float(value)
    if not low <= number <= high:
        raise RuleError(f"{type(rule).__name__}: {name} must be {why}, got {value!r}")
    object.__setattr__(rule, name, number)


def check_count(rule: Rule, name: str, low: int) -> None:
    """Refuse a parameter of a rule that is no integer in [low, 2**31); make it an int."""
    value: Any = getattr(rule, name)
    known = isinstance(value, Integral) and not isinstance(value, bool)
    if not known or not low <= value < 2**31:
        raise RuleError(
            f"{type(rule).__name__}: {name} must be an integer from {low} to 2**31 - 1,"
            f" got {value!r}"
        )
    object.__setattr__(rule, name, int(value))


def check_scales(rule: Rule) -> None:
    """Refuse scales outside float32's normal range or out of order, and a bad skip limit."""
    for name in ("min_scale", "max_scale", "init_scale"):
        check_number(
            rule, name, MIN_SCALE, F32_MAX, "between 2**-126 and float32's largest (3.4e38)"
        )
    if not rule.min_scale <= rule.init_scale <= rule.max_scale:
        raise RuleError(
            f"{type(rule).__name__}: min_scale <= init_scale <= max_scale must hold, got"
            f" {rule.min_scale:g}, {rule.init_scale:g}, {rule.max_scale:g}"
        )
    if rule.max_skips_in_a_row is not None:
        check_count(rule, "max_skips_in_a_row", 1)


def head(rule: Rule, xp: Namespace, clean: int, left: int, memory: tuple[int, ...]) -> ScalerState:
    """A fresh state with typed scalars of `xp`."""
    return ScalerState(
        loss_scale=xp.c(rule.init_scale, "f32"),
        clean=xp.c(clean, "i32"),
        left=xp.c(left, "i32"),
        step=xp.c(0, "i32"),
        skipped=xp.c(0, "i32"),
        skipped_in_a_row=xp.c(0, "i32"),
        reason=xp.c(Reason.CLEAN, "i32"),
        fault=xp.c(Fault.NONE, "i32"),
        memory=tuple(xp.c(m, "i32") for m in memory),
    )


@dataclass(frozen=True)
class Static(Rule):
    """A scale that never changes; steps that overflow are skipped all the same.

    Args:
        init_scale: the scale, 2**-126 .. 3.4e38; 1.0 means no scaling, only the check.
        max_skips_in_a_row: fault after that many skipped steps in a row; None for never.

    Raises:
        RuleError: a parameter is outside its range.
    """

    init_scale: float = 1.0
    max_skips_in_a_row: int | None = None

    def __post_init__(self) -> None:
        check_scales(self)

    min_scale = MIN_SCALE
    max_scale = F32_MAX

    def init(self, xp: Namespace = host) -> ScalerState:
        """The state before the first step, in the framework of `xp`."""
        return head(self, xp, clean=0, left=1, memory=())

    def bind_change(self, xp: Namespace) -> Callable[[ScalerState, Any, Signal], Change]:
        """The rule's function with its constants prepared."""
        zero, one = xp.c(0, "i32"), xp.c(1, "i32")
        ok, overflow = xp.c(Reason.CLEAN, "i32"), xp.c(Reason.OVERFLOW, "i32")
        where = xp.where

        def change(state: ScalerState, good: Any, signal: Signal) -> Change:
            return Change(
                state.loss_scale,
                where(good, state.clean + one, zero),
                state.left,
                where(good, ok, overflow),
                zero,
                (),
            )

        return change
