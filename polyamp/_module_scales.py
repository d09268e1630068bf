"""ModuleScales: float16 throughout, with a power of two for each module where one scale is not
enough.

    level of a module = log2 of the largest scaled gradient of its outputs and weights
    the levels span more than 25 bits:  each module gets the j that puts its level at 7..8
                                        (kept while its gradients stay within [1, 2**14))
    they span at most 25 - 4 bits:      no module has one
    all 0 counts as 2**-26: what is below float16 is flushed before it can be measured
    a module that was not measured, or is 0 with a j, counts as it was
    a sample with an overflow, or in which all gradients are 0, changes nothing

`module_shifts` is the rule; `ModuleScales` puts it in a `Selector`'s place, and `with_shifts` on a
policy map. Source: worked out for polyamp; docs/selector.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from polyamp._errors import RuleError, StateError
from polyamp._formats import shown
from polyamp._policy import LARGEST_SHIFT, Policy
from polyamp._policy_map import PolicyMap
from polyamp._select import (
    AIM,
    Selector,
    known_paths,
    shift_for,
    step_after,
)
from polyamp._selection import HALF, SINGLE, START, Capabilities, Choice, Selection, exact_rules
from polyamp._statistics import ModuleStatistics, largest_gradient, overflowed

_ANY = Capabilities()
_FLUSHED = 2.0**-26
_NEARER = 4
"""Bits below the span at which powers of two are given up again."""


SPAN = 25
"""Bits that one scale covers."""


def module_shifts(
    amaxes: Mapping[str, float], shifts: Mapping[str, int], span: int = SPAN
) -> dict[str, int]:
    """The powers of two that modules are to have; see the module.

    Args:
        amaxes: largest gradient of each module's outputs and weights, scaled by the loss scale but
            not by the module's own 2**j; what is not finite is passed over.
        shifts: j of those that have one.
        span: bits that one scale covers.

    Returns:
        j, -126 to 126, of every module, or of none.
    """
    known = {path: amax for path, amax in amaxes.items() if math.isfinite(amax)}
    if not any(known.values()):
        return dict(shifts)
    levels = _levels(known, shifts)
    if _spread(levels) <= _limit(shifts, span):
        return {}
    return {path: shift_for(amax, shifts.get(path)) for path, amax in levels.items()}


def _levels(amaxes: Mapping[str, float], shifts: Mapping[str, int]) -> dict[str, float]:
    """Largest gradients, all above 0."""
    measured = {path: amax or _FLUSHED for path, amax in amaxes.items()}
    unseen = {p: math.ldexp(1.0, AIM - 1 - j) for p, j in shifts.items() if not amaxes.get(p)}
    return measured | unseen


def _spread(levels: Mapping[str, float]) -> float:
    return math.log2(max(levels.values())) - math.log2(min(levels.values()))


def _limit(shifts: Mapping[str, int], span: int) -> int:
    return span - _NEARER if shifts else span


def with_shifts(base: PolicyMap, paths: Iterable[str], shifts: Mapping[str, int]) -> PolicyMap:
    """`base` with powers of two for the modules that compute in float16.

    Those in `shifts` get theirs and put out float32. What else computes in float16 (containers,
    activations, norms) computes in float32 meanwhile: gradients on the way between two modules
    would be flushed there.

    Args:
        base: the map without them.
        paths: of all the model's modules.
        shifts: j by path; {} gives `base` itself.
    """
    if not shifts:
        return base
    decided: dict[str, Policy] = {}
    for path in paths:
        policy = base.policy_for(path)
        if policy.compute_dtype == HALF:
            own = path in shifts
            policy = replace(
                policy,
                compute_dtype=HALF if own else SINGLE,
                output_dtype=SINGLE,
                shift=shifts[path] if own else 0,
            )
        decided[path] = policy
    default = decided.get("", base.default)
    families = [(f"op:{family}", policy) for family, policy in base.op_rules]
    return PolicyMap([*families, *exact_rules(decided, default)], default)


class SavedShifts(NamedTuple):
    """What a scaler saves of its modules, under "modules"."""

    shifts: dict[str, int]
    """j by module path."""
    due: int
    """Steps until the next sample."""
    changes: int
    """Policy maps applied so far."""


def shifts_from_dict(data: object) -> SavedShifts:
    """`SavedShifts` out of its `_asdict()`.

    Raises:
        StateError: a missing or unknown key, a value of the wrong type or outside its range.
    """
    from polyamp._interchange import check_keys

    if not isinstance(data, Mapping):
        raise StateError(f"modules must be a dict, got {shown(data)}")
    check_keys(data, list(SavedShifts._fields), "modules")
    for key in ("due", "changes"):
        if type(data[key]) is not int or data[key] < 0:
            raise StateError(f"modules: {key} must be a count, got {shown(data[key])}")
    shifts = data["shifts"]
    if not isinstance(shifts, Mapping):
        raise StateError(f"modules: shifts must be a dict, got {shown(shifts)}")
    for path, shift in shifts.items():
        if not isinstance(path, str) or type(shift) is not int or abs(shift) > LARGEST_SHIFT:
            raise StateError(
                f"modules: shifts must have whole numbers from -{LARGEST_SHIFT} to {LARGEST_SHIFT}"
                f" by module path, got {shown(path)}: {shown(shift)}"
            )
    return SavedShifts(dict(shifts), data["due"], data["changes"])


@dataclass(frozen=True, slots=True)
class ModuleScales:
    """Decides like a `Selector`, in whose place it goes; see the module.

    Attributes:
        span: bits that one scale covers.

    Raises:
        RuleError: `span` is not a whole number from 5.
    """

    span: int = SPAN

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
        if HALF not in capabilities.formats:
            raise RuleError("this device does not compute in float16, which ModuleScales is about")
        return Selector(prefer="memory").start(families, Capabilities())

    def decide(
        self,
        statistics: Mapping[str, ModuleStatistics],
        selection: Selection,
        capabilities: Capabilities = _ANY,
        step: int | None = None,
        gradients: bool = True,
    ) -> Selection:
        """The selection after one more sample; arguments and errors as `Selector.decide`."""
        step = step_after(selection, step)
        known_paths(statistics, selection)
        amaxes = {
            path: largest_gradient(one)
            for path, one in statistics.items()
            if selection.modules[path].family is None
            and (one.gradient is not None or one.weight_gradient is not None)
        }
        if not gradients or overflowed(statistics) or not any(amaxes.values()):
            return selection._replace(step=step)
        modules, flips = dict(selection.modules), selection.flips
        held = {p: one.choice.shift for p, one in modules.items() if one.choice.level == 1}
        shifts = module_shifts(amaxes, held, self.span)
        reason = ("span", _spread(_levels(amaxes, held)), _limit(held, self.span))
        for path in {**amaxes, **held}:
            own = path in shifts
            choice = Choice(int(own), shifts[path] if own else 0, *reason)
            before = modules[path].choice
            if choice[:2] != before[:2] or before.statistic == START:
                modules[path] = modules[path]._replace(choice=choice)
                flips += choice[:2] != before[:2]
        return Selection(modules, step, flips)

    def calibrated(
        self,
        statistics: Mapping[str, ModuleStatistics],
        selection: Selection,
        capabilities: Capabilities = _ANY,
    ) -> Selection:
        """The selection that a calibration's statistics call for."""
        return self.decide(statistics, selection, capabilities, selection.step)
