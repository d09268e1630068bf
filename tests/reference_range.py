"""Slow versions of the rules that follow the gradients' range: if and else on Python integers.

Written from the rules' docstrings, with nothing taken from `polyamp`. Levels are in 2**-16 bits.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

BIT = 65536
UNSET = -(2**30)


def f32_bits(value: float) -> int:
    with np.errstate(over="ignore"):
        return int(np.float32(value).view(np.int32))


def log2(value: float) -> int | None:
    """The level of an f32; None where it counts as 0."""
    bits = f32_bits(value)
    return None if bits & 0x7F800000 == 0 else (bits >> 7) - 127 * BIT


def power(scale: float) -> int:
    """The exponent of a power of two."""
    return (f32_bits(scale) >> 23) - 127


class SlowPredictive:
    """The oracle of `polyamp.Predictive`."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.low, self.high = power(rule.min_scale), power(rule.max_scale)
        self.k = power(rule.init_scale)
        self.p: int | None = None
        self.q, self.c, self.seen = 2 * BIT, 0, False

    def step(self, finite: bool, amax: float, sub: float = -1.0, loss_finite: bool = True) -> None:
        if not loss_finite:
            return
        if not finite:
            x = (16 - self.k) * BIT + min(2 << min(self.c, 4), 16) * BIT
            if self.c == 0 and self.seen:
                self.q = min(self.q + 2 * BIT, 12 * BIT)
            self.c = min(self.c + 1, 4)
            self._note(x)
        elif (level := log2(amax)) is not None:
            x = level - self.k * BIT
            after_overflow = self.c > 0
            if self.p is not None and not after_overflow:
                self._adjust_margin(x, sub)
            self.c, self.seen = 0, True
            if after_overflow:
                self.p = x
            else:
                self._note(x)
        else:
            x = (-27 - self.k) * BIT
            self._note(x if self.seen else max(x, -9 * BIT))
        assert self.p is not None
        target = (15 * BIT + (1 - self.rule.guard) * BIT - self.q - self.p) >> 16
        if not finite:
            target = min(target, self.k - 1)
        self.k = min(max(target, self.low), self.high)

    def _adjust_margin(self, x: int, sub: float) -> None:
        assert self.p is not None
        if x > self.p + self.q:
            self.q = min(self.q + BIT // 4, 12 * BIT)
        elif sub < 0:
            self.q = max(self.q - (0 if self.rule.sub_interval > 1 else 164), 0)
        elif np.float32(sub) >= np.float32(0.02):
            calm = 164 if np.float32(sub) < np.float32(0.08) else 8 * 164
            self.q = max(self.q - max(self.rule.sub_interval, 1) * calm, 0)

    def _note(self, x: int) -> None:
        if self.p is None or x > self.p:
            self.p = x
        else:
            self.p -= (self.p - x) >> 3

    @property
    def scale(self) -> float:
        return 2.0**self.k

    @property
    def memory(self) -> tuple[int, ...]:
        return (UNSET if self.p is None else self.p, self.q, self.c, int(self.seen))


class SlowDelayed:
    """The oracle of `polyamp.DelayedScaling`: a list of blocks of at most an eighth."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.k = power(rule.init_scale)
        blocks = min(8, rule.history)
        self.size = -(-rule.history // blocks)
        self.blocks: deque[list[int | None]] = deque([[]], maxlen=blocks)

    def step(self, finite: bool, amax: float, sub: float = -1.0, loss_finite: bool = True) -> None:
        if not loss_finite:
            return
        level = log2(amax) if finite else None
        x = (16 - self.k) * BIT if not finite else None if level is None else level - self.k * BIT
        if len(self.blocks[-1]) == self.size:
            self.blocks.append([])
        self.blocks[-1].append(x)
        known = [v for block in self.blocks for v in block if v is not None]
        target = ((16 - self.rule.margin) * BIT - max(known)) >> 16 if known else self.k
        if not finite:
            target = min(target, self.k - 1)
        self.k = min(max(target, power(self.rule.min_scale)), power(self.rule.max_scale))

    @property
    def scale(self) -> float:
        return 2.0**self.k


class SlowTwoPhase:
    """The oracle of `polyamp.TwoPhase`."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.scale = float(np.float32(rule.init_scale))
        self.explored, self.exploring = 0, True
        self.history = SlowDelayed(rule)

    def step(self, finite: bool, amax: float, sub: float = -1.0, loss_finite: bool = True) -> None:
        if not loss_finite:
            return
        rule, blocks = self.rule, self.history.blocks
        level, here = log2(amax) if finite else None, log2(self.scale)
        assert here is not None
        if len(blocks[-1]) == self.history.size:
            blocks.append([])
        blocks[-1].append(None if level is None else level - here)
        if self.exploring:
            self.explored += 1
            self.exploring = self.explored < rule.explore_steps and (finite or rule.literal)
        if not finite:
            self.scale = max(self._times(rule.backoff_factor), float(np.float32(rule.min_scale)))
        elif self.exploring:
            self.scale = min(self._times(rule.growth_factor), float(np.float32(rule.max_scale)))
        else:
            known = [v for block in blocks for v in block if v is not None]
            margin = 0 if rule.literal else rule.margin
            if known:
                target = ((16 - margin) * BIT - max(known)) >> 16
                low, high = power(rule.min_scale), power(rule.max_scale)
                self.scale = 2.0 ** min(max(target, low), high)

    def _times(self, factor: float) -> float:
        with np.errstate(over="ignore", under="ignore"):
            return float(np.float32(self.scale) * np.float32(factor))
