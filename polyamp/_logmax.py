"""`LogMax`: a scale from mean and spread of the logarithm of the gradients' maximum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from polyamp._range import (
    BIT,
    TOP,
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
from polyamp._xp import Namespace, host

_SPREAD = 31
"""Bits beyond which a distance from the mean counts as this many."""
_COUNTED = 1 << 20
_PARTS = 256


@dataclass(frozen=True)
class LogMax(Rule):
    """Scale so that a log-normal gradient maximum rarely overflows: mean + `deviations` sigma.

        x     = log2(amax / scale); on an overflow one bit above what float16 holds at this scale;
                nothing is learnt where amax is 0 or the loss is not finite
        mean += (x - mean) / 2**min(fast, n)           n: doublings of the steps seen
        slow += (x - slow) / 2**min(slow, n)
        var  += ((x - slow)**2 - var) / 2**min(slow, n)
        k     = 16 - mean - deviations * sqrt(var), rounded down, at most k - 1 after an overflow

    In int32 throughout, so that every framework has the same bits; it is offered to be compared
    with `Predictive`, which it does not equal (docs/range.md).

    Args:
        init_scale: scale of the first step.
        min_scale, max_scale: bounds of the scale.
        deviations: standard deviations kept free, 0 to 16, in steps of 1/256.
        fast, slow: logarithms to the base 2 of the steps that mean and spread remember.
        max_skips_in_a_row: fault after that many skipped steps in a row; None for never.

    `ScalerState.memory` is (mean, slow mean, var, steps seen): 2**-16 bits, 2**-20 bits squared.

    Raises:
        RuleError: a parameter is outside its range.

    Source: NVIDIA/OpenSeq2Seq open_seq2seq/optimizers/automatic_loss_scaler.py (LogMaxScaler: in
    floating point, decays 0.99 and 0.999, 3.09 deviations; an overflow counts as 2**16 bits there).
    """

    wants_amax: ClassVar[bool] = True

    init_scale: float = 1.0
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    deviations: float = 3.09
    fast: int = 7
    slow: int = 10
    max_skips_in_a_row: int | None = None

    def __post_init__(self) -> None:
        check_scales(self)
        check_powers_of_two(self, "init_scale", "min_scale", "max_scale")
        check_number(self, "deviations", 0.0, 16.0, "between 0 and 16")
        for name in ("fast", "slow"):
            check_count(self, name, 0)
            check_number(self, name, 0, 16, "between 0 and 16")
            object.__setattr__(self, name, int(getattr(self, name)))

    def init(self, xp: Namespace = host) -> ScalerState:
        """The state before the first step, in the framework of `xp`."""
        return head(self, xp, clean=0, left=1, memory=(0, 0, 0, 0))

    def memory_range(self) -> tuple[tuple[int, int], ...]:
        """Least and largest value of each entry of `ScalerState.memory`."""
        return (-WIDEST, WIDEST), (-WIDEST, WIDEST), (0, _SPREAD**2 << 20), (0, _COUNTED)

    def bind_change(self, xp: Namespace) -> Callable[[ScalerState, Any, Signal], Change]:
        """The rule's function with its constants prepared."""
        where, zero, one = xp.where, xp.c(0, "i32"), xp.c(1, "i32")
        top, bit, whole = xp.c(TOP * BIT, "i32"), xp.c(BIT, "i32"), xp.c(16, "i32")
        log2, log2_floor, power = bind_log2(xp), bind_exponent(xp), bind_power(xp)
        clamp, reason, clean = bind_clamp(self, xp), bind_reason(xp), bind_clean(xp)
        follow, spread = _bind_follow(self, xp), _bind_spread(self, xp)

        def change(state: ScalerState, good: Any, signal: Signal) -> Change:
            k = log2_floor(state.loss_scale)
            normal, level = log2(amax_of(self, signal))
            here = xp.left_shift(k, whole)
            x = where(signal.finite, level, top + bit) - here
            learnt = follow(state.memory, x)
            target = xp.right_shift(top - learnt[0] - spread(learnt[2]), whole)
            target = clamp(where(signal.finite, target, xp.minimum(target, k - one)))
            told = xp.logical_or(normal, xp.logical_not(signal.finite))
            pairs = zip((target, *learnt), (k, *state.memory), strict=True)
            after = [where(told, a, b) for a, b in pairs]
            new, *memory = where_heard(xp, signal, after, (k, *state.memory))
            return Change(
                power(new),
                clean(good, new, k, state.clean),
                state.left,
                reason(good, new, k),
                zero,
                tuple(memory),
            )

        return change


def _bind_follow(rule: LogMax, xp: Namespace) -> Callable[[tuple[Any, ...], Any], tuple[Any, ...]]:
    """`(memory, x) -> memory` after one more level."""
    where, one, log2_floor = xp.where, xp.c(1, "i32"), bind_exponent(xp)
    most, widest, six = xp.c(_COUNTED, "i32"), xp.c(_SPREAD << 10, "i32"), xp.c(6, "i32")
    fast, slow = xp.c(rule.fast, "i32"), xp.c(rule.slow, "i32")
    narrowest, none = xp.c(-(_SPREAD << 10), "i32"), xp.c(0, "i32")

    def follow(memory: tuple[Any, ...], x: Any) -> tuple[Any, ...]:
        mean, middle, var, count = memory
        count = xp.minimum(count + one, most)
        doublings = log2_floor(xp.as_f32(count))
        fewer = xp.minimum(doublings, slow)
        off = xp.right_shift(x - middle, six)
        off = xp.minimum(xp.maximum(where(doublings < one, none, off), narrowest), widest)
        return (
            mean + xp.right_shift(x - mean, xp.minimum(doublings, fast)),
            middle + xp.right_shift(x - middle, fewer),
            var + xp.right_shift(off * off - var, fewer),
            count,
        )

    return follow


def _bind_spread(rule: LogMax, xp: Namespace) -> Callable[[Any], Any]:
    """`var -> deviations * sqrt(var)` in 2**-16 bits; the root bit by bit, rounded down."""
    digits = [xp.c(1 << place, "i32") for place in range(14, -1, -1)]
    zero, parts, two = xp.c(0, "i32"), xp.c(round(rule.deviations * _PARTS), "i32"), xp.c(2, "i32")

    def spread(var: Any) -> Any:
        root = zero
        for digit in digits:
            root = xp.where((root + digit) * (root + digit) <= var, root + digit, root)
        return xp.right_shift(root * parts, two)

    return spread
