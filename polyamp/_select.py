"""Selector: which number format a module can compute in, told by what its numbers are.

    wanted(statistics, slack) -> the first of these that nothing speaks against
        fp16            |inputs|, |outputs|, |weights| <= 2**14; scaled gradients: at most 5 % of
                        the nonzero entries below 2**-20, amax < 2**15
        fp16 with 2**j  the same for values; at most 5 % of the gradient's nonzero entries more than
                        30 bits below its amax: 2**j moves them all into reach
        bf16            values finite
        fp32
      a format is passed over where the device lacks it, where it is slower there than float32
      (unless memory is what counts), and where it makes the gradient less exact than a tenth of
      the gradient's own noise

    decide(statistics, selection, capabilities), for each module:
        family of operations computed in float32 (norm, softmax, ...): fp32, always
        out of range or not finite: to what is wanted, at once
        wanted is safer, 3 samples in a row: move there; each return doubles the dwell (200 steps)
        wanted with a quarter of the slack is faster, 3 samples in a row, and `dwell` steps later
        still: move there
      In a sample in which a gradient is not finite (that is the loss scale's business) forward
      ranges alone act, and the counts stay. Where one module put out the first value that is not
      finite, the modules it reached stay as they are.

Values are out of a format's reach whatever the loss scale is, and one batch later they may be
infinite: so forward ranges need no three samples. docs/selector.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from polyamp._errors import RuleError
from polyamp._formats import shown
from polyamp._policy import LARGEST_SHIFT
from polyamp._policy_pattern import OP_FAMILIES
from polyamp._selection import (
    BRAIN,
    HALF,
    OUTPUT,
    START,
    Capabilities,
    Choice,
    ModuleState,
    Selection,
)
from polyamp._statistics import (
    ModuleStatistics,
    cast_values,
    largest_gradient,
    overflowed,
    poisoned,
)

_ANY = Capabilities()
AIM, _KEPT = 8, 14
"""Largest gradients under a 2**j are put below 2**AIM, and kept below 2**_KEPT."""


class _Against(NamedTuple):
    statistic: str
    value: float
    threshold: float
    urgent: bool = False


class _Wish(NamedTuple):
    choice: Choice
    urgent: bool


@dataclass(frozen=True, slots=True)
class Selector:
    """Thresholds of the precision selection matrix; the defaults are those of the study.

    Attributes:
        value_limit: largest |value| that float16 is trusted with.
        gradient_limit: the same of scaled gradients.
        share: of a gradient's nonzero entries that may be out of reach, 0..1.
        margin: what remains of each limit for a module that wants to move up.
        patience: samples in a row that a move takes.
        dwell: steps between the last of them and a move up.
        error_limit: of the gradient's error over its noise.
        negligible: share of the squared norm of all weight gradients below which a module's weight
            gradient is not judged: such as a key bias of attention, whose true gradient is 0.
        work_limit: multiply-adds an entry written below which a module alone in a low
            format does not pay for its two casts.
        prefer: "speed", or "memory": then formats slower than float32 are used too.

    Raises:
        RuleError: a value outside its range; names it.
    """

    value_limit: float = 2.0**14
    gradient_limit: float = 2.0**15
    share: float = 0.05
    margin: float = 0.25
    patience: int = 3
    dwell: int = 200
    error_limit: float = 0.1
    negligible: float = 1e-12
    work_limit: float = 4.0
    prefer: str = "speed"

    def __post_init__(self) -> None:
        shares = ("share", "margin", "negligible")
        for name in ("value_limit", "gradient_limit", "error_limit", "work_limit", *shares):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise RuleError(f"{name} must be a number above 0, got {shown(value)}")
            if not math.isfinite(value) or (name in shares and value >= 1):
                allowed = "below 1" if name in shares else "finite"
                raise RuleError(f"{name} must be {allowed}, got {shown(value)}")
        for name, low in (("patience", 1), ("dwell", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise RuleError(f"{name} must be a whole number from {low}, got {shown(value)}")
        if self.prefer not in ("speed", "memory"):
            raise RuleError(f"prefer must be 'speed' or 'memory', got {shown(self.prefer)}")

    def start(
        self,
        families: Mapping[str, str | None],
        capabilities: Capabilities = _ANY,
    ) -> Selection:
        """The selection before anything was measured: the fastest format for every module.

        Args:
            families: of every module by path, None for those of no family.
            capabilities: of the device.

        Raises:
            RuleError: an unknown family.
        """
        fastest = next(level for level in range(4) if level != 1 and self._has(level, capabilities))
        modules = {}
        for path, family in families.items():
            allowed = (*OP_FAMILIES, OUTPUT)
            if family is not None and family not in allowed:
                raise RuleError(
                    f"{path!r}: no family {shown(family)}; allowed: {', '.join(allowed)}"
                )
            choice = Choice(fastest) if family is None else Choice(3, statistic=f"family {family}")
            modules[path] = ModuleState(choice, family)
        return Selection(modules)

    def decide(
        self,
        statistics: Mapping[str, ModuleStatistics],
        selection: Selection,
        capabilities: Capabilities = _ANY,
        step: int | None = None,
        gradients: bool = True,
    ) -> Selection:
        """The selection after one more sample; see the module.

        Args:
            statistics: by path; modules left out (not called) keep what they have.
            selection: of `start`, or of the last sample.
            capabilities: of the device.
            step: optimizer steps done, not below that of the last sample; None: one more.
            gradients: False: only forward ranges act, as in a sample with an overflow, since the
                loss scale has just been cut.

        Raises:
            RuleError: a path that `start` was not given, or a step that goes back.
        """
        step = step_after(selection, step)
        known_paths(statistics, selection)
        judged = gradients and not overflowed(statistics)
        heavy = self._heavy(statistics) if judged else None
        modules, flips = dict(selection.modules), selection.flips
        excused = poisoned(statistics)
        for path, measured in statistics.items():
            old = modules[path]
            if old.family is None and path not in excused:
                counts = None if heavy is None else path in heavy
                modules[path] = self._next(old, measured, capabilities, step, counts)
                flips += modules[path].choice[:2] != old.choice[:2]
        return Selection(modules, step, flips)

    def calibrated(
        self,
        statistics: Mapping[str, ModuleStatistics],
        selection: Selection,
        capabilities: Capabilities = _ANY,
    ) -> Selection:
        """The selection that the statistics of a calibration want, without hysteresis; modules
        alone in a low format that do not pay for their casts join their neighbours.

        Raises:
            RuleError: as `decide`.
        """
        known_paths(statistics, selection)
        heavy = self._heavy(statistics)
        modules = dict(selection.modules)
        for path, measured in statistics.items():
            if modules[path].family is None:
                wish = self._wish(measured, capabilities, 1.0, path in heavy)
                modules[path] = modules[path]._replace(choice=wish.choice)
        return Selection(self._without_islands(modules, statistics), selection.step)

    def _has(self, level: int, capabilities: Capabilities) -> bool:
        if level == 3:
            return True
        name = BRAIN if level == 2 else HALF
        slow = name in capabilities.slow and self.prefer == "speed"
        return name in capabilities.formats and not slow and (level != 1 or capabilities.shifts)

    def _heavy(self, statistics: Mapping[str, ModuleStatistics]) -> set[str]:
        """Modules whose weight gradients are not negligible, or were not measured."""
        squares = {
            path: measured.weight_gradient.norm**2
            for path, measured in statistics.items()
            if measured.weight_gradient is not None
        }
        least = self.negligible * math.fsum(squares.values())
        return {path for path in statistics if path not in squares or squares[path] >= least}

    def _next(
        self,
        old: ModuleState,
        new: ModuleStatistics,
        can: Capabilities,
        step: int,
        heavy: bool | None,
    ) -> ModuleState:
        """`heavy`: whether the weight gradient counts; None: no gradient does."""
        before = old.choice
        ahead = _ahead(new, old.amax)
        if new.output is not None:
            old = old._replace(amax=new.output.amax)
        now = self._wish(new, can, 1.0, heavy)
        if now.urgent and now.choice.level > before.level:
            return self._down(old, now.choice)
        if heavy is None:
            return old
        safer = self._safer(now, self._wish(ahead, can, 1.0, heavy))
        if safer.level > before.level:
            if old.bad + 1 >= self.patience:
                return self._down(old, safer)
            return old._replace(bad=old.bad + 1, good=0, ready=-1)
        faster = self._wish(new, can, self.margin, heavy).choice
        if faster.level < before.level:
            return self._up(old, faster, step)
        amax = largest_gradient(new) if before.level == 1 else 0.0
        stale = amax > 0 and shift_for(amax, before.shift) != before.shift
        renew = now.choice.level == before.level and (stale or before.statistic == START)
        return old._replace(choice=now.choice if renew else before, bad=0, good=0, ready=-1)

    def _safer(self, now: _Wish, ahead: _Wish) -> Choice:
        """What is wanted now, or by the next sample if that is safer."""
        if ahead.choice.level <= now.choice.level:
            return now.choice
        return ahead.choice._replace(statistic=f"{ahead.choice.statistic}, predicted")

    def _up(self, old: ModuleState, choice: Choice, step: int) -> ModuleState:
        good = old.good + 1
        ready = step if good == self.patience else old.ready
        if ready >= 0 and step - ready >= old.dwell:
            return old._replace(choice=choice, bad=0, good=0, ready=-1, promoted=True)
        return old._replace(bad=0, good=good, ready=ready)

    def _down(self, old: ModuleState, choice: Choice) -> ModuleState:
        dwell = old.dwell * 2 if old.promoted and old.dwell else old.dwell or self.dwell
        return old._replace(choice=choice, bad=0, good=0, ready=-1, dwell=dwell)

    def _wish(
        self, new: ModuleStatistics, can: Capabilities, slack: float, heavy: bool | None
    ) -> _Wish:
        """The fastest level that nothing speaks against, and what spoke against the one before.

        Args:
            slack: part of each share that may be used, 0..1; of ranges its square root.
            heavy: whether the weight gradient counts; None: no gradient does.
        """
        made, urgent = Choice(3, 0, *self._nearest(new)), False
        for level in range(3):
            if not self._has(level, can):
                continue
            against = self._against(level, new, slack, heavy)
            if against is None:
                shift = shift_for(largest_gradient(new)) if level == 1 else 0
                return _Wish(made._replace(level=level, shift=shift), urgent)
            made = Choice(3, 0, against.statistic, against.value, against.threshold)
            urgent = urgent or against.urgent
        return _Wish(made, urgent)

    def _against(
        self, level: int, new: ModuleStatistics, slack: float, heavy: bool | None
    ) -> _Against | None:
        """What forbids a level below 3."""
        range_slack = math.sqrt(slack)
        for name, s in cast_values(new):
            if s is not None and s.nonfinite > 0:
                return _Against(f"{name}.nonfinite", s.nonfinite, 0.0, urgent=True)
            limit = self.value_limit * range_slack
            if s is not None and level < 2 and s.amax > limit:
                return _Against(f"{name}.amax", s.amax, limit, urgent=True)
        error = dict(new.errors).get(BRAIN if level == 2 else HALF, 0.0)
        if not error <= self.error_limit:
            return _Against("error", error, self.error_limit)
        if level == 2 or heavy is None:
            return None
        weights = new.weight_gradient if heavy else None
        for name, s in (("gradient", new.gradient), ("weight_gradient", weights)):
            if s is None:
                continue
            if s.nonfinite > 0:
                return _Against(f"{name}.nonfinite", s.nonfinite, 0.0)
            limit = self.gradient_limit * range_slack
            if level == 0 and s.amax >= limit:
                return _Against(f"{name}.amax", s.amax, limit)
            reach, value = ("bad", s.bad) if level == 0 else ("far", s.far)
            if value > self.share * slack:
                return _Against(f"{name}.{reach}", value, self.share * slack)
        return None

    def _nearest(self, new: ModuleStatistics) -> tuple[str, float, float]:
        """The statistic that comes nearest to its threshold."""
        found = [("nothing measured", 0.0, 1.0)]
        for name, s in cast_values(new):
            if s is not None:
                found.append((f"{name}.amax", s.amax, self.value_limit))
        for name, s in (("gradient", new.gradient), ("weight_gradient", new.weight_gradient)):
            if s is not None:
                found.append((f"{name}.bad", s.bad, self.share))
                found.append((f"{name}.amax", s.amax, self.gradient_limit))
        return max(found, key=lambda entry: entry[1] / entry[2])

    def _without_islands(
        self, modules: Mapping[str, ModuleState], statistics: Mapping[str, ModuleStatistics]
    ) -> dict[str, ModuleState]:
        """Without modules of a low format, all around which are in float32, that they are too
        small for."""
        found = dict(modules)
        paths = [path for path in statistics if modules[path].family is None]
        for before, path, after in zip([None, *paths], paths, [*paths[1:], None], strict=False):
            around = [modules[p].choice.level for p in (before, after) if p is not None]
            work, choice = statistics[path].work, modules[path].choice
            alone = bool(around) and choice.level < 3 and min(around) == 3
            if alone and work is not None and work < self.work_limit:
                merged = Choice(3, 0, "work", work, self.work_limit)
                found[path] = found[path]._replace(choice=merged)
        return found


def _ahead(new: ModuleStatistics, before: float) -> ModuleStatistics:
    """The statistics with the output as it will be if it goes on growing as it did, 4-fold at most
    in a sample."""
    out = new.output
    if out is None or not before or not before < out.amax < math.inf:
        return new
    return new._replace(output=out._replace(amax=out.amax * min(out.amax / before, 4.0)))


def shift_for(amax: float, old: int | None = None) -> int:
    """j of a module whose largest gradient, without its own 2**j, is `amax`, above 0.

    It puts the gradient at 2**7 to 2**8: a loss scale may rise 8 bits, and what lies 30 bits below
    is not flushed. `old` is kept while the gradient stays within [1, 2**14).

    Returns:
        -126 to 126.
    """
    if old is not None and 1.0 <= math.ldexp(amax, old) < 2.0**_KEPT:
        return old
    return max(-LARGEST_SHIFT, min(AIM - math.frexp(amax)[1], LARGEST_SHIFT))


def step_after(selection: Selection, step: int | None) -> int:
    """The step of a sample; see `Selector.decide`.

    Raises:
        RuleError: not a whole number, or below that of the last sample.
    """
    if step is None:
        return selection.step + 1
    if isinstance(step, bool) or not isinstance(step, int):
        raise RuleError(f"step must be a whole number, got {shown(step)}")
    if step < selection.step:
        raise RuleError(f"step must not go back: {step} after {selection.step}")
    return step


def known_paths(statistics: Mapping[str, ModuleStatistics], selection: Selection) -> None:
    """Raise RuleError for a module that the selection does not know."""
    wrong = [path for path in statistics if path not in selection.modules]
    if wrong:
        raise RuleError(
            f"no module {', '.join(map(repr, wrong[:3]))} in the selection, which has"
            f" {len(selection.modules)}; start() is given every module"
        )
