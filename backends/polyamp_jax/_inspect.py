"""What one step's gradients hold: finite or not, before and after unscaling, and how large."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from polyamp._state import Signal
from polyamp_jax._cast import has_derivative, unscale

Array = jax.Array

_SMALLEST_NORMAL_F16 = 2.0**-14


def arrays(grads: Any) -> list[Array]:
    """The leaves of `grads` that have a derivative: floating or complex, not empty."""
    return [leaf for leaf in jax.tree.leaves(grads) if has_derivative(leaf) and leaf.size]


def all_finite(values: list[Array]) -> Array:
    """0-d bool: no infinity and no NaN anywhere. Never taken from a maximum: XLA's drops NaN.

    On a CPU, where XLA reduces a sum several times faster than `isfinite`: a finite sum has finite
    terms; if it is not finite, which a large sum may also be, every entry is looked at. Behind a
    barrier: of a gradient that is itself a sum (a bias's) XLA would make one sum in another order,
    which may be finite where the gradient is infinite.
    """
    if not values:
        return jnp.array(True)
    if jax.default_backend() != "cpu" or not isinstance(values[0], jax.core.Tracer):
        return _all(jnp.isfinite(value).all() for value in values)
    values = jax.lax.optimization_barrier(values)
    quick = _all(jnp.isfinite(jnp.sum(value)) for value in values)
    return jax.lax.cond(quick, lambda: quick, lambda: _all(map(_self_difference_is_finite, values)))


def _all(flags: Iterable[Array]) -> Array:
    return functools.reduce(jnp.logical_and, flags)


def _self_difference_is_finite(value: Array) -> Array:
    """isfinite(value).all() without an array of flags: x - x is 0, or NaN if x is not finite."""
    return jnp.isfinite(jnp.sum(value - value))


def inspect(
    grads: Any, loss_scale: Any, loss: Any = None, amax: bool = False, sub: bool = False
) -> Signal:
    """Measure gradients that still carry `loss_scale`.

    Args:
        grads: any pytree; integer, float0 and empty leaves are passed over.
        loss_scale: the scale they carry: float or 0-d f32 array.
        loss: the unscaled loss; `loss_finite` stays True where it is not given.
        amax: also give the largest magnitude, as it came (of complex numbers: of their parts).
        sub: also give the share of nonzero entries below 2**-14 in magnitude.

    Returns:
        A Signal of 0-d arrays. `finite` judges the unscaled values, which are infinite or NaN
        where the gradient as it came is. It is never taken from the maximum: XLA's drops NaN.
    """
    values = arrays(grads)
    inverse = 1.0 / jnp.asarray(loss_scale, jnp.float32)
    signal = Signal(all_finite(unscale(values, inverse)))
    if loss is not None:
        signal = signal._replace(loss_finite=jnp.isfinite(loss).all())
    if amax:
        signal = signal._replace(amax=largest(values))
    return signal._replace(sub=share(values)) if sub else signal


def largest(values: list[Array]) -> Array:
    """Largest magnitude, 0-d f32; 0 of nothing."""
    tops = [_as_f32(jnp.max(size)) for size in _sizes(values)]
    return functools.reduce(jnp.maximum, tops, jnp.zeros((), jnp.float32))


def _as_f32(top: Array) -> Array:
    """A finite float64 beyond float32 stays finite."""
    if top.dtype != jnp.float64:
        return top.astype(jnp.float32)
    narrow = jnp.minimum(top, float(jnp.finfo(jnp.float32).max))
    return jnp.where(jnp.isfinite(top), narrow, top).astype(jnp.float32)


def _sizes(values: list[Array]) -> list[Array]:
    parts = [part for v in values for part in ((v.real, v.imag) if jnp.iscomplexobj(v) else (v,))]
    return [jnp.abs(part) for part in parts]


def share(values: list[Array]) -> Array:
    """Of the nonzero entries, the share below 2**-14 in magnitude: 0-d f32, -1 of none."""
    zero = jnp.zeros((), jnp.int32)
    sizes = _sizes(values)
    small = [jnp.sum((s > 0) & (s < _SMALLEST_NORMAL_F16), dtype=jnp.int32) for s in sizes]
    nonzero = [jnp.sum(s > 0, dtype=jnp.int32) for s in sizes]
    total = functools.reduce(jnp.add, nonzero, zero)
    found = functools.reduce(jnp.add, small, zero)
    part = found.astype(jnp.float32) / jnp.maximum(total, 1).astype(jnp.float32)
    return jnp.where(total > 0, part, jnp.float32(-1.0))
