"""The values of a jaxpr while `autocast` evaluates it, and how one equation is carried out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from polyamp_jax._analysis import WIDE, castable, casts_after_sums, used_wide


def widest(dtypes: Iterable[Any]) -> Any:
    """The narrowest castable dtype that holds all of these castable ones."""
    distinct = set(dtypes)
    return distinct.pop() if len(distinct) == 1 else WIDE


class Frame:
    """The values of one jaxpr while it is evaluated.

    Attributes:
        values: of each variable, in the dtype it flows in.
        scalars: of each variable that is a scalar constant, its value.
        wide: variables to compute in float32, see `used_wide`.
        uncast: variables to leave as wide as they come, see `casts_after_sums`.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.values: dict[Var, Any] = {}
        self.scalars: dict[Var, float] = {}
        self.wide = used_wide(jaxpr)
        self.uncast = casts_after_sums(jaxpr)
        self._casts: dict[tuple[Var, Any], Any] = {}

    def read(self, atom: Any) -> Any:
        """The value, in the dtype it flows in."""
        return atom.val if isinstance(atom, Literal) else self.values[atom]

    def dtype(self, atom: Any) -> Any:
        """The dtype it flows in."""
        source: Any = atom.aval if isinstance(atom, Literal) else self.values[atom]
        return source.dtype

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
            return float(atom.val) if np.isrealobj(atom.val) and not np.shape(atom.val) else None
        return self.scalars.get(atom)


def bind(eqn: JaxprEqn, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """The results of the equation on other operands, with some parameters changed."""
    primitive: Any = eqn.primitive
    out = primitive.bind(*operands, **primitive.get_bind_params({**eqn.params, **changed}))
    return list(out) if primitive.multiple_results else [out]


def as_traced(eqn: JaxprEqn, frame: Frame) -> list[Any]:
    """The results of the equation in the dtypes it was traced in."""
    return bind(eqn, [frame.declared(atom) for atom in eqn.invars])
