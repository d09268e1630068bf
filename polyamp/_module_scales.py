"""ModuleScales: float16 throughout, with a power of two for each module where one scale is not
enough.

    level of a module = log2 of the largest scaled gradient of its outputs and weights
    the levels span more than 25 bits:  each module gets the j that puts its level at 7..8
                                        (kept while its gradients stay within [1, 2**14))
    they span at most 25 - 4 bits:      no module has one
    all 0 counts as 2**-26: what is below float16 is flushed before it can be measured
    a sample with an overflow, or in which all gradients are 0, changes nothing

Source: worked out for polyamp; docs/selector.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from polyamp._errors import RuleError
from polyamp._formats import shown
from polyamp._select import Selector, largest_gradient, overflowed
from polyamp._selection import Capabilities, Choice, Selection
from polyamp._statistics import ModuleStatistics

_ANY = Capabilities()
_FLUSHED = 2.0**-26
_NEARER = 4
"""Bits below the span at which powers of two are given up again."""


@dataclass(frozen=True, slots=True)
class ModuleScales:
    """Decides like a `Selector`, in whose place it goes; see the module.

    Attributes:
        span: bits that one scale covers.

    Raises:
        RuleError: `span` is not a whole number from 5.
    """

    span: int = 25

    def __post_init__(self) -> None:
        if type(self.span) is not int or self.span <= _NEARER:
            raise RuleError(f"span must be a whole number from 5, got {shown(self.span)}")

    def start(
        self, families: Mapping[str, str | None], capabilities: Capabilities = _ANY
    ) -> Selection:
        """float16 for every module of no family, whatever its speed.

        Raises:
            RuleError: the backend cannot give a module a power of two of its own.
        """
        if not capabilities.shifts:
            raise RuleError("this backend cannot give a module a power of two of its own")
        return Selector(prefer="memory").start(families, Capabilities())

    def decide(
        self,
        statistics: Mapping[str, ModuleStatistics],
        selection: Selection,
        capabilities: Capabilities = _ANY,
        step: int | None = None,
    ) -> Selection:
        """The selection after one more sample; arguments as `Selector.decide`."""
        step = selection.step + 1 if step is None else step
        amaxes = {
            path: largest_gradient(one)
            for path, one in statistics.items()
            if selection.modules[path].family is None
            and (one.gradient is not None or one.weight_gradient is not None)
        }
        if overflowed(statistics) or not any(amaxes.values()):
            return selection._replace(step=step)
        amaxes = {path: amax or _FLUSHED for path, amax in amaxes.items()}
        span = math.log2(max(amaxes.values())) - math.log2(min(amaxes.values()))
        held = any(state.choice.level == 1 for state in selection.modules.values())
        limit = self.span - _NEARER if held else self.span
        modules, flips = dict(selection.modules), selection.flips
        for path, amax in amaxes.items():
            before = modules[path].choice
            choice = Choice(0, 0, "span", span, limit)
            if span > limit:
                kept = before.level == 1 and 1.0 <= math.ldexp(amax, before.shift) < 2.0**14
                shift = before.shift if kept else 8 - math.frexp(amax)[1]
                choice = choice._replace(level=1, shift=shift)
            if choice[:2] != before[:2]:
                modules[path] = modules[path]._replace(choice=choice)
                flips += 1
        return Selection(modules, step, flips)

    def calibrated(
        self,
        statistics: Mapping[str, ModuleStatistics],
        selection: Selection,
        capabilities: Capabilities = _ANY,
    ) -> Selection:
        """The selection that a calibration's statistics call for."""
        return self.decide(statistics, selection, capabilities)
