"""Sequences of signals, the states the core makes of them, and the first difference.

The expected states are the core's own on Python numbers (`polyamp.host`); nothing here knows a
framework.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from polyamp._scaling import Rule, bind
from polyamp._state import ScalerState, Signal
from polyamp._xp import F32_MAX, f32

SUBNORMAL = 2.0**-140
SHARES = (-1.0, -1.0, 0.0, 0.02 - 2**-29, 0.02, 0.05, 0.08 - 2**-27, 0.08, 1.0)
"""Of underflow: unknown, and at and below the thresholds of `Predictive`."""


class Signals(NamedTuple):
    """What T steps measured, one list entry a step."""

    finite: list[bool]
    """Whether the gradients are finite."""
    loss_finite: list[bool]
    """Whether the forward loss is finite."""
    amax: list[float] | None = None
    """f32: largest |gradient| as it came; None for rules that do not want it."""
    sub: list[float] | None = None
    """f32: share of underflow, -1 where it is not known; None where `amax` is."""

    def at(self, step: int) -> Signal:
        """The signal of one step, in Python numbers."""
        signal = Signal(self.finite[step], self.loss_finite[step])
        if self.amax is None or self.sub is None:
            return signal
        return signal._replace(amax=self.amax[step], sub=self.sub[step])

    def padded(self, steps: int) -> Signals:
        """The same, prolonged by clean steps to `steps` in all."""
        more = steps - len(self.finite)
        return Signals(
            self.finite + [True] * more,
            self.loss_finite + [True] * more,
            None if self.amax is None else self.amax + [1.0] * more,
            None if self.sub is None else self.sub + [-1.0] * more,
        )


class Difference(NamedTuple):
    """Where two traces part for the first time."""

    step: int
    """From 1."""
    field: str
    """Of the state, or "weights"."""
    expected: str
    got: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.field}: expected {self.expected}, got {self.got}"


def events(seed: int, steps: int) -> list[bool]:
    """Whether each step is clean: growth stretches, single overflows and bursts."""
    dice = random.Random(seed)
    flags: list[bool] = []
    while len(flags) < steps:
        flags += [True] * dice.randrange(1, 12) + [False] * dice.choice([1, 1, 2, 4])
    return flags[:steps]


def from_flags(overflows: Sequence[int], rule: Rule) -> Signals:
    """Signals from a list of 0 (clean) and 1 (overflow), with a plain amax where it is wanted."""
    finite = [not o for o in overflows]
    amax = [1.0 if good else float("inf") for good in finite]
    return _for(rule, finite, [True] * len(finite), amax, [-1.0] * len(finite))


def _for(
    rule: Rule,
    finite: list[bool],
    loss_finite: list[bool],
    amax: list[float],
    sub: list[float],
) -> Signals:
    return Signals(finite, loss_finite, *((amax, sub) if rule.wants_amax else ()))


def random_signals(rule: Rule, seed: int, steps: int) -> Signals:
    """Random signals for `rule`: the same for the same arguments, everywhere.

    Clean stretches long enough for growth, single overflows, bursts that reach a floor, losses that
    are not finite; amax anywhere in 2**-60 .. 2**60, and now and then 0, subnormal or 3e38.
    """
    dice = random.Random(f"{seed} {steps}")
    finite: list[bool] = []
    while len(finite) < steps:
        finite += [True] * dice.choice([1, 2, 3, 5, 8, 13, 40])
        finite += [False] * dice.choice([1, 1, 1, 2, 4, 24])
    finite = finite[:steps]
    loss_finite = [dice.random() > (0.01 if good else 0.2) for good in finite]
    amax = [_amax(dice, good) for good in finite]
    sub = [f32(dice.choice(SHARES)) for _ in finite]
    return _for(rule, finite, loss_finite, amax, sub)


def _amax(dice: random.Random, good: bool) -> float:
    if not good and dice.random() < 0.7:  # else the maximum has dropped a NaN, as XLA's does
        return dice.choice([float("inf"), float("nan")])
    if dice.random() < 0.05:
        return f32(dice.choice([0.0, SUBNORMAL, 3e38, F32_MAX]))
    return f32(2.0 ** dice.uniform(-60, 60))


def expected(rule: Rule, signals: Signals, state: ScalerState | None = None) -> list[ScalerState]:
    """The core's state after each step, in Python numbers.

    Args:
        rule: the rule in force.
        signals: of T steps.
        state: before the first of them; None: fresh.
    """
    step, states = bind(rule), []
    state = rule.init() if state is None else state
    for number in range(len(signals.finite)):
        state = step(state, signals.at(number))
        states.append(state)
    return states


def stacked(states: Sequence[ScalerState]) -> ScalerState:
    """States in numbers or 0-d numpy values as one state of arrays: f32 and i32, [T, ...]."""
    import numpy as np

    *head, memory = zip(*states, strict=True)
    arrays = [np.asarray(v, np.int32 if i else np.float32) for i, v in enumerate(head)]
    kept = tuple(np.asarray(v, np.int32) for v in zip(*memory, strict=True))
    return ScalerState._make([*arrays, kept])


def first_difference(
    got: ScalerState, want: Sequence[ScalerState], ignore: Sequence[str] = ()
) -> Difference | None:
    """The first step at which a trace is not the expected one, bit for bit; None if there is none.

    Args:
        got: arrays of T entries: f32 `loss_scale`, i32 all else.
        want: T states in Python numbers.
        ignore: fields that are not compared.
    """
    import numpy as np

    found: list[Difference] = []
    for name, have, right in _fields(got, stacked(want)):
        if name in ignore:
            continue
        have = np.asarray(have)
        if (have.dtype, have.shape) != (right.dtype, right.shape):
            kinds = [f"{a.dtype} {list(a.shape)}" for a in (right, have)]
            return Difference(1, name, *kinds)
        unequal = have.view(np.int32) != right.view(np.int32)
        steps = np.flatnonzero(unequal.reshape(len(right), -1).any(axis=1))
        if steps.size:
            at = int(steps[0])
            found.append(
                Difference(at + 1, name, repr(right[at].tolist()), repr(have[at].tolist()))
            )
    return min(found, key=lambda difference: difference.step, default=None)


def _fields(got: ScalerState, want: ScalerState) -> list[tuple[str, Any, Any]]:
    names = [*ScalerState._fields[:-1], *(f"memory[{i}]" for i in range(len(want.memory)))]
    return list(zip(names, [*got[:-1], *got.memory], [*want[:-1], *want.memory], strict=True))
