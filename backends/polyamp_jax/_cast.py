"""Casting: trees of arrays, and unscaling."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyamp._errors import PolicyError
from polyamp._formats import format_of

Array = jax.Array


def dtype_of(name: str) -> jnp.dtype:
    """The dtype of a format's name, e.g. "float16" or "bf16".

    Raises:
        PolicyError: the format is not known, or JAX has no dtype for it (tfloat32).
    """
    canonical = format_of(name).name
    if not hasattr(jnp, canonical):
        raise PolicyError(f"JAX has no dtype for {canonical}; it is a compute mode of float32")
    return jnp.dtype(canonical)


def is_floating(leaf: Any) -> bool:
    """Whether `leaf` is a real floating array (or a shape with a floating dtype)."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def cast(tree: Any, dtype: Any) -> Any:
    """`tree` (any pytree) with its floating arrays in `dtype`; everything else as it is.

    Complex and integer arrays, keys and Python numbers are left alone; shapes with a floating
    dtype become shapes with `dtype`.
    """
    target = dtype_of(dtype) if isinstance(dtype, str) else jnp.dtype(dtype)

    def one(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct) and is_floating(leaf):
            return leaf.update(dtype=target)
        return leaf.astype(target) if is_floating(leaf) else leaf

    return jax.tree.map(one, tree)


def unscale(grads: Any, inverse: Any) -> Any:
    """New gradients: `grads` (any pytree) times `inverse` (0-d f32), in float32 or wider.

    float16 and bfloat16 come back as float32, since an unscaled gradient may be below their range.
    Integer and float0 leaves are passed through; complex ones are multiplied part by part.
    """
    return _widened(jnp.multiply, grads, inverse)


def divide(grads: Any, scale: Any) -> Any:
    """As `unscale`, but divided by `scale`: for scales above 2**126.

    The reciprocal of such a scale is subnormal, and XLA flushes it to 0.
    """
    return _widened(jnp.divide, grads, scale)


def wide(grad: Any) -> Any:
    """A gradient in float32, complex64 or wider."""
    return grad.astype(jnp.float32) if jnp.finfo(grad.dtype).bits < 32 else grad


def has_derivative(leaf: Any) -> bool:
    """Whether `leaf` is a real or complex floating array."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _widened(operation: Any, grads: Any, by: Any) -> Any:
    def of(grad: Any) -> Any:
        if not has_derivative(grad):
            return grad
        if jnp.iscomplexobj(grad):
            return jax.lax.complex(of(grad.real), of(grad.imag))
        value = wide(grad)
        return operation(value, jnp.asarray(by, jnp.float32).astype(value.dtype))

    return jax.tree.map(of, grads)
