"""`Dynamic`: one rule whose parameters cover every counter-based loss scaler in use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from polyamp._errors import RuleError
from polyamp._scaling import (
    MAX_SCALE,
    MIN_SCALE,
    Change,
    Rule,
    check_count,
    check_number,
    check_scales,
    head,
)
from polyamp._state import Fault, Reason, ScalerState, Signal
from polyamp._xp import F32_MAX, Namespace, f32, host

Refill = Literal["growth", "clean"]
AtFloor = Literal["clamp", "hold", "fault"]
FaultWhen = Literal["at_floor", "reaching_floor"]

COUNT_CAP = 2**20
"""Counts in memory are halved above this, so that products with a tolerance fit int32."""
WINDOW_CAP = 2**24
"""No growth window in memory is wider."""
_TOLERANCE_PARTS = 1000


@dataclass(frozen=True)
class Dynamic(Rule):
    """Grow the scale after a run of clean steps, cut it on overflow.

        on a clean step:
            clean += 1
            left   = hysteresis                       if hysteresis_refill == "clean"
            when clean >= growth_interval:            (window_follows_scale: clean % window == 0)
                scale = min(scale * growth_factor, max(max_scale, scale)), unless not finite
                clean = 0, left = hysteresis          (window_follows_scale: window *= factor,
                                                       clean goes on)
        on an overflow:
            clean = -1 if late_first_window else 0
            left > 1:  left -= 1, the scale is spared
            else, if overflows / steps since the last change of scale >= tolerance:
                new = max(scale * backoff_factor, threshold)
                clamp: scale = max(new, min_scale)
                hold:  scale = new, unless new < min_scale
                fault: at_floor: fault if scale <= min_scale, else as clamp
                       reaching_floor: fault if new <= min_scale
                (a fault leaves scale, clean, left and memory as they were)

    Args:
        init_scale: scale of the first step.
        growth_factor: > 1; the scale is multiplied by it at growth. Factors that float32 holds
            exactly give the same bits as the imitated kernels.
        backoff_factor: between 0 and 1, both excluded.
        growth_interval: clean steps until growth.
        min_scale: the floor, at least 2**-126, where subnormal numbers begin.
        max_scale: the ceiling. Float32's largest means none: growth that would be infinite is
            left out, as in torch. A ceiling below the current scale never shrinks it.
        hysteresis: overflows until the scale is cut; 1 cuts at once.
        hysteresis_refill: "growth": spent hysteresis comes back when the scale grows (Megatron,
            ColossalAI, DeepSpeed); "clean": at any clean step (NeMo, DeepSpeed's
            consecutive_hysteresis).
        tolerance: share of overflows among the steps since the last change of scale below which
            an overflow is forgiven (fairseq); compared as a ratio of integers, to three decimals.
        threshold: a cut goes no lower than this (fairseq's threshold_loss_scale).
        late_first_window: the first growth after the start or an overflow takes one clean step
            more (DeepSpeed).
        window_follows_scale: the growth window doubles and halves with the scale (metaseq);
            growth_factor must then be a whole number.
        at_floor: what happens when a cut meets the floor.
        fault_when: with at_floor="fault", whether the fault comes on an overflow at the floor
            (DeepSpeed) or already when the cut would reach it (fairseq).
        max_skips_in_a_row: fault after that many skipped steps in a row; None for never.

    `ScalerState.memory` holds, as far as they are used: steps since the last change of scale and
    overflows since the last cut (tolerance), the current window (window_follows_scale).

    Raises:
        RuleError: a parameter is outside its range.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = MIN_SCALE
    max_scale: float = MAX_SCALE
    hysteresis: int = 1
    hysteresis_refill: Refill = "growth"
    tolerance: float = 0.0
    threshold: float | None = None
    late_first_window: bool = False
    window_follows_scale: bool = False
    at_floor: AtFloor = "clamp"
    fault_when: FaultWhen = "at_floor"
    max_skips_in_a_row: int | None = None

    def __post_init__(self) -> None:
        check_scales(self)
        self._check_numbers()
        self._check_choices()

    def _check_numbers(self) -> None:
        check_number(self, "growth_factor", 1.0, F32_MAX, "above 1 and finite")
        check_number(self, "backoff_factor", MIN_SCALE, 1.0, "at least 2**-126 and below 1")
        if f32(self.growth_factor) == 1.0:
            raise RuleError(
                f"Dynamic: growth_factor must be above 1 in float32, got {self.growth_factor}"
            )
        if f32(self.backoff_factor) == 1.0:
            raise RuleError(
                f"Dynamic: backoff_factor must be below 1 in float32, got {self.backoff_factor}"
            )
        check_count(self, "growth_interval", 1)
        check_count(self, "hysteresis", 1)
        check_number(self, "tolerance", 0.0, 1.0, "between 0 and 1")
        if self.threshold is not None:
            check_number(
                self, "threshold", MIN_SCALE, self.max_scale, "between 2**-126 and max_scale"
            )

    def _check_choices(self) -> None:
        for name, allowed in (
            ("hysteresis_refill", get_args(Refill)),
            ("at_floor", get_args(AtFloor)),
            ("fault_when", get_args(FaultWhen)),
            ("late_first_window", (True, False)),
            ("window_follows_scale", (True, False)),
        ):
            value = getattr(self, name)
            if not any(value is a or (type(value) is str and value == a) for a in allowed):
                raise RuleError(f"Dynamic: {name} must be one of {allowed}, got {value!r}")
        if self.window_follows_scale and not (
            self.growth_factor.is_integer() and self.growth_factor <= WINDOW_CAP
        ):
            raise RuleError(
                "Dynamic: window_follows_scale needs a whole growth_factor such as 2.0, got"
                f" {self.growth_factor}"
            )
        if self.window_follows_scale and self.late_first_window:
            raise RuleError(
                "Dynamic: window_follows_scale and late_first_window exclude each other; no"
                " system does both"
            )

    @classmethod
    def like(cls, system: str, **overrides: Any) -> Dynamic:
        """The rule of another system, with its defaults; see `polyamp.presets()`.

        Args:
            system: "torch", "keras", "flax", "jmp", "deepspeed-stage0", "deepspeed-zero",
                "megatron", "nemo", "apex", "colossalai", "fairseq" or "metaseq".
            **overrides: parameters of `Dynamic` that you set differently there.
                `growth_interval` counts as that system counts it.

        Raises:
            RuleError: the system or a parameter is not known.
        """
        from polyamp._presets import like

        return like(system, **overrides)

    def can_fault(self) -> bool:
        """Whether this rule can ever set `ScalerState.fault`."""
        return self.at_floor == "fault" or self.max_skips_in_a_row is not None

    def init(self, xp: Namespace = host) -> ScalerState:
        """The state before the first step, in the framework of `xp`."""
        memory: tuple[int, ...] = (0, 0) if self.tolerance else ()
        if self.window_follows_scale:
            memory += (min(self.growth_interval, WINDOW_CAP),)
        clean = -1 if self.late_first_window else 0
        return head(self, xp, clean=clean, left=self.hysteresis, memory=memory)

    def memory_range(self) -> tuple[tuple[int, int], ...]:
        """Least and largest value of each entry of `ScalerState.memory`."""
        counts = ((0, COUNT_CAP), (0, COUNT_CAP)) if self.tolerance else ()
        return (*counts, (1, WINDOW_CAP)) if self.window_follows_scale else counts

    def bind_change(self, xp: Namespace) -> Callable[[ScalerState, Any, Signal], Change]:
        """The rule's function with its constants prepared."""
        where = xp.where
        zero, one = xp.c(0, "i32"), xp.c(1, "i32")
        restart = xp.c(-1 if self.late_first_window else 0, "i32")
        full = xp.c(self.hysteresis, "i32")
        ok, grew = xp.c(Reason.CLEAN, "i32"), xp.c(Reason.GREW, "i32")
        overflow, tolerated = xp.c(Reason.OVERFLOW, "i32"), xp.c(Reason.TOLERATED, "i32")
        at_floor, fault = xp.c(Reason.FLOOR, "i32"), xp.c(Fault.AT_FLOOR, "i32")
        raised, cut_to = self._bind_raise(xp), self._bind_cut(xp)
        forgive, due_at, remember = _bind_memory(self, xp)
        refill_clean, spares = self.hysteresis_refill == "clean", self.hysteresis > 1
        faults = self.at_floor == "fault"

        def change(state: ScalerState, good: Any, signal: Signal) -> Change:
            scale, left, memory = state.loss_scale, state.left, state.memory
            cut = forgive(memory, xp.logical_not(good), left <= one)
            clean = state.clean + one
            due = good & due_at(memory, clean)
            up, (raw, down, stuck) = raised(scale), cut_to(scale)
            floored = (down > raw) | stuck if faults else down > raw
            new = Change(
                where(cut, down, where(due, up, scale)),
                where(
                    good, clean if self.window_follows_scale else where(due, zero, clean), restart
                ),
                (
                    where(
                        good,
                        full if refill_clean else where(due, full, left),
                        _spend(xp, left, one),
                    )
                    if spares
                    else left
                ),
                where(
                    good,
                    where(due & (up > scale), grew, ok),
                    where(cut, where(floored, at_floor, overflow), tolerated),
                ),
                where(cut & stuck, fault, zero) if faults else zero,
                remember(memory, good, cut, due),
            )
            return _unchanged_where(xp, cut & stuck, state, new) if faults else new

        return change

    def _bind_raise(self, xp: Namespace) -> Callable[[Any], Any]:
        factor, ceiling = xp.c(self.growth_factor, "f32"), xp.c(self.max_scale, "f32")
        endless = self.max_scale >= F32_MAX

        def raised(scale: Any) -> Any:
            up = xp.multiply(scale, factor)
            if endless:
                return xp.where(xp.isfinite(up), up, scale)
            return xp.maximum(xp.minimum(up, ceiling), scale)

        return raised

    def _bind_cut(self, xp: Namespace) -> Callable[[Any], tuple[Any, Any, Any]]:
        factor, floor = xp.c(self.backoff_factor, "f32"), xp.c(self.min_scale, "f32")
        threshold = None if self.threshold is None else xp.c(self.threshold, "f32")
        hold, fault = self.at_floor == "hold", self.at_floor == "fault"
        reaching = self.fault_when == "reaching_floor"

        def cut_to(scale: Any) -> tuple[Any, Any, Any]:
            """(the bare product, the scale after the cut, whether the floor forbids it)."""
            raw = xp.multiply(scale, factor)
            new = raw if threshold is None else xp.maximum(raw, threshold)
            stuck = (new <= floor if reaching else scale <= floor) if fault else None
            down = xp.where(new < floor, scale, new) if hold else xp.maximum(new, floor)
            return raw, down, stuck

        return cut_to


def _spend(xp: Namespace, left: Any, one: Any) -> Any:
    return xp.maximum(left - one, one)


def _unchanged_where(xp: Namespace, held: Any, state: ScalerState, new: Change) -> Change:
    where = xp.where
    return Change(
        where(held, state.loss_scale, new.loss_scale),
        where(held, state.clean, new.clean),
        where(held, state.left, new.left),
        new.reason,
        new.fault,
        tuple(where(held, old, now) for old, now in zip(state.memory, new.memory, strict=True)),
    )


def _bind_memory(rule: Dynamic, xp: Namespace) -> tuple[Any, Any, Any]:
    """The three functions that read and write `ScalerState.memory`.

    forgive(memory, bad, spent) -> whether the scale is cut
    due_at(memory, clean) -> whether a clean step is one of growth
    remember(memory, good, cut, due) -> the new memory
    """
    where, c = xp.where, xp.c
    zero, one, two = c(0, "i32"), c(1, "i32"), c(2, "i32")
    interval, cap = c(rule.growth_interval, "i32"), c(COUNT_CAP, "i32")
    factor = c(rule.growth_factor if rule.window_follows_scale else 2, "i32")
    widest, room = c(WINDOW_CAP, "i32"), c(WINDOW_CAP // int(rule.growth_factor), "i32")
    top, bottom = (c(part, "i32") for part in _ratio(rule.tolerance))
    tolerant, follows = rule.tolerance > 0.0, rule.window_follows_scale

    def counted(memory: tuple[Any, ...], bad: Any) -> tuple[Any, Any]:
        since, failed = memory[0] + one, memory[1] + where(bad, one, zero)
        full = since > cap
        return where(full, since // two, since), where(full, failed // two, failed)

    def forgive(memory: tuple[Any, ...], bad: Any, spent: Any) -> Any:
        if not tolerant:
            return bad & spent
        since, failed = counted(memory, bad)
        return bad & spent & (failed * bottom >= top * since)

    def due_at(memory: tuple[Any, ...], clean: Any) -> Any:
        return clean % memory[-1] == zero if follows else clean >= interval

    def remember(memory: tuple[Any, ...], good: Any, cut: Any, due: Any) -> tuple[Any, ...]:
        kept: tuple[Any, ...] = ()
        if tolerant:
            since, failed = counted(memory, xp.logical_not(good))
            kept = (where(cut | due, zero, since), where(cut, zero, failed))
        if follows:
            window = memory[-1]
            narrow = xp.maximum(window // factor, one)
            wide = where(window > room, widest, xp.minimum(window, room) * factor)
            kept += (where(cut, narrow, where(due, wide, window)),)
        return kept

    return forgive, due_at, remember


def _ratio(tolerance: float) -> tuple[int, int]:
    if tolerance == 0.0:
        return 0, 1
    from fractions import Fraction

    part = Fraction(str(tolerance)).limit_denominator(_TOLERANCE_PARTS)
    return part.numerator, part.denominator
