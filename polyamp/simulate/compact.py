"""The compact form of range traces: what float16 makes of every step, in a tenth of the bytes.

    AP, AA           largest magnitudes, float32, exact: every overflow is judged as before
    LS               losses, float32
    params, inner    histograms of log2 |g|, one bin for a factor of two, uint8 (bins, steps):
                     n up to 32 is n, above it 32 + 8 log2(n / 32), rounded; what rounding
                     takes from a bin is added in the next step
    low              log2 of the first edge

Flush and normal bounds of a power-of-two scale are edges, so nothing is interpolated for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    Arrays = dict[str, npt.NDArray[Any]]

EXACT = 32
STEPS = 8
LOW, PER_OCTAVE, OCTAVES = -100, 4, 140
"""Edges of the full form's histograms HP and HA: 560 bins."""


def encode(counts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Counts (steps, bins) below 2**32 as uint8 codes: within 4.5 %, exact up to 32.

    What rounding takes from a bin is added to it in the next step, so that means over many steps
    are right to about 0.02 %.
    """
    import numpy as np

    codes = np.empty(counts.shape, dtype=np.uint8)
    carry = np.zeros(counts.shape[1])
    for row, code in zip(counts, codes, strict=True):
        exact = row <= EXACT
        wanted = np.maximum(row + carry, EXACT)
        code[:] = np.where(exact, row, EXACT + np.rint(STEPS * np.log2(wanted / EXACT)))
        carry = np.where(exact, 0.0, wanted - decode(code))
    return codes


def decode(codes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The counts, float64."""
    import numpy as np

    wide = codes.astype(np.float64)
    return np.where(wide <= EXACT, wide, EXACT * np.exp2((wide - EXACT) / STEPS))


def compact(full: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """The compact form of AP, AA, LS (steps,) and HP, HA (steps, 560)."""
    import numpy as np

    octaves = {
        name: full[key].reshape(-1, OCTAVES, PER_OCTAVE).sum(axis=2)
        for name, key in (("params", "HP"), ("inner", "HA"))
    }
    used = np.flatnonzero(sum(counts.sum(axis=0) for counts in octaves.values()))
    first, last = (int(used[0]), int(used[-1])) if len(used) else (0, 0)
    codes = {
        name: np.ascontiguousarray(encode(counts[:, first : last + 1]).T)
        for name, counts in octaves.items()
    }
    plain = {key: full[key].astype(np.float32) for key in ("AP", "AA", "LS")}
    return {**plain, **codes, "low": np.array(LOW + first, dtype=np.int32)}
