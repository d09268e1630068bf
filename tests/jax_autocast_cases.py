"""What the tests of JAX's autocast share: reading jaxprs, and small functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MATMULS = ("dot_general", "conv_general_dilated")


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, those of the jaxprs inside it included."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from equations(inner)


def traced(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Every equation of `fun` on these arguments."""
    return list(equations(jax.make_jaxpr(fun)(*args, **kwargs)))


def named(eqns: list[Any], *names: str) -> list[Any]:
    """The equations with one of these primitives."""
    return [eqn for eqn in eqns if eqn.primitive.name in names]


def dtypes(eqn: Any) -> str:
    """The dtypes of an equation's inputs and outputs, e.g. "float16 float16 -> float16"."""
    into, out = (
        " ".join(str(v.aval.dtype) for v in variables) for variables in (eqn.invars, eqn.outvars)
    )
    return f"{into} -> {out}"


def matmuls(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """The dtypes of every matmul and convolution of `fun`."""
    return [dtypes(eqn) for eqn in named(traced(fun, *args, **kwargs), *MATMULS)]


def equal(a: Any, b: Any) -> None:
    """Two trees are the same, dtypes, bits and structure."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert jnp.asarray(x).dtype == jnp.asarray(y).dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def close(a: Any, b: Any, tolerance: float) -> None:
    """Leaves differ by at most `tolerance` times the largest number of the second tree's leaf."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.isfinite(x).all()
        assert np.abs(x - y).max() <= tolerance * max(np.abs(y).max(), 1e-30)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
    """Reproducible float32 noise."""
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def half(x: jax.Array) -> jax.Array:
    """`x` in float16."""
    return x.astype(jnp.float16)


def full(x: jax.Array) -> jax.Array:
    """`x` in float32."""
    return x.astype(jnp.float32)
