"""The array functions of a transition (`polyamp.Namespace`) on JAX arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyamp._xp import Kind

Array = jax.Array

_DTYPES = {"f32": jnp.float32, "i32": jnp.int32}


class Ops:
    """`polyamp.Namespace` over 0-d arrays, traced or not."""

    minimum = staticmethod(jnp.minimum)
    maximum = staticmethod(jnp.maximum)
    isfinite = staticmethod(jnp.isfinite)
    logical_not = staticmethod(jnp.logical_not)
    logical_or = staticmethod(jnp.logical_or)
    multiply = staticmethod(jnp.multiply)
    left_shift = staticmethod(jnp.left_shift)
    right_shift = staticmethod(jnp.right_shift)

    def where(self, condition: Any, yes: Any, no: Any) -> Array:
        """`yes` where `condition`, else `no`."""
        return jnp.where(condition, yes, no)

    def c(self, value: float, kind: Kind) -> Array:
        """A typed 0-d constant."""
        return jnp.asarray(value, _DTYPES[kind])

    def bits(self, a: Array) -> Array:
        """The bits of an f32 as i32."""
        return jax.lax.bitcast_convert_type(a, jnp.int32)

    def from_bits(self, a: Array) -> Array:
        """The f32 whose bits an i32 holds."""
        return jax.lax.bitcast_convert_type(a, jnp.float32)

    def as_f32(self, a: Array) -> Array:
        """An i32 as f32."""
        return a.astype(jnp.float32)


xp = Ops()
"""The namespace on JAX's default device."""


def compiled(fn: Any) -> Any:
    """`fn` under jax.jit."""
    return jax.jit(fn)


def devices() -> list[str]:
    """Names of the usable devices, "cpu" first, e.g. ["cpu", "cuda:0"]."""
    return list(devices_by_name())


def devices_by_name() -> dict[str, jax.Device]:
    """JAX's devices by the names of `devices`."""
    try:
        cpu = {"cpu": jax.local_devices(backend="cpu")[0]}
    except RuntimeError:  # JAX_PLATFORMS without the CPU
        cpu = {}
    others = [device for device in jax.local_devices() if device.platform != "cpu"]
    return {**cpu, **{f"{_NAMES.get(d.platform, d.platform)}:{d.id}": d for d in others}}


_NAMES = {"gpu": "cuda"}


def select(flag: Any, new: Any, old: Any) -> Any:
    """`new` where `flag` (bool or 0-d bool array) is true, else `old`; any pytree.

    A select, not a product: NaN in the branch not taken does no harm.
    """
    return jax.tree.map(lambda n, o: _selected(flag, n, o), new, old)


def _selected(flag: Any, new: Any, old: Any) -> Array:
    first, second = (jnp.shape(new), jnp.result_type(new)), (jnp.shape(old), jnp.result_type(old))
    if first != second:
        raise TypeError(f"cannot choose between shape and dtype {first} and {second}")
    return jnp.where(flag, new, old)
