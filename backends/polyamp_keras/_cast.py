"""Casting: trees of tensors, and unscaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
from keras import ops

from polyamp._formats import format_of
from polyamp_keras._ops import FRAMEWORK, own_tensor


def cast(tree: Any, dtype: str) -> Any:
    """`tree` with its floating tensors in `dtype`; everything else is passed through as it is.

    Goes through dicts, lists, tuples and named tuples.

    Raises:
        PolicyError: the format is not known.
    """
    target = format_of(dtype).name

    def one(value: Any) -> Any:
        tensor = ops.is_tensor(value) or isinstance(value, keras.Variable)
        return ops.cast(value, target) if tensor and is_float(value) else value

    return keras.tree.map_structure(one, tree)


def is_float(tensor: Any) -> bool:
    """Whether a tensor or variable is of a floating dtype."""
    return "float" in keras.backend.standardize_dtype(tensor.dtype)


def wide(tensor: Any) -> Any:
    """A tensor in float32, or as it is where it is float64 or complex."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    wider = dtype == "float64" or dtype.startswith("complex")
    return tensor if wider else ops.cast(tensor, "float32")


def is_sliced(grad: Any) -> bool:
    """Whether a gradient is `tf.IndexedSlices`, as an embedding's is on TensorFlow."""
    return FRAMEWORK == "tensorflow" and hasattr(grad, "indices") and hasattr(grad, "values")


def on_values(grad: Any, change: Callable[[Any], Any]) -> Any:
    """`change` of a gradient's values; of the stored ones where it is sparse."""
    if not is_sliced(grad):
        return change(ops.convert_to_tensor(grad))
    import tensorflow as tf

    return tf.IndexedSlices(change(grad.values), grad.indices, grad.dense_shape)


def unscale(grads: Iterable[Any], inverse: Any) -> list[Any]:
    """New gradients: `grads` times `inverse` (float or 0-d f32 tensor), multiplied in float32.

    Args:
        grads: tensors, `tf.IndexedSlices` or None; not changed. float16 and bfloat16 come back as
            float32, since an unscaled gradient may be below their range.
        inverse: 1 / scale.
    """
    if FRAMEWORK == "torch":
        return _unscale_torch(list(grads), inverse)

    def times(values: Any) -> Any:
        values = wide(values)
        return values * ops.cast(inverse, values.dtype)

    return [None if g is None else on_values(g, times) for g in grads]


def unscale_own(grads: Sequence[Any], variables: Sequence[Any], inverse: float) -> bool:
    """Unscale torch gradients in place, if each is its variable's own `.grad` in float32 or wider.

    That is what Keras' train step passes and drops afterwards, and what `torch.amp.GradScaler` does
    to it; new tensors of that size would cost more than all else here.

    Returns:
        Whether they were unscaled; else nothing was done.
    """
    if FRAMEWORK != "torch":
        return False
    import torch

    for grad, variable in zip(grads, variables, strict=True):
        if grad is None or grad.is_sparse or grad.dtype not in (torch.float32, torch.float64):
            return False
        held = own_tensor(variable)
        if getattr(variable.value if held is None else held, "grad", None) is not grad:
            return False
    with torch.no_grad():
        torch._foreach_mul_(list(grads), inverse)
    return True


def _unscale_torch(grads: list[Any], inverse: Any) -> list[Any]:
    import torch

    from polyamp_torch._cast import unscale as torch_unscale

    if all(g is not None and g.dtype == torch.float32 and not g.is_sparse for g in grads):
        with torch.no_grad():
            return list(torch._foreach_mul(grads, inverse)) if grads else []
    return torch_unscale(grads, inverse)
