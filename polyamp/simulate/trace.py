"""What is replayed: recorded overflows, or the ranges of the gradients of every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from polyamp._errors import PolyampError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]
    Bools = npt.NDArray[np.bool_]

OVERFLOW = 65520.0
"""What float16 rounds to infinity, and everything above."""
TINY_BITS = -25
"""log2 of the largest magnitude that float16 rounds to 0."""
NORMAL_BITS = -14
"""log2 of float16's smallest normal number."""


@dataclass(frozen=True, eq=False)
class OverflowTrace:
    """The steps that overflowed in some run.

    Attributes:
        name: for people.
        overflow: bool (steps,), True where the step overflowed.
    """

    name: str
    overflow: Bools

    def __len__(self) -> int:
        return len(self.overflow)


@dataclass(frozen=True, eq=False)
class RangeTrace:
    """How large the unscaled gradients of every step were.

    Attributes:
        name: for people.
        amax: float64 (steps,), largest |gradient| of the parameters; infinite where the step
            overflows at any scale.
        inner: float64 (steps,), largest |gradient| of the activations; 0 where unknown.
        below_params: float64 (steps or 1, bins + 1), share of the nonzero entries of the
            parameters' gradients below each edge, or None where unknown.
        below_all: the same of parameters and activations together.
        low: log2 of the first edge.
        per_octave: bins for a factor of two.
        offset: float64 (steps,), added to the edges' log2 in each step.
        shifts: (step, bits) where the gradients are known to change level.
    """

    name: str
    amax: Floats
    inner: Floats
    below_params: Floats | None
    below_all: Floats | None
    low: int
    per_octave: int
    offset: Floats
    shifts: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.amax)

    @property
    def largest(self) -> Floats:
        """float64 (steps,): what an overflow is judged on."""
        import numpy as np

        return np.maximum(self.amax, self.inner)

    def shifted(self, shifts: Iterable[tuple[int, int]]) -> RangeTrace:
        """The trace with the gradients times 2**bits from each step on; shifts add up.

        Raises:
            PolyampError: a step outside the trace.
        """
        import numpy as np

        shifts = tuple(shifts)
        bits = np.zeros(len(self), dtype=np.int64)
        for step, by in shifts:
            if not 0 <= step < len(self):
                raise PolyampError(f"{self.name} ends at step {len(self) - 1}: no shift at {step}")
            bits[step:] += by
        return replace(
            self,
            amax=np.ldexp(self.amax, bits),
            inner=np.ldexp(self.inner, bits),
            offset=self.offset + bits,
            shifts=tuple(sorted((*self.shifts, *shifts))),
        )

    def first(self, steps: int) -> RangeTrace:
        """The trace's first steps."""

        def cut(table: Any) -> Any:
            return table if table is None or len(table) == 1 else table[:steps]

        return replace(
            self,
            amax=self.amax[:steps],
            inner=self.inner[:steps],
            below_params=cut(self.below_params),
            below_all=cut(self.below_all),
            offset=self.offset[:steps],
            shifts=tuple(s for s in self.shifts if s[0] < steps),
        )


Trace = OverflowTrace | RangeTrace


def shares_below(counts: npt.NDArray[Any]) -> Floats:
    """Share of the entries below each edge, float64 (steps, bins + 1), of counts (steps, bins)."""
    import numpy as np

    total = np.zeros((len(counts), counts.shape[1] + 1))
    np.cumsum(counts, axis=1, out=total[:, 1:])
    total /= np.maximum(total[:, -1:], 1)
    return total


def share_at(trace: RangeTrace, table: Floats, steps: Any, bits: Any) -> Any:
    """The share of entries below 2**bits in some steps, linear inside a bin.

    Args:
        trace: whose edges `table` has.
        table: `below_params` or `below_all`.
        steps: int (n,), numbers of steps.
        bits: float (n,), log2 of the bounds.

    Returns:
        float64 (n,) from 0 to 1.
    """
    import numpy as np

    last = table.shape[1] - 1
    place = np.clip((bits - trace.offset[steps] - trace.low) * trace.per_octave, 0, last)
    left = np.minimum(place.astype(np.int64), last - 1)
    part = place - left
    rows = steps if len(table) > 1 else np.zeros_like(steps)
    return table[rows, left] * (1 - part) + table[rows, left + 1] * part


def range_trace(
    name: str, amax: Any, inner: Any = None, counts: Sequence[Any] = (), low: int = 0,
    per_octave: int = 1,
) -> RangeTrace:  # fmt: skip
    """A `RangeTrace` from largest magnitudes and, where known, histogram counts.

    Args:
        name: for people.
        amax, inner: (steps,), see `RangeTrace`.
        counts: of parameters and of activations, both (steps, bins); nothing where unknown.
        low, per_octave: of the histograms' edges.
    """
    import numpy as np

    amax = np.asarray(amax, dtype=np.float64)
    params, rest = counts if counts else (None, None)
    return RangeTrace(
        name=name,
        amax=amax,
        inner=np.zeros(len(amax)) if inner is None else np.asarray(inner, dtype=np.float64),
        below_params=None if params is None else shares_below(params),
        below_all=None if params is None else shares_below(params + rest),
        low=low,
        per_octave=per_octave,
        offset=np.zeros(len(amax)),
    )
