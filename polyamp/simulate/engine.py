"""Replaying a trace through a rule, and what comes of it.

overflow traces: the flags as recorded, whatever the scale: another scale could have avoided
                 an overflow, or met one, and the trace cannot tell
range traces:    overflow = largest * scale >= 65520       (what float16 rounds to infinity)
                 amax     = float32(amax * scale), 0 below 2**-25
                 sub      = share of the parameters' entries from 2**-25 / scale to
                            2**-14 / scale
                 flushed  = share of all entries below 2**-25 / scale, on an applied step
                 lost     = skips / T + (1 - skips / T) * mean flushed
                 headroom = log2(65520 / (largest * scale))
A skipped step tells the rule that it overflowed, and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyamp._errors import PolyampError, RuleError
from polyamp._scaling import Rule, bind
from polyamp._state import Fault, ScalerState, Signal
from polyamp._xp import f32
from polyamp.simulate.trace import (
    NORMAL_BITS,
    OVERFLOW,
    TINY_BITS,
    OverflowTrace,
    RangeTrace,
    Trace,
    share_at,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from polyamp.simulate.trace import Bools, Floats

    Measure = Callable[[int, float], Signal]

NEXT = 20
"""Steps whose median headroom tells whether a rule has recovered."""
RECOVERED_BITS = 9.0

_CLEAN, _OVERFLOW = Signal(True), Signal(False, amax=math.inf)


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one rule made of one trace.

    Attributes:
        trace: what was replayed.
        scales: float64 (steps,), the scale each step's gradients carried.
        final_scale: the scale after the last step.
        skipped: bool (steps,).
        fault_step: the first step after which the rule had given up, or None. The replay goes on.
    """

    trace: Trace
    scales: Floats
    final_scale: float
    skipped: Bools
    fault_step: int | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest scale, the final one included."""
        return (
            min(float(self.scales.min()), self.final_scale),
            max(float(self.scales.max()), self.final_scale),
        )

    @property
    def skips(self) -> int:
        """Skipped steps."""
        return int(self.skipped.sum())

    @property
    def flushed(self) -> float | None:
        """Percent of the nonzero entries of applied steps that float16 made 0; None unknown."""
        import numpy as np

        if isinstance(self.trace, OverflowTrace) or self.trace.below_all is None:
            return None
        steps = np.flatnonzero(~self.skipped)
        if not len(steps):
            return 0.0
        bits = TINY_BITS - np.log2(self.scales[steps])
        return 100 * float(share_at(self.trace, self.trace.below_all, steps, bits).mean())

    @property
    def lost(self) -> float | None:
        """Percent of the nonzero entries that never reach the optimizer; None unknown."""
        flushed = self.flushed
        if flushed is None:
            return None
        share = self.skips / len(self.trace)
        return 100 * share + (1 - share) * flushed

    @property
    def headroom(self) -> Floats | None:
        """float64 (steps,): bits up to the overflow, NaN where skipped or zero; None unknown."""
        import numpy as np

        if isinstance(self.trace, OverflowTrace):
            return None
        largest = self.trace.largest
        known = ~self.skipped & (largest > 0)
        bits = np.full(len(largest), np.nan)
        bits[known] = math.log2(OVERFLOW) - np.log2(largest[known]) - np.log2(self.scales[known])
        return bits

    @property
    def median_headroom(self) -> float | None:
        """Of the applied steps, in bits; None where there is none."""
        return None if self.headroom is None else _median(self.headroom)

    @property
    def longest_run(self) -> int:
        """Most steps skipped one after the other."""
        longest = now = 0
        for skipped in self.skipped.tolist():
            now = now + 1 if skipped else 0
            longest = max(longest, now)
        return longest

    @property
    def back_up(self) -> int | None:
        """Steps from the bottom of the scale's largest fall until it is where it was.

        A fall is a run of steps each of which ends with a smaller scale. 0 where the scale never
        fell; None where it never came back.
        """
        scales = [*self.scales.tolist(), self.final_scale]
        fall, bottom, before = 1.0, 0, 0.0
        start = scales[0]
        for i in range(1, len(scales)):
            if scales[i] >= scales[i - 1]:
                start = scales[i]
            elif start / scales[i] > fall:
                fall, bottom, before = start / scales[i], i, start
        if fall == 1.0:
            return 0
        back = (i for i in range(bottom, len(scales)) if scales[i] >= before)
        found = next(back, None)
        return None if found is None else found - bottom

    def recovery(self, start: int, stop: int) -> int | None:
        """Steps from `start` until the median headroom of the next 20 is at most 9 bits.

        None where that never happens before `stop`, or the headroom is not known.
        """
        headroom = self.headroom
        if headroom is None:
            return None
        for step in range(start, stop):
            middle = _median(headroom[step : min(step + NEXT, stop)])
            if middle is not None and middle <= RECOVERED_BITS:
                return step - start
        return None


def replay(rule: Rule, trace: Trace) -> Outcome:
    """Run a trace through a rule. The arithmetic is the transition's own, on Python numbers.

    Raises:
        RuleError: the rule needs the gradients' amax and the trace has overflows only.
        PolyampError: the trace has no steps.
    """
    import numpy as np

    if not len(trace):
        raise PolyampError(f"{trace.name} has no steps")
    measure = _overflows(rule, trace) if isinstance(trace, OverflowTrace) else _ranges(rule, trace)
    step, state = bind(rule), rule.init()
    states: list[ScalerState] = []
    for number in range(len(trace)):
        states.append(state)
        state = step(state, measure(number, state.loss_scale))
    after = [*states[1:], state]
    fault = next((i for i, s in enumerate(after) if s.fault != Fault.NONE), None)
    return Outcome(
        trace=trace,
        scales=np.array([s.loss_scale for s in states]),
        final_scale=state.loss_scale,
        skipped=np.array([s.skipped_in_a_row > 0 for s in after]),
        fault_step=fault,
    )


def oracle(trace: RangeTrace) -> Outcome:
    """The largest power of two that no step overflows with, known in advance."""
    import numpy as np

    largest = trace.largest
    finite = np.isfinite(largest)
    room = OVERFLOW / np.where(finite & (largest > 0), largest, 1.0)
    parts, exponents = np.frexp(room)
    scales = np.ldexp(1.0, np.clip(exponents - np.where(parts == 0.5, 2, 1), -126, 126))
    return Outcome(trace, scales, float(scales[-1]), ~finite)


def _overflows(rule: Rule, trace: OverflowTrace) -> Measure:
    if rule.wants_amax:
        raise RuleError(
            f"{type(rule).__name__} goes by the gradients' largest magnitude, and {trace.name} only"
            " has overflows; give it a trace with amax, or choose a counting rule such as torch"
        )
    flags = trace.overflow.tolist()

    def measure(step: int, scale: float) -> Signal:
        return _OVERFLOW if flags[step] else _CLEAN

    return measure


def _ranges(rule: Rule, trace: RangeTrace) -> Measure:
    largest, amax = trace.largest.tolist(), trace.amax.tolist()
    wants, sub_of = rule.wants_amax, _underflow(trace)

    def measure(step: int, scale: float) -> Signal:
        if not largest[step] * scale < OVERFLOW:
            return _OVERFLOW
        if not wants:
            return _CLEAN
        seen = f32(amax[step] * scale)
        due = rule.sub_interval and step % rule.sub_interval == 0
        share = sub_of(step, scale) if due else -1.0
        return Signal(True, amax=0.0 if seen < 2.0**TINY_BITS else seen, sub=share)

    return measure


def _underflow(trace: RangeTrace) -> Callable[[int, float], float]:
    """(step, scale) -> share of the parameters' entries that are subnormal in float16."""
    table, per_octave = trace.below_params, trace.per_octave
    if table is None:
        return lambda step, scale: -1.0
    origin = (trace.low + trace.offset).tolist()
    last, one_row, value = table.shape[1] - 1, len(table) == 1, table.item

    def below(step: int, bits: float) -> float:
        place = min(max((bits - origin[step]) * per_octave, 0.0), last)
        left = min(int(place), last - 1)
        part, row = place - left, 0 if one_row else step
        found: float = value(row, left)
        return found + part * (value(row, left + 1) - found) if part else found

    def sub(step: int, scale: float) -> float:
        bits = math.log2(scale)
        return f32(below(step, NORMAL_BITS - bits) - below(step, TINY_BITS - bits))

    return sub


def _median(values: Any) -> float | None:
    import numpy as np

    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else None
