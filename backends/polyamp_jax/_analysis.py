"""What `autocast` must know of a whole jaxpr before it evaluates the first equation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var

from polyamp_jax._primitives import ARITHMETIC, EXACT, FLOAT32, INDEPENDENT, WIDENED

WIDE = jnp.dtype("float32")
CASTABLE = frozenset(jnp.dtype(name) for name in ("float16", "bfloat16", "float32"))

_PASSES = ARITHMETIC | EXACT | INDEPENDENT


def castable(aval: Any) -> bool:
    """Whether values of this abstract type may flow in another dtype than they were traced in."""
    return isinstance(aval, jax.core.ShapedArray) and aval.dtype in CASTABLE


def used_wide(jaxpr: Jaxpr) -> set[Var]:
    """Variables that float32 operations alone use, directly or through moves and arithmetic."""
    wide: set[Any] = set()
    other = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name
        passes = name in _PASSES or eqn.params.get("new_dtype") == WIDE
        wanted = name in WIDENED or (
            passes and all(v in wide and v not in other for v in eqn.outvars)
        )
        (wide if wanted else other).update(v for v in eqn.invars if isinstance(v, Var))
    return wide - other


def casts_after_sums(jaxpr: Jaxpr) -> set[Var]:
    """Results of the casts that JAX's own sums and means of low values end with.

    For float16 and bfloat16 JAX writes: cast to float32, sum, spread out again or divide by the
    count, cast back. The cast back would overflow where the policy asks for a float32 sum.
    """
    raised: dict[Any, Any] = {}
    sums: dict[Any, Any] = {}
    back: set[Any] = set()
    for eqn in jaxpr.eqns:
        name, source = eqn.primitive.name, next(iter(eqn.invars), None)
        if len(eqn.outvars) != 1 or not isinstance(source, Var) or not castable(source.aval):
            continue
        out: Any = eqn.outvars[0]
        aval: Any = source.aval
        if name == "convert_element_type":
            new = eqn.params["new_dtype"]
            if new == WIDE:
                raised[out] = aval.dtype
            elif sums.get(source) == new:
                back.add(out)
        elif name in FLOAT32["sum"] and source in raised:
            sums[out] = raised[source]
        elif source in sums and (name == "broadcast_in_dim" or _is_division(eqn)):
            sums[out] = sums[source]
    return back


def _is_division(eqn: Any) -> bool:
    return eqn.primitive.name == "div" and isinstance(eqn.invars[1], Literal)
