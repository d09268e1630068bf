"""Casting trees of tensors, and unscaling gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from polyamp._errors import PolicyError
from polyamp._formats import format_of

_NARROW = (tf.float16, tf.bfloat16)


def dtype_of(name: str) -> tf.DType:
    """The TensorFlow dtype of a format's name, e.g. "float16" or "bf16".

    Raises:
        PolicyError: the format is not known, or TensorFlow has no dtype for it (tfloat32).
    """
    canonical = format_of(name).name
    dtype = getattr(tf, canonical, None)
    if not isinstance(dtype, tf.DType):
        raise PolicyError(f"TensorFlow has no dtype for {canonical}")
    return dtype


def cast(tree: Any, dtype: str | tf.DType) -> Any:
    """`tree` with its floating tensors in `dtype`; everything else is passed through as it is.

    Goes through what `tf.nest` does: dicts, lists, tuples, named tuples, dataclasses. Variables
    come back as tensors. Complex and integer tensors are left alone.
    """
    target = dtype if isinstance(dtype, tf.DType) else dtype_of(dtype)

    def one(value: Any) -> Any:
        floating = tf.is_tensor(value) and tf.as_dtype(value.dtype).is_floating
        return tf.cast(value, target) if floating else value

    return tf.nest.map_structure(one, tree)


def unscale(grads: Iterable[Any], inverse: Any) -> list[Any]:
    """New gradients: `grads` times `inverse` (float or 0-d f32 tensor), multiplied in float32.

    Args:
        grads: tensors, `tf.IndexedSlices` or None. float16 and bfloat16 come back as float32,
            since an unscaled gradient may be below their range.
        inverse: 1 / scale.
    """
    return _each(tf.multiply, grads, inverse)


def divide(grads: Iterable[Any], scale: Any) -> list[Any]:
    """New gradients: `grads` over `scale`, else as `unscale`.

    Slower under XLA, but right above 2**126, where 1 / scale is subnormal and flushed to 0.
    """
    return _each(tf.divide, grads, scale)


def wide(values: tf.Tensor) -> tf.Tensor:
    """`values` in float32 if their dtype is narrower."""
    return tf.cast(values, tf.float32) if values.dtype in _NARROW else values


def _each(operation: Callable[[Any, Any], Any], grads: Iterable[Any], factor: Any) -> list[Any]:
    def one(grad: Any) -> Any:
        if grad is None:
            return None
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(one(grad.values), grad.indices, grad.dense_shape)
        values = wide(tf.convert_to_tensor(grad))
        return operation(values, tf.cast(factor, values.dtype))

    return [one(grad) for grad in grads]
