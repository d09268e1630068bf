"""GradNormSelector: formats by the norm of the gradient alone, for comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from polyamp._errors import RuleError
from polyamp._formats import shown
from polyamp._statistics import ModuleStatistics, Statistics


class GradNorm(NamedTuple):
    """A decision of `GradNormSelector`."""

    mode: str
    """FP16, FP32 or FP32_SCALED."""
    norm: float
    """Of the module's weight gradient, unscaled."""


@dataclass(frozen=True, slots=True)
class GradNormSelector:
    """Formats by the norm of the gradient alone; kept for comparison, do not train with it.

        norm < low: FP32        norm > high: FP32_SCALED        else: FP16

    A norm says nothing of where a tensor's entries lie: docs/selector.md has what it gets wrong.

    Raises:
        RuleError: `low` and `high` are no numbers above 0, or `low` is above `high`.
    """

    low: float = 1e-3
    high: float = 65500.0

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise RuleError(f"{name} must be a number above 0, got {shown(value)}")
        if self.low > self.high:
            raise RuleError(f"low must not be above high: {self.low} and {self.high}")

    def mode(self, norm: float) -> str:
        """FP16, FP32 or FP32_SCALED for a gradient's norm."""
        if norm < self.low:
            return "FP32"
        return "FP32_SCALED" if not norm <= self.high else "FP16"

    def decide(
        self, statistics: Mapping[str, ModuleStatistics], loss_scale: float = 1.0
    ) -> dict[str, GradNorm]:
        """A decision for every module whose weight gradient was measured.

        Args:
            statistics: by path.
            loss_scale: by which the measured gradients are scaled, above 0.

        Raises:
            RuleError: a loss scale that is no number above 0.
        """
        if not (isinstance(loss_scale, (int, float)) and loss_scale > 0):
            raise RuleError(f"loss_scale must be a number above 0, got {shown(loss_scale)}")
        found = {}
        for path, measured in statistics.items():
            s = measured.weight_gradient
            if s is not None:
                norm = _norm(s) / loss_scale
                found[path] = GradNorm(self.mode(norm), norm)
        return found


def _norm(s: Statistics) -> float:
    return math.inf if s.nonfinite > 0 else s.norm
