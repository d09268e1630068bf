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

    Complex and integer arrays, keys and Python numbers are left alone.
    """
    target = dtype_of(dtype) if isinstance(dtype, str) else jnp.dtype(dtype)
    return jax.tree.map(lambda leaf: leaf.astype(target) if is_floating(leaf) else leaf, tree)


def unscale(grads: Any, inverse: Any) -> Any:
    """New gradients: `grads` (any pytree) times `inverse` (0-d f32), multiplied in float32 or wider.

    float16 and bfloat16 come back as float32, since an unscaled gradient may be below their range.
    Integer and float0 leaves are passed through; complex ones are multiplied in complex64 or wider.
    """
    return jax.tree.map(lambda grad: _times(grad, inverse), grads)


def _times(grad: Any, inverse: Any) -> Any:
    if not (hasattr(grad, "dtype") and jnp.issubdtype(grad.dtype, jnp.inexact)):
        return grad
    wide = jnp.promote_types(grad.dtype, jnp.float32)
    real = jnp.finfo(wide).dtype
    return grad.astype(wide) * jnp.asarray(inverse, jnp.float32).astype(real)
