"""What one step's gradients hold: finite or not, before and after unscaling, and how large."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from polyamp._state import Signal
from polyamp._xp import F32_MAX
from polyamp_tensorflow._cast import wide

_SMALLEST_NORMAL_F16 = 2.0**-14
_EASY = 256.0
"""At this scale and above, a gradient of at most this reach is finite unscaled if it is scaled.

For a reach of 1 a scale of 1 is enough."""


class Part(NamedTuple):
    """The values of one gradient, and what becomes of them once they are unscaled.

    Attributes:
        values: f32 or f64.
        reach: how many times the unscaled values must be finite: slices may name the same row and
            are then summed, replicas are summed, and a narrower dtype has a smaller largest number.
            Float or 0-d f32.
    """

    values: tf.Tensor
    reach: Any


def parts(
    grads: Iterable[Any], dtypes: Sequence[Any] | None = None, replicas: int = 1
) -> list[Part]:
    """The gradients that are there, complex ones as pairs of reals.

    Args:
        grads: tensors, `tf.IndexedSlices` or None.
        dtypes: of the variables they belong to; by default those of the unscaled gradients.
        replicas: over how many of them the unscaled gradients will be summed.

    Raises:
        TypeError: a gradient of integers, which 1 / scale would make 0.
    """
    found = []
    for number, grad in enumerate(grads):
        if grad is None:
            continue
        sparse = isinstance(grad, tf.IndexedSlices)
        stored = tf.convert_to_tensor(grad.values if sparse else grad)
        if not (stored.dtype.is_floating or stored.dtype.is_complex):
            raise TypeError(f"gradients must be floating or complex, got {stored.dtype.name}")
        values = wide(_real(stored))
        reach: Any = float(replicas)
        if dtypes is not None:
            largest = tf.as_dtype(dtypes[number]).real_dtype.max
            reach *= max(float(values.dtype.max) / float(largest), 1.0)
        found.append(Part(values, reach * _rows(stored) if sparse else reach))
    return found


def _real(values: tf.Tensor) -> tf.Tensor:
    if values.dtype.is_complex:
        return tf.stack([tf.math.real(values), tf.math.imag(values)])
    return values


def _rows(values: tf.Tensor) -> Any:
    static = values.shape[0]
    return tf.cast(tf.shape(values)[0], tf.float32) if static is None else float(static)


def sound(found: Sequence[Part], scale: tf.Tensor) -> tf.Tensor:
    """0-d bool: every value is finite as it came, and `reach` times the value over `scale` is.

    A sum is finite only if all that went into it is: that is one fast pass over the gradients, in
    every mode of TensorFlow. Only if it is not, or if the scale is so small that this does not
    suffice, every value is looked at.
    """
    easy: list[Part] = []
    hard: list[Part] = []
    for part in found:
        known = isinstance(part.reach, float) and part.reach <= _EASY
        (easy if known else hard).append(part)

    def closely() -> tf.Tensor:
        return _all([_closely(part, scale) for part in easy])

    verdicts = [_closely(part, scale) for part in hard]
    if easy:
        total = tf.add_n([tf.cast(_total(part.values), tf.float32) for part in easy])
        enough = 1.0 if all(part.reach == 1.0 for part in easy) else _EASY
        quick = tf.math.is_finite(total) & (scale >= enough)
        verdicts.append(tf.cond(quick, _yes, closely))
    return _all(verdicts)


def _total(values: tf.Tensor) -> tf.Tensor:
    """The sum, or that of magnitudes, in a form that XLA does not merge with an earlier sum.

    A gradient that is itself a sum (a bias's) it would sum anew in another order, which may be
    finite where the gradient is infinite.
    """
    if values.shape.rank is None or values.shape.rank < 2:
        return tf.reduce_sum(tf.abs(values))
    rows = tf.reshape(values, tf.stack([-1, tf.shape(values)[-1]]))
    return tf.reduce_sum(tf.linalg.matvec(rows, tf.ones(tf.shape(rows)[-1:], rows.dtype)))


def _yes() -> tf.Tensor:
    return tf.constant(True)


def _all(verdicts: Sequence[tf.Tensor]) -> tf.Tensor:
    return functools.reduce(tf.logical_and, verdicts) if verdicts else _yes()


def _closely(part: Part, scale: tf.Tensor) -> tf.Tensor:
    dtype = part.values.dtype
    unscaled = _amax(part.values) / tf.cast(scale, dtype)
    fits = tf.math.is_finite(unscaled * tf.cast(part.reach, dtype))
    return tf.reduce_all(tf.math.is_finite(part.values)) & fits


def _amax(values: tf.Tensor) -> tf.Tensor:
    nothing = tf.zeros((), values.dtype)
    return tf.maximum(tf.reduce_max(tf.abs(values)), nothing)


def all_finite(tree: Any) -> tf.Tensor:
    """0-d bool: every number in a tensor, or a `tf.nest` structure of tensors, is finite."""
    found = parts(tf.nest.flatten(tree))
    return _all([tf.reduce_all(tf.math.is_finite(part.values)) for part in found])


def inspect(
    grads: Iterable[Any],
    loss_scale: Any,
    loss: Any = None,
    amax: bool = False,
    sub: bool = False,
) -> Signal:
    """Measure gradients that still carry `loss_scale`.

    Args:
        grads: tensors or `tf.IndexedSlices`, floating or complex; None entries and empty tensors
            are passed over.
        loss_scale: the scale they carry: float or 0-d f32 tensor.
        loss: the unscaled loss; `loss_finite` stays True where it is not given.
        amax: also give the largest magnitude, as it came; 0 if there are no gradients.
        sub: also give the share of nonzero entries below 2**-14 in magnitude.

    Returns:
        A Signal of 0-d tensors. `finite` judges every gradient as it came and unscaled. Slices of
        `tf.IndexedSlices` may name the same row; they are summed only when they are applied, so
        the largest of them, unscaled, must be finite as many times as there are slices.
    """
    return measure(parts(grads), tf.cast(loss_scale, tf.float32), loss, amax, sub)


def measure(
    found: Sequence[Part],
    scale: tf.Tensor,
    loss: Any = None,
    amax: bool = False,
    sub: bool = False,
) -> Signal:
    """`inspect` of what `parts` made of gradients."""
    signal = Signal(sound(found, scale))
    if loss is not None:
        signal = signal._replace(loss_finite=all_finite(loss))
    if amax:
        tops = [_as_f32(_amax(part.values)) for part in found]
        top = tf.reduce_max(tf.stack(tops)) if tops else tf.constant(0.0)
        signal = signal._replace(amax=top)
    return signal._replace(sub=share(found)) if sub else signal


def _as_f32(amax: tf.Tensor) -> tf.Tensor:
    limit = tf.constant(F32_MAX, amax.dtype)
    narrow = tf.where(tf.math.is_inf(amax), amax, tf.minimum(amax, limit))
    return tf.cast(narrow, tf.float32)


def share(found: Sequence[Part]) -> tf.Tensor:
    """Of the nonzero entries, the share below 2**-14 in magnitude: 0-d f32, -1 of none."""
    small, nonzero = tf.constant(0, tf.int64), tf.constant(0, tf.int64)
    for values, _ in found:
        size = tf.abs(values)
        small += tf.math.count_nonzero((size > 0) & (size < _SMALLEST_NORMAL_F16))
        nonzero += tf.math.count_nonzero(size)
    part = tf.cast(small, tf.float32) / tf.cast(tf.maximum(nonzero, 1), tf.float32)
    return tf.where(nonzero > 0, part, -1.0)
