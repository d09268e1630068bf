"""Rules that scale by the largest gradient of the last steps: `DelayedScaling`, `TwoPhase`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from polyamp._errors import RuleError
from polyamp._range import (
    BIT,
    TOP,
    UNSET,
    WIDEST,
    amax_of,
    bind_clamp,
    bind_clean,
    bind_exponent,
    bind_log2,
    bind_power,
    bind_reason,
    check_powers_of_two,
    where_heard,
)
from polyamp._scaling import Change, Rule, check_count, check_number, check_scales, head
from polyamp._state import ScalerState, Signal
from polyamp._xp import F32_MAX, Namespace, f32, host

_BLOCKS = 8
_LONGEST = 1 << 20


class History:
    """The largest of the last `length` levels, to an eighth of the length.

    Kept as the maxima of up to 8 blocks of consecutive steps, so that a state is a few integers
    however long the history: the oldest block is dropped whole when a new one begins, and what is
    remembered is between 7/8 of `length` and `length` steps. Exact for lengths up to 8.
    """

    def __init__(self, length: int) -> None:
        self.blocks = min(_BLOCKS, length)
        self.size = -(-length // self.blocks)

    def fresh(self) -> tuple[int, ...]:
        """Steps in the newest block, and the maximum of each block, newest first."""
        return (0, *[UNSET] * self.blocks)

    def bounds(self) -> tuple[tuple[int, int], ...]:
        """Least and largest value of each entry."""
        return ((0, self.size), *[(UNSET, WIDEST)] * self.blocks)

    def bind_push(self, xp: Namespace) -> Callable[[tuple[Any, ...], Any], tuple[Any, ...]]:
        """`(memory, level) -> memory` with one more level."""
        one, size, unset = xp.c(1, "i32"), xp.c(self.size, "i32"), xp.c(UNSET, "i32")
        where = xp.where

        def push(memory: tuple[Any, ...], level: Any) -> tuple[Any, ...]:
            count, *blocks = memory
            full = count >= size
            older = [
                where(full, before, b) for before, b in zip([unset, *blocks], blocks, strict=False)
            ]
            newest = xp.maximum(older[0], level)
            return (where(full, one, count + one), newest, *older[1:])

        return push

    def bind_largest(self, xp: Namespace) -> Callable[[tuple[Any, ...]], Any]:
        """`memory -> largest level`, UNSET before there was one."""

        def largest(memory: tuple[Any, ...]) -> Any:
            top = memory[1]
            for level in memory[2:]:
                top = xp.maximum(top, level)
            return top

        return largest


def _bind_level(rule: Rule, xp: Namespace) -> Callable[[ScalerState, Signal], tuple[Any, Any]]:
    """`(state, signal) -> (scale's level, unscaled largest gradient's level)`.

    The second is UNSET where amax is 0, and on an overflow the least it can have been.
    """
    where, log2 = xp.where, bind_log2(xp)
    top, unset = xp.c(TOP * BIT, "i32"), xp.c(UNSET, "i32")

    def level(state: ScalerState, signal: Signal) -> tuple[Any, Any]:
        _, here = log2(state.loss_scale)
        normal, seen = log2(amax_of(rule, signal))
        finite = where(normal, seen - here, unset)
        return here, where(signal.finite, finite, top - here)

    return level


def _bind_aim(xp: Namespace, margin: int) -> Callable[[Any], Any]:
    """`largest level -> exponent of the scale` that keeps `margin` bits free."""
    room, whole = xp.c((TOP - margin) * BIT, "i32"), xp.c(16, "i32")
    return lambda level: xp.right_shift(room - level, whole)


def _check_history(rule: Rule, margin: Any) -> None:
    name = type(rule).__name__
    check_count(rule, "history", 1)
    check_count(rule, "margin", 0)
    if margin > TOP:
        raise RuleError(f"{name}: margin must be 0 to {TOP} bits, got {margin}")
    if rule.history > _LONGEST:  # type: ignore[attr-defined]
        raise RuleError(f"{name}: history must be at most {_LONGEST} steps")


@dataclass(frozen=True)
class DelayedScaling(Rule):
    """Scale by the largest gradient of the last steps, with a margin.

        x = log2(amax / scale); on an overflow 16 - k, the least it can have been
        k = 16 - margin - max(the last `history` x), rounded down, at most k - 1 after an overflow

    Nothing changes where the loss is not finite; a gradient of zeros fills its place in the
    history and says nothing. Levels are int32, so every framework has the same bits.

    Args:
        init_scale: scale of the first step.
        min_scale, max_scale: bounds of the scale.
        history: steps remembered, 1 to 2**20; above 8, between 7/8 of it and all of it.
        margin: whole bits kept free, 0 to 16.
        max_skips_in_a_row: fault after that many skipped steps in a row; None for never.

    `ScalerState.memory` is `History`'s: steps in the newest block, then each block's largest level.

    Raises:
        RuleError: a parameter is outside its range.

    Source: NVIDIA/TransformerEngine transformer_engine/common/recipe/__init__.py (DelayedScaling,
    there per tensor and for float8).
    """

    wants_amax: ClassVar[bool] = True

    init_scale: float = 2.0**16
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**100
    history: int = 1024
    margin: int = 1
    max_skips_in_a_row: int | None = None

    def __post_init__(self) -> None:
        check_scales(self)
        check_powers_of_two(self, "init_scale", "min_scale", "max_scale")
        _check_history(self, self.margin)

    def init(self, xp: Namespace = host) -> ScalerState:
        """The state before the first step, in the framework of `xp`."""
        return head(self, xp, clean=0, left=1, memory=History(self.history).fresh())

    def memory_range(self) -> tuple[tuple[int, int], ...]:
        """Least and largest value of each entry of `ScalerState.memory`."""
        return History(self.history).bounds()

    def bind_change(self, xp: Namespace) -> Callable[[ScalerState, Any, Signal], Change]:
        """The rule's function with its constants prepared."""
        where, zero, one, unset = xp.where, xp.c(0, "i32"), xp.c(1, "i32"), xp.c(UNSET, "i32")
        history, level, aim = (
            History(self.history),
            _bind_level(self, xp),
            _bind_aim(xp, self.margin),
        )
        push, largest = history.bind_push(xp), history.bind_largest(xp)
        clamp, log2_floor, power = bind_clamp(self, xp), bind_exponent(xp), bind_power(xp)
        reason, clean = bind_reason(xp), bind_clean(xp)

        def change(state: ScalerState, good: Any, signal: Signal) -> Change:
            k = log2_floor(state.loss_scale)
            _, x = level(state, signal)
            seen = push(state.memory, x)
            top = largest(seen)
            target = where(top > unset, aim(top), k)
            new = clamp(where(signal.finite, target, xp.minimum(target, k - one)))
            new, *memory = where_heard(xp, signal, (new, *seen), (k, *state.memory))
            return Change(
                power(new),
                clean(good, new, k, state.clean),
                state.left,
                reason(good, new, k),
                zero,
                tuple(memory),
            )

        return change


@dataclass(frozen=True)
class TwoPhase(Rule):
    """Explore upwards, then keep a margin above the largest gradient of the last steps.

        exploring, a clean step:   scale *= growth_factor
        exploring, an overflow:    scale *= backoff_factor; the stable phase begins, unless literal
        after `explore_steps` steps the stable phase begins
        stable, a clean step:      scale = 2**(16 - margin - max(the last `history` x)), rounded
                                   down; x = log2(amax / scale)
        stable, an overflow:       scale *= backoff_factor

    Nothing changes where the loss is not finite.

    Args:
        init_scale: scale of the first step.
        min_scale, max_scale: bounds of the scale.
        growth_factor: of the exploring phase, above 1.
        backoff_factor: below 1.
        explore_steps: most steps of exploration.
        history: steps remembered; above 8, between 7/8 of it and all of it.
        margin: whole bits kept free in the stable phase; literal keeps none.
        literal: the rule as it was first proposed, for comparison: exploration goes on through
            overflows for all of `explore_steps`, and most of its steps are lost.
        max_skips_in_a_row: fault after that many skipped steps in a row; None for never.

    `ScalerState.memory` is (steps explored, -1 in the stable phase; then `History`'s).

    Raises:
        RuleError: a parameter is outside its range.

    Source: worked out for polyamp; docs/range.md has the comparison.
    """

    wants_amax: ClassVar[bool] = True

    init_scale: float = 2.0**16
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**100
    growth_factor: float = 1.5
    backoff_factor: float = 0.5
    explore_steps: int = 1000
    history: int = 100
    margin: int = 3
    literal: bool = False
    max_skips_in_a_row: int | None = None

    def __post_init__(self) -> None:
        check_scales(self)
        check_powers_of_two(self, "min_scale", "max_scale")
        check_number(self, "growth_factor", 1.0, F32_MAX, "above 1 and finite")
        check_number(self, "backoff_factor", 2.0**-126, 1.0, "at least 2**-126 and below 1")
        if f32(self.growth_factor) == 1.0 or f32(self.backoff_factor) == 1.0:
            raise RuleError("TwoPhase: growth_factor must be above 1, backoff_factor below 1")
        check_count(self, "explore_steps", 1)
        _check_history(self, self.margin)
        if type(self.literal) is not bool:
            raise RuleError(f"TwoPhase: literal must be True or False, got {self.literal!r}")

    def init(self, xp: Namespace = host) -> ScalerState:
        """The state before the first step, in the framework of `xp`."""
        return head(self, xp, clean=0, left=1, memory=(0, *History(self.history).fresh()))

    def memory_range(self) -> tuple[tuple[int, int], ...]:
        """Least and largest value of each entry of `ScalerState.memory`."""
        return ((-1, self.explore_steps), *History(self.history).bounds())

    def bind_change(self, xp: Namespace) -> Callable[[ScalerState, Any, Signal], Change]:
        """The rule's function with its constants prepared."""
        where, zero, one, stable = xp.where, xp.c(0, "i32"), xp.c(1, "i32"), xp.c(-1, "i32")
        history, unset, steps = History(self.history), xp.c(UNSET, "i32"), self.explore_steps
        level, aim = _bind_level(self, xp), _bind_aim(xp, 0 if self.literal else self.margin)
        push, largest = history.bind_push(xp), history.bind_largest(xp)
        clamp, power, last = bind_clamp(self, xp), bind_power(xp), xp.c(steps - 1, "i32")
        reason, clean = bind_reason(xp), bind_clean(xp)
        low, high = xp.c(self.min_scale, "f32"), xp.c(self.max_scale, "f32")
        growth, backoff = xp.c(self.growth_factor, "f32"), xp.c(self.backoff_factor, "f32")

        def change(state: ScalerState, good: Any, signal: Signal) -> Change:
            scale, (explored, *kept) = state.loss_scale, state.memory
            seen = push(tuple(kept), where(signal.finite, level(state, signal)[1], unset))
            goes_on = (explored > stable) & (explored < last)
            if not self.literal:
                goes_on = goes_on & signal.finite
            top = largest(seen)
            known = where(top > unset, power(clamp(aim(top))), scale)
            grown = xp.minimum(xp.multiply(scale, growth), high)
            cut = xp.maximum(xp.multiply(scale, backoff), low)
            new = where(signal.finite, where(goes_on, grown, known), cut)
            after = (new, where(goes_on, explored + one, stable), *seen)
            new, *memory = where_heard(xp, signal, after, (scale, *state.memory))
            return Change(
                new,
                clean(good, new, scale, state.clean),
                state.left,
                reason(good, new, scale),
                zero,
                tuple(memory),
            )

        return change
