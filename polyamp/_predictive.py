"""`Predictive`: a scale that follows a model of the gradients' range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from polyamp._errors import RuleError
from polyamp._range import (
    BIT,
    FLUSHED,
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
    exponent,
    where_heard,
)
from polyamp._scaling import Change, Rule, check_count, check_scales, head
from polyamp._state import Fault, ScalerState, Signal
from polyamp._xp import Namespace, host

_NEAR = BIT // 4
_RELEASE = 164
"""0.0025 bit."""
_CHARGE = 2 * BIT
_MOST = 12 * BIT
_SHIFT = 3
_UNSEEN = -9
_FEW, _MANY = 0.02, 0.08


@dataclass(frozen=True)
class Predictive(Rule):
    """Predict the largest gradient, and keep the scale as high as float16 then allows.

    Logarithms to the base 2 as int32 with 16 bits after the point; no other arithmetic, so that
    every framework has the same bits. scale = 2**k, p: level of the largest unscaled gradient,
    q: margin, c: overflows in a row, seen: whether a finite nonzero gradient was ever seen.

        loss not finite:   nothing changes                        (no scale mends a forward NaN)
        overflow:          x = (16 - k) + min(2 << min(c, 4), 16)   at least 16 - k; imputed above
                           q = min(q + 2, 12)                       if c = 0 and seen
                           c = min(c + 1, 4)
        amax normal:       x = log2(amax) - k                       within 0.086, from the bits
                           if p is set and c = 0:
                               q = min(q + 1/4, 12)                 if x > p + q: a near miss
                               q = max(q - r, 0)                    else; r = 0 below 2 % underflow,
                                                                    0.0025 below 8 % or unknown,
                                                                    0.02 above; measured on every
                                                                    n-th step only: n r there, 0
                                                                    between
                           p = x                                    if c > 0
                           c = 0, seen = 1
        amax 0, subnormal: x = -27 - k, at least -9 before anything was seen
        p = x if p is unset or x > p else p - (p - x) / 8           fast attack, slow release
        k = 16 - guard - q - p, rounded down, at most k - 1 after an overflow, within the bounds

    Args:
        init_scale: scale of the first step; almost irrelevant.
        min_scale, max_scale: bounds of the scale.
        guard: whole bits kept free between the predicted largest gradient and float16's end. Add
            ceil(log2 N) where N micro-batches are summed, not averaged, in float16.
        sub_interval: measure `Signal.sub`, the share of underflow, on every such step; 0 for never.
            Without it the margin shrinks all the time, whether something is flushed or not, and
            there are more overflows; with it a step in so many has one more pass over the
            gradients. `rule="auto"` is this rule with `sub_interval=64`.
        at_floor: "clamp" keeps going at `min_scale`; "fault" faults on an overflow there.
        max_skips_in_a_row: fault after that many skipped steps in a row; None for never.
        per_module: modules get powers of two of their own where their gradients span more bits
            than one scale covers. The rule itself decides as without; who has the model acts on
            it: `polyamp.torch.GradScaler(rule=..., model=model)` and `Trainer`.

    All scales are powers of two. The rule asks for `Signal.amax`, the largest gradient as it came,
    and uses `Signal.sub` where it is known. `ScalerState.memory` is
    (p, q, c, seen).

    Raises:
        RuleError: a parameter is outside its range.

    Source: worked out for polyamp; docs/range.md has the measurements.
    """

    wants_amax: ClassVar[bool] = True

    init_scale: float = 2.0**12
    min_scale: float = 2.0**-32
    max_scale: float = 2.0**100
    guard: int = 1
    sub_interval: int = 0
    at_floor: Literal["clamp", "fault"] = "clamp"
    max_skips_in_a_row: int | None = None
    per_module: bool = False

    def __post_init__(self) -> None:
        check_scales(self)
        check_powers_of_two(self, "init_scale", "min_scale", "max_scale")
        check_count(self, "guard", 0)
        check_count(self, "sub_interval", 0)
        if not isinstance(self.per_module, bool):
            raise RuleError(f"Predictive: per_module must be a bool, got {self.per_module!r}")
        if self.guard > TOP:
            raise RuleError(f"Predictive: guard must be 0 to {TOP} bits, got {self.guard}")
        if self.at_floor not in ("clamp", "fault"):
            raise RuleError(
                f"Predictive: at_floor must be 'clamp' or 'fault', got {self.at_floor!r}"
            )

    def can_fault(self) -> bool:
        """Whether this rule can ever set `ScalerState.fault`."""
        return self.at_floor == "fault" or self.max_skips_in_a_row is not None

    def init(self, xp: Namespace = host) -> ScalerState:
        """The state before the first step, in the framework of `xp`."""
        return head(self, xp, clean=0, left=1, memory=(UNSET, 2 * BIT, 0, 0))

    def memory_range(self) -> tuple[tuple[int, int], ...]:
        """Least and largest value of each entry of `ScalerState.memory`."""
        return ((UNSET, WIDEST), (0, _MOST), (0, 4), (0, 1))

    def bind_change(self, xp: Namespace) -> Callable[[ScalerState, Any, Signal], Change]:
        """The rule's function with its constants prepared."""
        where, zero, one = xp.where, xp.c(0, "i32"), xp.c(1, "i32")
        low, fault = xp.c(exponent(self.min_scale), "i32"), xp.c(Fault.AT_FLOOR, "i32")
        faults = self.at_floor == "fault"
        observed, aim = _bind_observe(self, xp), _bind_aim(xp, self.guard)
        clamp, log2_floor, power = bind_clamp(self, xp), bind_exponent(xp), bind_power(xp)
        reason, clean = bind_reason(xp), bind_clean(xp)

        def learnt(state: ScalerState, k: Any, signal: Signal) -> tuple[Any, ...]:
            """(new k, p, q, c, seen), whatever the loss."""
            p, q, c, seen = observed(k, state.memory, signal)
            target = aim(p, q)
            target = where(signal.finite, target, xp.minimum(target, k - one))
            return clamp(target), p, q, c, seen

        def change(state: ScalerState, good: Any, signal: Signal) -> Change:
            k = log2_floor(state.loss_scale)
            trouble = where(xp.logical_not(signal.finite) & (k <= low), fault, zero)
            after = (trouble, *learnt(state, k, signal))
            trouble, new, *memory = where_heard(xp, signal, after, (zero, k, *state.memory))
            return Change(
                power(new),
                clean(good, new, k, state.clean),
                state.left,
                reason(good, new, k),
                trouble if faults else zero,
                tuple(memory),
            )

        return change


def _bind_observe(
    rule: Predictive, xp: Namespace
) -> Callable[[Any, tuple[Any, ...], Signal], tuple[Any, ...]]:
    """`(k, memory, signal) -> (p, q, c, seen)` after a step whose loss is finite."""
    where = xp.where
    zero, one, two, four = (xp.c(n, "i32") for n in (0, 1, 2, 4))
    top, unset, whole = (xp.c(n, "i32") for n in (TOP, UNSET, 16))
    flushed, unseen, imputed_most = (xp.c(n * BIT, "i32") for n in (FLUSHED, _UNSEEN, 16))
    near, charge, most, shift = (xp.c(n, "i32") for n in (_NEAR, _CHARGE, _MOST, _SHIFT))
    release, log2 = _bind_release(xp, rule.sub_interval), bind_log2(xp)

    def observed(k: Any, memory: tuple[Any, ...], signal: Signal) -> tuple[Any, ...]:
        (p, q, c, seen), finite = memory, signal.finite
        level = xp.left_shift(k, whole)
        normal, seen_at = log2(amax_of(rule, signal))
        known = finite & normal
        imputed = xp.minimum(
            xp.left_shift(xp.left_shift(two, xp.minimum(c, four)), whole), imputed_most
        )
        low = flushed - level
        x = where(
            finite,
            where(
                known,
                seen_at - level,
                where(seen > zero, low, xp.maximum(low, unseen)),
            ),
            xp.left_shift(top - k, whole) + imputed,
        )
        fresh = c < one
        missed = xp.minimum(q + near, most)
        calm = xp.maximum(q - release(signal.sub), zero)
        learnt = where((p > unset) & fresh, where(x > p + q, missed, calm), q)
        charged = where((seen > zero) & fresh, xp.minimum(q + charge, most), q)
        new_q = where(finite, where(known, learnt, q), charged)
        jump = (p <= unset) | (x > p) | (known & (c > zero))
        new_p = where(jump, x, p - xp.right_shift(p - x, shift))
        new_c = where(finite, where(known, zero, c), xp.minimum(c + one, four))
        return new_p, new_q, new_c, where(known, one, seen)

    return observed


def _bind_release(xp: Namespace, interval: int) -> Callable[[Any], Any]:
    """Underflow share -> what the margin shrinks by in a calm step; the share is measured on every
    `interval`-th one (0: given or not, as it comes)."""
    steps = min(max(interval, 1), _MOST // _RELEASE)
    none, slow, fast = (xp.c(n * steps * _RELEASE, "i32") for n in (0, 1, 8))
    blind = none if interval > 1 else slow
    unknown, few, many = xp.c(0.0, "f32"), xp.c(_FEW, "f32"), xp.c(_MANY, "f32")

    def release(sub: Any) -> Any:
        known = xp.where(sub < few, none, xp.where(sub < many, slow, fast))
        return xp.where(sub < unknown, blind, known)

    return release


def _bind_aim(xp: Namespace, guard: int) -> Callable[[Any, Any], Any]:
    """Level and margin -> exponent of the scale."""
    room, whole = xp.c((TOP - guard) * BIT, "i32"), xp.c(16, "i32")
    return lambda p, q: xp.right_shift(room - q - p, whole)
