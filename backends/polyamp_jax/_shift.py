"""A power of two of a module's own: gradients inside it are 2**bits as large as outside.

    inputs       cast to the compute dtype; backward: cotangent times 2**-bits in float32, cast back
    outputs      cast to the output dtype; backward: cotangent times 2**bits, cast to compute dtype
    parameters   as inputs: of nnx and equinox all that the module holds, of linen each module's own

so each product is taken in the wider of the two formats, and what leaves the module is as without.
At a module inside one with a power of its own the difference of the two is applied. There is no
forward mode (`jax.jvp`) through such a cast.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from polyamp._policy import LARGEST_SHIFT
from polyamp_jax._cast import cast, dtype_of, is_floating

Array = jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _cast(value: Array, dtype: str, bits: int, source: str) -> Array:
    """`value` (in dtype `source`) in `dtype`, its cotangent multiplied by 2**bits in float32."""
    return value.astype(dtype)


def _forward(value: Array, dtype: str, bits: int, source: str) -> tuple[Array, None]:
    return value.astype(dtype), None


def _backward(dtype: str, bits: int, source: str, _: None, grad: Array) -> tuple[Array]:
    return (times(grad, bits).astype(source),)


_cast.defvjp(_forward, _backward)


def times(grad: Array, bits: int) -> Array:
    """grad * 2**bits, exact but at the ends of float32, in float32 or wider."""
    wide = grad if grad.dtype == jnp.float64 else grad.astype(jnp.float32)
    if abs(bits) <= LARGEST_SHIFT:
        return wide * 2.0**bits
    half = bits // 2  # 2**bits is no number of float32, and XLA would make one constant of two
    return jax.lax.optimization_barrier(wide * 2.0**half) * 2.0 ** (bits - half)


def cast_shifted(tree: Any, dtype: str | None, bits: int) -> Any:
    """The tree with floating arrays cast, and their cotangents multiplied by 2**bits.

    Args:
        dtype: canonical name; None: that of each array.
        bits: 0: a plain cast.
    """

    def one(leaf: Any) -> Any:
        if not is_floating(leaf):
            return leaf
        target = leaf.dtype.name if dtype is None else dtype
        if not bits or isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf if leaf.dtype.name == target else cast(leaf, target)
        return _cast(jnp.asarray(leaf), dtype_of(target).name, bits, leaf.dtype.name)

    return jax.tree.map(one, tree)
