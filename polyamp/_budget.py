"""Budgeted selection: so much low precision, with the least error.

    order modules by gain / error**2, largest first
    give them the low format one by one until the target is reached

Independent roundings add up as squares, so error**2 is what a module costs. Greedy: the last module
taken may go beyond the target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from polyamp._errors import RuleError


class Candidate(NamedTuple):
    """A module that could compute in a low format."""

    gain: float
    """What it would save, in any unit: bytes, or a share of the computation."""
    error: float
    """Relative error of the model's gradient with only this module in the low format."""


def within_budget(candidates: Mapping[str, Candidate], target: float) -> list[str]:
    """The modules to lower, best first, until their gains reach `target`.

    Args:
        candidates: by path.
        target: in the unit of the gains, 0 or more.

    Returns:
        Paths. All of those with a gain and a finite error where the target is out of reach.

    Raises:
        RuleError: a negative or NaN gain, error or target.
    """
    for name, value in [("target", target), *_values(candidates)]:
        if not value >= 0:
            raise RuleError(f"{name} must be 0 or more, got {value!r}")
    useful = {p: c for p, c in candidates.items() if c.gain > 0 and math.isfinite(c.error)}
    ranked = sorted(useful, key=lambda path: _worth(useful[path]), reverse=True)
    chosen: list[str] = []
    reached = 0.0
    for path in ranked:
        if reached >= target:
            break
        chosen.append(path)
        reached += useful[path].gain
    return chosen


def _worth(candidate: Candidate) -> float:
    return candidate.gain / candidate.error**2 if candidate.error**2 else math.inf


def _values(candidates: Mapping[str, Candidate]) -> list[tuple[str, float]]:
    pairs = [(path, one) for path, one in candidates.items()]
    gains = [(f"gain of {path!r}", one.gain) for path, one in pairs]
    return gains + [(f"error of {path!r}", one.error) for path, one in pairs]
