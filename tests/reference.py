"""A slow loss scaler to judge the real one by: plain if and else, a mutable object, numpy float32.

Written from the rules' docstrings and from the behaviour of the imitated systems, with nothing
taken from `polyamp`: reasons and faults are the plain numbers of the state's documentation.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

CLEAN, GREW, OVERFLOW, TOLERATED, FLOOR, LOSS_NOT_FINITE = range(6)
NO_FAULT, AT_FLOOR, MAX_SKIPS = range(3)


def product(a: float, b: float) -> float:
    """a * b with both factors and the result rounded to float32."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(a) * np.float32(b))


class SlowScaler:
    """The oracle for one `Dynamic` or `Static` rule; `step` it and look at `state`."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.never_changes = type(rule).__name__ == "Static"
        self.scale = float(np.float32(rule.init_scale))
        self.streak = 0
        self.first_window = True
        self.lives = 1 if self.never_changes else rule.hysteresis
        self.window = 1 if self.never_changes else min(rule.growth_interval, 2**24)
        self.since_change = 0
        self.overflows = 0
        self.steps = self.skipped = self.row = 0
        self.reason, self.fault = CLEAN, NO_FAULT

    def step(self, finite: bool, loss_finite: bool = True) -> None:
        self.steps += 1
        trouble = NO_FAULT
        if finite and loss_finite:
            self.row = 0
            self.reason = self._clean_step()
        else:
            self.row += 1
            self.skipped += 1
            self.reason, trouble = self._overflow()
        if not loss_finite:
            self.reason = LOSS_NOT_FINITE
        limit = self.rule.max_skips_in_a_row
        if limit is not None and self.row >= limit:
            trouble = MAX_SKIPS
        if self.fault == NO_FAULT:
            self.fault = trouble

    def _clean_step(self) -> int:
        self.streak += 1
        if self.never_changes:
            return CLEAN
        rule = self.rule
        self.since_change += 1
        if rule.hysteresis_refill == "clean":
            self.lives = rule.hysteresis
        if rule.window_follows_scale:
            due = self.streak % self.window == 0
        else:
            late = 1 if rule.late_first_window and self.first_window else 0
            due = self.streak >= rule.growth_interval + late
        if not due:
            return CLEAN
        self.lives = rule.hysteresis
        self.since_change = 0
        if rule.window_follows_scale:
            self.window = min(self.window * int(rule.growth_factor), 2**24)
        else:
            self.streak = 0
            self.first_window = False
        before = self.scale
        self.scale = self._grown()
        return GREW if self.scale > before else CLEAN

    def _grown(self) -> float:
        up = product(self.scale, self.rule.growth_factor)
        ceiling = np.float32(self.rule.max_scale)
        if self.rule.max_scale == float(np.finfo(np.float32).max):
            return up if np.isfinite(up) else self.scale
        if self.scale >= ceiling:
            return self.scale
        return min(up, float(ceiling))

    def _overflow(self) -> tuple[int, int]:
        if self.never_changes:
            self.streak = 0
            return OVERFLOW, NO_FAULT
        if self.lives > 1:
            self.lives -= 1
            self._note_overflow()
            return TOLERATED, NO_FAULT
        tolerance = Fraction(round(self.rule.tolerance * 1000), 1000)
        if Fraction(self.overflows + 1, self.since_change + 1) < tolerance:
            self._note_overflow()
            return TOLERATED, NO_FAULT
        return self._cut()

    def _note_overflow(self) -> None:
        self.streak, self.first_window = 0, True
        self.since_change += 1
        self.overflows += 1

    def _cut(self) -> tuple[int, int]:
        rule, floor = self.rule, float(np.float32(self.rule.min_scale))
        bare = new = product(self.scale, rule.backoff_factor)
        if rule.threshold is not None:
            new = max(bare, float(np.float32(rule.threshold)))
        if rule.at_floor == "fault":
            met = self.scale if rule.fault_when == "at_floor" else new
            if met <= floor:
                return FLOOR, AT_FLOOR
        if new < floor:
            new = self.scale if rule.at_floor == "hold" else floor
        self.scale = new
        self.streak, self.first_window = 0, True
        self.since_change = self.overflows = 0
        if rule.window_follows_scale:
            self.window = max(self.window // int(rule.growth_factor), 1)
        return (FLOOR if new > bare else OVERFLOW), NO_FAULT

    @property
    def state(self) -> tuple[Any, ...]:
        """The fields of `polyamp.ScalerState`, in order, as Python numbers."""
        memory: tuple[int, ...] = ()
        clean = self.streak
        if not self.never_changes:
            if self.rule.tolerance:
                memory += (self.since_change, self.overflows)
            if self.rule.window_follows_scale:
                memory += (self.window,)
            if self.rule.late_first_window and self.first_window:
                clean -= 1
        counts = (clean, self.lives, self.steps, self.skipped, self.row, self.reason, self.fault)
        return (self.scale, *counts, memory)
