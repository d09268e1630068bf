"""The eight numbers of `polyamp._statistics.RAW` of tensors, on their device.

Largest entry and finiteness are of all entries; the shares are of every n-th entry, so that at most
`SAMPLED` are looked at again.

What is summed where it should be maximized (over calls, the turns of a loop, replicas) carries its
largest entry as a histogram too: `summable` and `summed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from polyamp._statistics import BAD_BITS, FAR_BITS, RAW, SUB_BITS
from polyamp._xp import F32_MAX
from polyamp_keras._cast import is_float, is_sliced
from polyamp_keras._ops import FRAMEWORK

SAMPLED = 1 << 14
BUCKETS = 1 << 10
"""Of the histogram: four to a power of two."""
WIDTH = len(RAW) + BUCKETS
"""Entries of `summable`."""
_SHIFT = 21
"""Bits of a float32 below exponent and first two bits of the mantissa."""


def raw(values: Sequence[Any]) -> Any:
    """f32 (8,) of floating tensors together; those without entries count as nothing."""
    return together([_numbers(value, shares=True) for value in _parts(values)])


def ends(values: Sequence[Any]) -> Any:
    """As `raw`, with nothing but amax, size and nonfinite; the others are 0."""
    return together([_numbers(value, shares=False) for value in _parts(values)])


def together(rows: Sequence[Any]) -> Any:
    """`polyamp._statistics.merged` on the device; zeros of nothing."""
    if len(rows) < 2:
        return rows[0] if rows else ops.zeros((len(RAW),), "float32")
    table = ops.stack(rows)
    return ops.concatenate([ops.max(table[:, :1], axis=0), ops.sum(table[:, 1:], axis=0)])


def summable(numbers: Any) -> Any:
    """`raw` numbers, (n, 8), with a histogram of their largest entry: (n, WIDTH)."""
    bucket = ops.right_shift(ops.view(numbers[:, :1], "int32"), _SHIFT)
    places = ops.arange(BUCKETS, dtype="int32")
    return ops.concatenate([numbers, ops.cast(ops.equal(places, bucket), "float32")], axis=-1)


def summed(total: Any) -> Any:
    """The numbers, (n, 8), in a sum of any number of `summable`, (n, WIDTH).

    The largest entry is exact in a sum of one, else the last number of its bucket (at most a
    quarter above, on the same side of every power of two).
    """
    places = ops.arange(BUCKETS, dtype="int32")
    amax, found = total[:, :1], total[:, len(RAW) :]
    top = ops.max(ops.where(found > 0, places, ops.zeros_like(places)), axis=-1, keepdims=True)
    end = ops.view(ops.left_shift(top + 1, _SHIFT) - 1, "float32")
    several = ops.sum(found, axis=-1, keepdims=True) > 1
    amax = ops.where(several, ops.minimum(amax, end), amax)
    return ops.concatenate([amax, total[:, 1 : len(RAW)]], axis=-1)


def is_measured(value: Any) -> bool:
    """Whether `value` is a dense tensor of floating numbers."""
    if not ops.is_tensor(value) or isinstance(value, keras.KerasTensor) or is_sliced(value):
        return False
    return hasattr(value, "dtype") and is_float(value)


def _parts(values: Sequence[Any]) -> list[Any]:
    dense = [value.values if is_sliced(value) else value for value in values]
    return [ops.stop_gradient(value) for value in dense if 0 not in tuple(value.shape)]


def _numbers(value: Any, shares: bool) -> Any:
    if FRAMEWORK == "torch":
        from polyamp_torch._measure import numbers, take

        sample = take(value, shares)
        return ops.zeros((len(RAW),), "float32") if sample is None else numbers([sample])[0]
    value = ops.reshape(value, (-1,))
    finite = ops.isfinite(value)
    kept = ops.where(finite, ops.abs(value), ops.zeros((), value.dtype))
    if keras.backend.standardize_dtype(kept.dtype) == "float64":
        kept = ops.minimum(kept, F32_MAX)
    amax = ops.cast(ops.max(kept, initial=0.0), "float32")
    lost = ops.cast(ops.sum(ops.cast(ops.logical_not(finite), "int32")), "float32")
    size = ops.cast(ops.size(value), "float32")
    if not shares:
        zero = ops.zeros((), "float32")
        return ops.stack([amax, zero, size, lost, *[zero] * 4])
    part = ops.cast(_sampled(kept), "float32")
    share = size / ops.maximum(ops.cast(ops.size(part), "float32"), 1.0)
    square, *counts = (number * share for number in _sums(part, amax))
    return ops.stack([amax, square, size, lost, *counts])


def _sums(part: Any, amax: Any) -> list[Any]:
    """0-d f32: of squares, and how many entries are nonzero, subnormal, bad, far."""
    nonzero = part > 0
    limits = (2.0**-SUB_BITS, 2.0**-BAD_BITS, amax * 2.0**-FAR_BITS)
    flags = [nonzero, *(ops.logical_and(nonzero, part < limit) for limit in limits)]
    return [ops.sum(part * part), *(ops.sum(ops.cast(flag, "float32")) for flag in flags)]


def _sampled(flat: Any) -> Any:
    """Every n-th entry, at most `SAMPLED`; n is odd, as few sizes are."""
    size = flat.shape[0]
    if size is not None:
        return flat if size <= SAMPLED else flat[:: -(-size // SAMPLED) | 1]
    import tensorflow as tf  # where alone a size may be unknown

    stride = tf.bitwise.bitwise_or((tf.size(flat) + SAMPLED - 1) // SAMPLED, 1)
    return flat[::stride]
