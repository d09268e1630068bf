"""The values of a jaxpr while `autocast` evaluates it, and how one equation is carried out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from polyamp_jax._primitives import ARITHMETIC, EXACT, INDEPENDENT, WIDENED

FLOAT32 = jnp.dtype("float32")
CASTABLE = frozenset(jnp.dtype(name) for name in ("float16", "bfloat16", "float32"))


def castable(aval: Any) -> bool:
    """Whether values of this abstract type may flow in another dtype than they were traced in."""
    return isinstance(aval, jax.core.ShapedArray) and aval.dtype in CASTABLE


class Frame:
    """The values of one jaxpr while it is evaluated.

    Attributes:
        values: of each variable, in the dtype it flows in.
        scalars: of each variable that is a scalar constant, its value.
        wide: variables that only float32 operations use.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.values: dict[Var, Any] = {}
        self.scalars: dict[Var, float] = {}
        self.wide = _used_wide(jaxpr)
        self._casts: dict[tuple[Var, Any], Any] = {}

    def read(self, atom: Any) -> Any:
        """The value, in the dtype it flows in."""
        return atom.val if isinstance(atom, Literal) else self.values[atom]

    def dtype(self, atom: Any) -> Any:
        """The dtype it flows in."""
        return atom.aval.dtype if isinstance(atom, Literal) else self.values[atom].dtype

    def cast(self, atom: Any, dtype: Any) -> Any:
        """The value in `dtype`, cast once for each variable; as it is if not castable."""
        value = self.read(atom)
        if not castable(atom.aval) or self.dtype(atom) == dtype:
            return value
        if isinstance(atom, Literal):
            return np.asarray(value).astype(dtype)
        key = (atom, jnp.dtype(dtype))
        if key not in self._casts:
            self._casts[key] = jax.lax.convert_element_type(value, dtype)
        return self._casts[key]

    def declared(self, atom: Any) -> Any:
        """The value in the dtype it was traced in."""
        return self.cast(atom, atom.aval.dtype) if castable(atom.aval) else self.read(atom)

    def scalar(self, atom: Any) -> float | None:
        """The value of a scalar constant, None for anything else."""
        if isinstance(atom, Literal):
            return float(atom.val) if castable(atom.aval) and not np.shape(atom.val) else None
        return self.scalars.get(atom)


def bind(eqn: JaxprEqn, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """The results of the equation on other operands, with some parameters changed."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    out = eqn.primitive.bind(*operands, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def as_traced(eqn: JaxprEqn, frame: Frame) -> list[Any]:
    """The results of the equation in the dtypes it was traced in."""
    return bind(eqn, [frame.declared(atom) for atom in eqn.invars])


def _used_wide(jaxpr: Jaxpr) -> set[Var]:
    """Variables that float32 operations alone use, directly or through moves and arithmetic."""
    wide: set[Any] = set()
    other = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    for eqn in reversed(jaxpr.eqns):
        name = eqn.primitive.name
        passes = name in ARITHMETIC or name in EXACT or name in INDEPENDENT
        wanted = name in WIDENED or (passes and all(v in wide - other for v in eqn.outvars))
        (wide if wanted else other).update(v for v in eqn.invars if isinstance(v, Var))
    return wide - other
