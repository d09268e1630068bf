"""What every backend's `calibrate` does alike: samples put together, formats tried, errors, the
budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polyamp._budget import Candidate, within_budget
from polyamp._policy_map import PolicyMap
from polyamp._selection import Capabilities, Choice, ModuleState, Selection
from polyamp._statistics import ModuleStatistics, Statistics


def worst(samples: Sequence[ModuleStatistics]) -> ModuleStatistics:
    """Of each statistic the largest; amax, shares and norms alike."""

    def largest(name: str) -> Statistics | None:
        known = [s for one in samples if (s := getattr(one, name)) is not None]
        return Statistics(*(max(column) for column in zip(*known, strict=True))) if known else None

    names = ("output", "gradient", "weight_gradient", "weights", "inputs")
    return samples[0]._replace(**{name: largest(name) for name in names})  # type: ignore[arg-type]


def to_try(choice: Choice, can: Capabilities) -> list[Choice]:
    """The low formats whose error decides whether a module may have what its numbers allow."""
    low = choice._replace(level=2, shift=0)
    tried = {0: [choice, low], 1: [choice, low], 2: [low]}.get(choice.level, [])
    return [one for one in tried if one.format in can.formats]


def alone(path: str, choice: Choice, paths: Iterable[str]) -> PolicyMap:
    """Only the module at `path` as chosen, all others in float32."""
    others = {p: ModuleState(choice if p == path else Choice(3)) for p in paths}
    return Selection(others).policy_map()


def noise_of(gradients: Sequence[Any]) -> float:
    """Relative standard deviation of a batch's gradient; infinite where it is not known.

    Args:
        gradients: of each batch all of them, flat, as numpy arrays.
    """
    import numpy as np

    if len(gradients) < 2 or not gradients[0].size:
        return math.inf
    mean = np.mean(gradients, axis=0)
    squares = sum(float(np.sum((gradient - mean) ** 2)) for gradient in gradients)
    size, deviation = float(np.linalg.norm(mean)), math.sqrt(squares / (len(gradients) - 1))
    return deviation / size if size and deviation else math.inf


def relative_error(gradient: Any, reference: Any) -> float:
    """Norm of the difference over that of `reference` (numpy arrays); infinite if not finite."""
    import numpy as np

    if not np.isfinite(gradient).all():
        return math.inf
    size = float(np.linalg.norm(reference))
    return float(np.linalg.norm(gradient - reference)) / size if size else 0.0


def budgeted(
    chosen: Selection,
    statistics: Mapping[str, ModuleStatistics],
    macs: Mapping[str, float],
    share: float,
) -> Selection:
    """Only as many modules in a low format as the share of the multiply-adds takes.

    Modules without multiply-adds go with the one before them.

    Args:
        macs: multiply-adds of each module's forward pass, by path.
        share: 0..1.
    """
    total = sum(macs.values()) or 1.0
    low = {
        path: Candidate(
            macs.get(path, 0.0) / total, dict(statistics[path].errors).get(state.choice.format, 0.0)
        )
        for path, state in chosen.modules.items()
        if path in statistics and state.family is None and state.choice.level < 3
    }
    taken = set(within_budget(low, share))
    before = None
    for path in statistics:
        if path in low and not low[path].gain and before in taken:
            taken.add(path)
        before = path
    over = Choice(3, 0, "budget", share, share)
    modules = {
        path: state._replace(choice=over) if path in low and path not in taken else state
        for path, state in chosen.modules.items()
    }
    return chosen._replace(modules=modules)
