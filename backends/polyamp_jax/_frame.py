"""The values of a jaxpr while `autocast` evaluates it, and how one equation is carried out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from polyamp_jax._analysis import WIDE, castable, casts_after_sums, used_wide
from polyamp_jax._compat import rebind


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
        self._casts: dict[Var, dict[Any, Any]] = {}
        self._last = _last_uses(jaxpr)

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
        known, name = self._casts.setdefault(atom, {}), jnp.dtype(dtype)
        if name not in known:
            known[name] = jax.lax.convert_element_type(value, dtype)
        return known[name]

    def release(self, place: int) -> None:
        """Forget what no equation after number `place` needs: outside jit these are arrays."""
        for var in self._last.get(place, ()):
            self.values.pop(var, None)
            self._casts.pop(var, None)

    def declared(self, atom: Any) -> Any:
        """The value in the dtype it was traced in."""
        return self.cast(atom, atom.aval.dtype) if castable(atom.aval) else self.read(atom)

    def scalar(self, atom: Any) -> float | None:
        """The value of a scalar constant, None for anything else."""
        if isinstance(atom, Literal):
            return float(atom.val) if np.isrealobj(atom.val) and not np.shape(atom.val) else None
        return self.scalars.get(atom)


def _last_uses(jaxpr: Jaxpr) -> dict[int, list[Var]]:
    """By number of an equation, the variables that nothing after it reads."""
    seen: set[Any] = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    last: dict[int, list[Var]] = {}
    for place, eqn in reversed(list(enumerate(jaxpr.eqns))):
        used = [atom for atom in (*eqn.outvars, *eqn.invars) if isinstance(atom, Var)]
        last[place] = [var for var in dict.fromkeys(used) if var not in seen]
        seen.update(last[place])
    return last


def bind(eqn: JaxprEqn, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """The results of the equation on other operands, with some parameters changed."""
    return rebind(eqn, operands, {**eqn.params, **changed})


def as_traced(eqn: JaxprEqn, frame: Frame) -> list[Any]:
    """The results of the equation in the dtypes it was traced in."""
    return bind(eqn, [frame.declared(atom) for atom in eqn.invars])
