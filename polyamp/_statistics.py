"""What is measured of a module's tensors, and how samples are put together.

On the device a tensor x becomes eight float32 numbers (RAW), moved to the host all at once:

    amax        largest |x| of the finite entries                       over ranks and calls: MAX
    square      sum of x * x of the finite entries                      the others: SUM
    size        entries
    nonfinite   entries that are infinite or NaN
    nonzero     finite entries that are not 0
    sub         of those, entries with |x| < 2**-14 (float16's smallest normal number)
    bad         of those, entries with |x| < 2**-20 (fewer than 5 of float16's 11 bits are left)
    far         of those, entries with |x| < amax * 2**-30

Gradients are measured as they come, scaled by the loss scale; that is what float16 has to hold.
docs/selector.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from polyamp._errors import StateError

RAW = ("amax", "square", "size", "nonfinite", "nonzero", "sub", "bad", "far")
"""Names of the numbers that a backend measures, in their order."""
SUB_BITS, BAD_BITS, FAR_BITS = 14, 20, 30


class Statistics(NamedTuple):
    """One tensor in one sample (or several put together)."""

    amax: float
    """Largest |x| of the finite entries; 0 if there is none."""
    rms: float
    """Root of the mean square over all finite entries."""
    size: int
    """Entries."""
    nonfinite: float
    """Share of all entries that is infinite or NaN, 0..1."""
    nonzero: float
    """Share of all entries that is finite and not 0, 0..1."""
    sub: float
    """Share of the nonzero entries below 2**-14, 0..1."""
    bad: float
    """Share of the nonzero entries below 2**-20, 0..1."""
    far: float
    """Share of the nonzero entries more than 30 bits below amax, 0..1."""

    @property
    def norm(self) -> float:
        """Euclidean norm of the finite entries."""
        return self.rms * math.sqrt(self.size * (1.0 - self.nonfinite))

    @classmethod
    def from_raw(cls, raw: Sequence[float]) -> Statistics:
        """The statistics in the eight numbers of `RAW`.

        Raises:
            StateError: there are not eight.
        """
        if len(raw) != len(RAW):
            raise StateError(f"a measured tensor has {len(RAW)} numbers, got {len(raw)}")
        amax, square, size, nonfinite, nonzero, sub, bad, far = map(float, raw)
        some, counted = max(size, 1.0), max(nonzero, 1.0)
        return cls(
            amax=amax,
            rms=math.sqrt(square / max(size - nonfinite, 1.0)),
            size=round(size),
            nonfinite=nonfinite / some,
            nonzero=nonzero / some,
            sub=sub / counted,
            bad=bad / counted,
            far=far / counted,
        )


class ModuleStatistics(NamedTuple):
    """One module in one sample; None: not measured, or there is no such tensor."""

    output: Statistics | None = None
    """What the forward pass put out, all its floating tensors together."""
    gradient: Statistics | None = None
    """Scaled gradient of the loss with respect to the output."""
    weight_gradient: Statistics | None = None
    """Scaled gradients of the module's own parameters, together."""
    weights: Statistics | None = None
    """The module's own parameters, together; maybe no more than their amax, size and nonfinite."""
    inputs: Statistics | None = None
    """What came in, which a low format has to hold too; likewise."""
    update: float | None = None
    """Median of |dw| / |w| over the nonzero weights, of one optimizer step."""
    errors: tuple[tuple[str, float], ...] = ()
    """(format, error): relative error of the model's gradient with only this module in the format,
    over the gradient's own noise from batch to batch."""
    work: float | None = None
    """Multiply-adds of one forward pass an entry of the output."""


def merged(raws: Iterable[Sequence[float]]) -> tuple[float, ...] | None:
    """Several measured tensors, calls or ranks as one; None if there is none.

    `far` is counted from each one's own amax.
    """
    rows = [tuple(raw) for raw in raws]
    if len(rows) < 2:
        return rows[0] if rows else None
    columns = list(zip(*rows, strict=True))
    return (max(columns[0]), *(math.fsum(column) for column in columns[1:]))


def overflowed(statistics: Mapping[str, ModuleStatistics]) -> bool:
    """Whether a gradient in a sample is not finite."""
    gradients = [g for one in statistics.values() for g in (one.gradient, one.weight_gradient)]
    return any(g is not None and g.nonfinite > 0 for g in gradients)


def largest_gradient(measured: ModuleStatistics) -> float:
    """The largest scaled gradient of the module."""
    both = (measured.gradient, measured.weight_gradient)
    return max((s.amax for s in both if s is not None), default=0.0)


def cast_values(new: ModuleStatistics) -> tuple[tuple[str, Statistics | None], ...]:
    """What is cast to the module's format in the forward pass."""
    return ("inputs", new.inputs), ("output", new.output), ("weights", new.weights)


def poisoned(statistics: Mapping[str, ModuleStatistics]) -> set[str]:
    """Modules whose inputs were not finite, if it is known where that began: at one whose own
    inputs were."""
    lost = {
        path: tuple(s is not None and s.nonfinite > 0 for s in (one.inputs, one.output))
        for path, one in statistics.items()
    }
    return {p for p, (came, _) in lost.items() if came} if (False, True) in lost.values() else set()
