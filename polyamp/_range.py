"""Logarithms to the base 2 in int32 with 16 bits after the point: all the arithmetic that rules
which follow the gradients' range need, with the same bits in every framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from polyamp._errors import RuleError
from polyamp._scaling import Rule
from polyamp._state import Reason, Signal
from polyamp._xp import Namespace

BIT = 1 << 16
"""One bit, a factor of two."""
UNSET = -(1 << 30)
"""A level nobody has seen yet."""
WIDEST = 1 << 25
"""No level of a float32 divided by a scale is larger."""
TOP = 16
"""Bits from 1 to the first number that float16 cannot hold."""
FLUSHED = -27
"""Level, in bits, of a largest entry that float16 flushes to zero."""
_NORMAL = 0x00800000
"""The bits of the smallest normal float32: what is below counts as 0."""


def exponent(scale: float) -> int:
    """k of 2**k <= scale < 2**(k + 1)."""
    return math.frexp(scale)[1] - 1


def check_powers_of_two(rule: Rule, *names: str) -> None:
    """Refuse scales that are no powers of two."""
    for name in names:
        value = getattr(rule, name)
        if math.frexp(value)[0] != 0.5:
            raise RuleError(f"{type(rule).__name__}: {name} must be a power of two, got {value!r}")


def amax_of(rule: Rule, signal: Signal) -> Any:
    """`signal.amax`.

    Raises:
        RuleError: it was not measured.
    """
    if signal.amax is None:
        raise RuleError(
            f"{type(rule).__name__} needs Signal.amax, the largest |gradient| as it came"
            " (inspect(..., amax=True)); got None"
        )
    return signal.amax


def where_heard(xp: Namespace, signal: Signal, new: Any, old: Any) -> tuple[Any, ...]:
    """`new` where the forward loss is finite, else `old`: no scale mends a forward NaN."""
    loss_finite = signal.loss_finite
    if loss_finite is True or loss_finite is False:
        return tuple(new if loss_finite else old)
    return tuple(xp.where(loss_finite, n, o) for n, o in zip(new, old, strict=True))


def bind_log2(xp: Namespace) -> Callable[[Any], tuple[Any, Any]]:
    """`f32 -> (normal, log2)`: whether it counts as a number above 0, and its level.

    The level is exact at powers of two and at most 0.086 bit too small between them.
    """
    normal, half, bias = xp.c(_NORMAL, "i32"), xp.c(7, "i32"), xp.c(127 * BIT, "i32")

    def log2(value: Any) -> tuple[Any, Any]:
        bits = xp.bits(value)
        return bits >= normal, xp.right_shift(bits, half) - bias

    return log2


def bind_exponent(xp: Namespace) -> Callable[[Any], Any]:
    """`f32 -> k` of 2**k <= f32 < 2**(k + 1), of positive normal numbers."""
    bias, mantissa = xp.c(127, "i32"), xp.c(23, "i32")
    return lambda value: xp.right_shift(xp.bits(value), mantissa) - bias


def bind_power(xp: Namespace) -> Callable[[Any], Any]:
    """`k -> 2**k` as f32, by its bits."""
    bias, mantissa = xp.c(127, "i32"), xp.c(23, "i32")
    return lambda k: xp.from_bits(xp.left_shift(k + bias, mantissa))


def bind_clamp(rule: Rule, xp: Namespace) -> Callable[[Any], Any]:
    """`k -> k` within the exponents of the rule's bounds."""
    low, high = (xp.c(exponent(s), "i32") for s in (rule.min_scale, rule.max_scale))
    return lambda k: xp.minimum(xp.maximum(k, low), high)


def bind_reason(xp: Namespace) -> Callable[[Any, Any, Any], Any]:
    """`(good, new scale, old scale) -> Reason`, for scales or their exponents."""
    where = xp.where
    clean, grew, lowered, overflow, floor = (
        xp.c(r, "i32")
        for r in (Reason.CLEAN, Reason.GREW, Reason.LOWERED, Reason.OVERFLOW, Reason.FLOOR)
    )

    def reason(good: Any, new: Any, old: Any) -> Any:
        applied = where(new > old, grew, where(new < old, lowered, clean))
        return where(good, applied, where(new < old, overflow, floor))

    return reason


def bind_clean(xp: Namespace) -> Callable[[Any, Any, Any, Any], Any]:
    """`(good, new scale, old scale, clean) -> clean steps since the last change of scale`."""
    zero, one = xp.c(0, "i32"), xp.c(1, "i32")

    def clean(good: Any, new: Any, old: Any, count: Any) -> Any:
        return xp.where(good & (new <= old) & (new >= old), count + one, zero)

    return clean
