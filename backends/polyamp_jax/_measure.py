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
    rows = [_one(part) for value in values for part in _parts(value) if part.size]
    return together(rows) if rows else jnp.zeros(len(RAW), jnp.float32)


@raw.def_vmap
def _(size: int, batched: Any, values: Sequence[Array]) -> tuple[Array, bool]:
    return raw(values), False


def together(rows: Sequence[Array]) -> Array:
    """`polyamp._statistics.merged` on the device."""
    table = jnp.stack(rows)
    return jnp.concatenate([table[:, :1].max(0), table[:, 1:].sum(0)])


def summable(numbers: Array) -> Array:
    """`raw` numbers, (8,), with a histogram of their largest entry: (8 + BUCKETS,)."""
    bucket = jax.lax.bitcast_convert_type(numbers[0], jnp.uint32) >> _SHIFT
    places = jnp.arange(BUCKETS, dtype=jnp.uint32)
    return jnp.concatenate([numbers, (places == bucket).astype(jnp.float32)])


def summed(total: Array) -> Array:
    """The numbers, (8,), in a sum of any number of `summable`.

    The largest entry is exact in a sum of one, else the upper end of its bucket (at most a quarter
    above; where a power of two lies is never in doubt).
    """
    places = jnp.arange(BUCKETS, dtype=jnp.uint32)
    found = total[len(RAW) :]
    top = jnp.max(jnp.where(found > 0, places, jnp.uint32(0)))
    end = jax.lax.bitcast_convert_type((top + jnp.uint32(1)) << _SHIFT, jnp.float32)
    amax = jnp.where(found.sum() > 1, jnp.minimum(total[0], end), total[0])
    return jnp.concatenate([amax[None], total[1 : len(RAW)]])


def _parts(value: Array) -> list[Array]:
    return [value.real, value.imag] if jnp.iscomplexobj(value) else [value]


def _one(value: Array) -> Array:
    value = value.reshape(-1)
    finite = jnp.isfinite(value)
    kept = jnp.where(finite, jnp.abs(value), jnp.zeros((), value.dtype))
    if kept.dtype == jnp.float64:
        kept = jnp.minimum(kept, float(jnp.finfo(jnp.float32).max))
    amax = jnp.max(kept).astype(jnp.float32)
    part = kept[:: _stride(value.size)].astype(jnp.float32)
    share = value.size / part.size
    nonzero = part > 0
    limits = (2.0**-SUB_BITS, 2.0**-BAD_BITS, amax * 2.0**-FAR_BITS)
    below = [_count(nonzero & (part < limit)) * share for limit in limits]
    square, lost = jnp.sum(part * part) * share, _count(~finite)
    size = jnp.full((), value.size, jnp.float32)
    return jnp.stack([amax, square, size, lost, _count(nonzero) * share, *below])


def _stride(size: int) -> int:
    """Odd, as few sizes are; 1 where all entries are taken."""
    return 1 if size <= SAMPLED else -(-size // SAMPLED) | 1


def _count(flags: Array) -> Array:
    return jnp.sum(flags, dtype=jnp.int32).astype(jnp.float32)


def raw_of(values: Sequence[Any]) -> Array:
    """`raw` of the floating and complex arrays among `values`."""
    return raw([value for value in values if is_measured(value)])


def is_measured(value: Any) -> bool:
    """Whether `value` is an array of floating or complex numbers."""
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.inexact)
