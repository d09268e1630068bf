"""What one step's gradients hold: finite or not, before and after unscaling, and how large."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras
from keras import ops

from polyamp._state import Signal
from polyamp._xp import F32_MAX
from polyamp_keras._cast import is_sliced, wide
from polyamp_keras._ops import FRAMEWORK, cond, xp

_SMALLEST_NORMAL_F16 = 2.0**-14


def inspect(
    grads: Iterable[Any],
    loss_scale: Any,
    loss: Any = None,
    amax: bool = False,
    sub: bool = False,
) -> Signal:
    """Measure gradients that still carry `loss_scale`.

    Args:
        grads: floating tensors of the Keras backend, `tf.IndexedSlices` or None; None entries and
            empty tensors are passed over.
        loss_scale: the scale they carry: float or 0-d f32 tensor.
        loss: the unscaled loss; `loss_finite` stays True where it is not given.
        amax: also give the largest magnitude, as it came.
        sub: also give the share of nonzero entries below 2**-14 in magnitude.

    Returns:
        A Signal of 0-d tensors. `finite` judges every gradient as it came and unscaled.
    """
    if FRAMEWORK == "torch":
        from polyamp_torch._inspect import inspect as torch_inspect

        return torch_inspect(grads, loss_scale, loss, amax, sub)
    if FRAMEWORK == "tensorflow":
        from polyamp_tensorflow._inspect import inspect as tensorflow_inspect

        return tensorflow_inspect(grads, loss_scale, loss, amax, sub)
    values = [v for g in grads if g is not None and 0 not in (v := _stored(g)).shape]
    signal = Signal(_all_finite(values, ops.cast(loss_scale, "float32")))
    if loss is not None:
        signal = signal._replace(loss_finite=ops.all(ops.isfinite(loss)))
    if amax:
        tops = [_as_f32(_amax(v)) for v in values]
        signal = signal._replace(amax=ops.max(ops.stack(tops)) if tops else xp.c(0.0, "f32"))
    return signal._replace(sub=_share(values)) if sub else signal


def inspect_for(
    variables: Sequence[Any], grads: Sequence[Any], loss_scale: Any, amax: bool
) -> Signal:
    """`inspect` of what is to be applied to `variables`.

    On TensorFlow the gradients must be finite unscaled in the dtype of their variables and summed
    over the replicas too, as for `polyamp.tensorflow.LossScaler`.
    """
    if FRAMEWORK != "tensorflow":
        return inspect(grads, loss_scale, amax=amax)
    import tensorflow as tf

    from polyamp_tensorflow._inspect import measure, parts

    context = tf.distribute.get_replica_context()
    replicas = 1 if context is None else context.num_replicas_in_sync
    found = parts(grads, [v.dtype for v in variables], replicas)
    return measure(found, tf.cast(loss_scale, tf.float32), amax=amax)


def quickly_finite(grads: Sequence[Any], scale: float) -> bool:
    """Whether torch gradients are finite for sure, scaled and unscaled; False is not known.

    As for the other frameworks, a sum is finite only if every term is. Waits for the device.
    """
    if FRAMEWORK != "torch" or scale < 1.0:
        return False
    import torch

    present = [g for g in grads if g is not None]
    if not present or any(g.is_sparse or g.is_complex() for g in present):
        return False
    with torch.no_grad():
        sums = [g.sum(dtype=torch.float32) for g in present]
    return all(map(math.isfinite, _items(sums)))


def _items(sums: Sequence[Any]) -> list[float]:
    """0-d torch tensors as numbers, with one wait for a device that is not the CPU."""
    import torch

    home = sums[0].device
    if all(s.device.type == "cpu" for s in sums):
        return [s.item() for s in sums]
    return torch.stack([s.to(home) for s in sums]).tolist()


def _stored(grad: Any) -> Any:
    values = wide(ops.convert_to_tensor(grad.values if is_sliced(grad) else grad))
    if not keras.backend.standardize_dtype(values.dtype).startswith("complex"):
        return values
    return ops.stack([ops.real(values), ops.imag(values)])


def _all_finite(values: Sequence[Any], scale: Any) -> Any:
    """0-d bool: every value is finite as it came and divided by `scale`.

    A sum is finite only if every term is: one pass without a temporary. Only where it is not
    (large terms may overflow together), or where the scale is below 1, each value is looked at.
    """
    if not values:
        return xp.c(0, "i32") == xp.c(0, "i32")
    total = _sum(values[0])
    for value in values[1:]:
        total = total + _sum(value)

    def at_once() -> Any:
        return ops.isfinite(total)

    def each() -> Any:
        return ops.all(ops.stack([_finite(value, scale) for value in values]))

    return cond(ops.isfinite(total) & (scale >= xp.c(1.0, "f32")), at_once, each)


def _sum(value: Any) -> Any:
    """The sum of a JAX array; on a CPU, where that is quicker, rows first as a product with ones.

    Behind a barrier: XLA makes one sum of a sum of sums, and so would sum anew what a bias gradient
    is the sum of. That may be finite where the gradient is infinite.
    """
    import jax

    value = jax.lax.optimization_barrier(value)  # type: ignore[no-untyped-call]
    if value.ndim and jax.default_backend() == "cpu":
        value = value @ ops.ones(value.shape[-1], value.dtype)
    return ops.cast(ops.sum(value), "float32")


def _finite(value: Any, scale: Any) -> Any:
    return ops.all(ops.isfinite(value / ops.cast(scale, value.dtype)))


def _amax(value: Any) -> Any:
    top = ops.max(ops.abs(value))
    # XLA's maximum passes NaN over.
    return ops.where(ops.all(ops.isfinite(value)), top, ops.full_like(top, float("inf")))


def _as_f32(top: Any) -> Any:
    narrow = ops.minimum(top, ops.cast(F32_MAX, top.dtype))
    return ops.cast(ops.where(ops.isfinite(top), narrow, top), "float32")


def _share(values: Sequence[Any]) -> Any:
    small, nonzero = xp.c(0.0, "f32"), xp.c(0.0, "f32")
    for value in values:
        size = ops.abs(value)
        low = ops.logical_and(size > 0, size < _SMALLEST_NORMAL_F16)
        small = small + ops.sum(ops.cast(low, "float32"))
        nonzero = nonzero + ops.sum(ops.cast(size > 0, "float32"))
    share = small / ops.maximum(nonzero, xp.c(1.0, "f32"))
    return ops.where(nonzero > 0, share, xp.c(-1.0, "f32"))
