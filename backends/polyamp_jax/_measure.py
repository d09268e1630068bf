"""The eight numbers of `polyamp._statistics.RAW` of arrays, on their device.

Largest entry and finiteness are of all entries; the shares are of every n-th entry, so that at most
`SAMPLED` are looked at again. Under `vmap` the whole batch is measured as one array.

What is summed where it should be maximized (over calls, the turns of a scan, devices) carries its
largest entry as a histogram too: `summable` and `summed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from polyamp._statistics import BAD_BITS, FAR_BITS, RAW, SUB_BITS

Array = jax.Array

SAMPLED = 1 << 14
BUCKETS = 1 << 10
"""Of the histogram: four to a power of two."""
WIDTH = len(RAW) + BUCKETS
"""Entries of `summable`."""
_SHIFT = 21
"""Bits of a float32 below exponent and first two bits of the mantissa."""


@custom_vmap
def raw(values: Sequence[Array]) -> Array:
    """f32 (8,) of floating or complex arrays together; arrays without entries count as nothing."""
    return together([_one(part, shares=True) for part in _parts(values)])


@custom_vmap
def ends(values: Sequence[Array]) -> Array:
    """As `raw`, with nothing but amax, size and nonfinite; the others are 0."""
    return together([_one(part, shares=False) for part in _parts(values)])


@raw.def_vmap
def _(size: int, batched: Any, values: Sequence[Array]) -> tuple[Array, bool]:
    return raw(values), False


@ends.def_vmap
def _(size: int, batched: Any, values: Sequence[Array]) -> tuple[Array, bool]:
    return ends(values), False


def together(rows: Sequence[Array]) -> Array:
    """`polyamp._statistics.merged` on the device; zeros of nothing."""
    if len(rows) < 2:
        return rows[0] if rows else jnp.zeros(len(RAW), jnp.float32)
    table = jnp.stack(rows)
    return jnp.concatenate([table[:, :1].max(0), table[:, 1:].sum(0)])


def summable(numbers: Array) -> Array:
    """`raw` numbers, (..., 8), with a histogram of their largest entry: (..., WIDTH)."""
    bucket = jax.lax.bitcast_convert_type(numbers[..., :1], jnp.uint32) >> _SHIFT
    places = jnp.arange(BUCKETS, dtype=jnp.uint32)
    return jnp.concatenate([numbers, (places == bucket).astype(jnp.float32)], axis=-1)


def summed(total: Array) -> Array:
    """The numbers, (..., 8), in a sum of any number of `summable`.

    The largest entry is exact in a sum of one, else the last number of its bucket (at most a
    quarter above, on the same side of every power of two).
    """
    places = jnp.arange(BUCKETS, dtype=jnp.uint32)
    amax, found = total[..., :1], total[..., len(RAW) :]
    top = jnp.where(found > 0, places, jnp.uint32(0)).max(-1, keepdims=True)
    last = ((top + jnp.uint32(1)) << _SHIFT) - jnp.uint32(1)
    end = jax.lax.bitcast_convert_type(last, jnp.float32)
    several = found.sum(-1, keepdims=True) > 1
    amax = jnp.where(several, jnp.minimum(amax, end), amax)
    return jnp.concatenate([amax, total[..., 1 : len(RAW)]], axis=-1)


def _parts(values: Sequence[Array]) -> list[Array]:
    real = [part for v in values for part in ((v.real, v.imag) if jnp.iscomplexobj(v) else (v,))]
    return [part for part in real if part.size]


def _one(value: Array, shares: bool) -> Array:
    value = value.reshape(-1)
    finite = jnp.isfinite(value)
    kept = jnp.where(finite, jnp.abs(value), jnp.zeros((), value.dtype))
    if kept.dtype == jnp.float64:
        kept = jnp.minimum(kept, float(jnp.finfo(jnp.float32).max))
    amax = jnp.max(kept).astype(jnp.float32)
    lost = jnp.sum(~finite, dtype=jnp.int32).astype(jnp.float32)
    size = jnp.full((), value.size, jnp.float32)
    part = kept[:: _stride(value.size)].astype(jnp.float32)
    sums = _sums(part, amax) * (value.size / part.size) if shares else jnp.zeros(5, jnp.float32)
    return jnp.concatenate([jnp.stack([amax, sums[0], size, lost]), sums[1:]])


def _sums(part: Array, amax: Array) -> Array:
    """f32 (5,): of squares, and how many entries are nonzero, subnormal, bad, far."""
    nonzero = part > 0
    limits = (2.0**-SUB_BITS, 2.0**-BAD_BITS, amax * 2.0**-FAR_BITS)
    flags = [nonzero, *(nonzero & (part < limit) for limit in limits)]
    rows = [part * part, *(flag.astype(jnp.float32) for flag in flags)]  # at most SAMPLED: exact
    return jnp.stack(rows).sum(1)


def _stride(size: int) -> int:
    """Odd, as few sizes are; 1 where all entries are taken."""
    return 1 if size <= SAMPLED else -(-size // SAMPLED) | 1


def measured_of(values: Sequence[Any]) -> list[Any]:
    """The floating and complex arrays among `values`."""
    return [value for value in values if is_measured(value)]


def is_measured(value: Any) -> bool:
    """Whether `value` is an array of floating or complex numbers."""
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.inexact)
