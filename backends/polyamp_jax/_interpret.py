"""Evaluates a jaxpr with the operations in the dtypes of `_primitives`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from polyamp._formats import FORMATS
from polyamp_jax._analysis import WIDE, castable
from polyamp_jax._cast import dtype_of
from polyamp_jax._compat import scope_of, traced_under
from polyamp_jax._frame import Frame, as_traced, bind, widest
from polyamp_jax._primitives import ARITHMETIC, CONSTANT, EXACT, INDEPENDENT, MATMUL, WIDENED
from polyamp_jax._regions import REGIONS

MARK = "polyamp.autocast"
"""Name scope of every operation whose precision is settled; an outer autocast lets it be."""


class Interpreter:
    """Evaluates jaxprs under one compute dtype (float16 or bfloat16), by its canonical name."""

    def __init__(self, compute: str) -> None:
        self.compute = compute
        self.dtype = dtype_of(compute)

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Any],
        scalars: Sequence[float | None] = (),
    ) -> list[Any]:
        """The outputs, in the dtypes they flow in.

        Args:
            jaxpr, consts: what to evaluate.
            args: one value for each input; a castable one in any castable dtype.
            scalars: of each input that is a known scalar constant, its value; empty: of none.
        """
        frame = Frame(jaxpr)
        frame.values.update(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        known = zip(jaxpr.invars, scalars, strict=True) if scalars else ()
        frame.scalars.update((var, value) for var, value in known if value is not None)
        for place, eqn in enumerate(jaxpr.eqns):
            with traced_under(eqn):
                out = self._equation(eqn, frame, MARK in scope_of(eqn))
            frame.values.update(zip(eqn.outvars, out, strict=True))
            del out
            frame.release(place)
        return [frame.read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, frame: Frame, settled: bool) -> list[Any]:
        name = eqn.primitive.name
        if settled:
            return as_traced(eqn, frame)
        if name in CONSTANT and (value := frame.scalar(eqn.invars[0])) is not None:
            frame.scalars[eqn.outvars[0]] = value
        if name in REGIONS:
            return REGIONS[name](self, eqn, frame)
        if name == "convert_element_type":
            return _convert(eqn, frame)
        if name in MATMUL:
            return self._matmul(eqn, frame)
        if _names_a_dtype(eqn):
            return as_traced(eqn, frame)
        if name in WIDENED:
            return bind(eqn, [frame.cast(atom, WIDE) for atom in eqn.invars])
        if name in INDEPENDENT:
            return bind(eqn, [frame.read(atom) for atom in eqn.invars])
        dtype = _common(eqn, frame) if name in ARITHMETIC or name in EXACT else None
        if dtype is None:
            return as_traced(eqn, frame)
        return bind(eqn, [frame.cast(atom, dtype) for atom in eqn.invars])

    def _matmul(self, eqn: JaxprEqn, frame: Frame) -> list[Any]:
        preferred = eqn.params["preferred_element_type"]
        avals: list[Any] = [atom.aval for atom in eqn.invars]
        if (
            any(aval.dtype != WIDE for aval in avals)
            or preferred not in (None, WIDE, self.dtype)
            or _is_algorithm(eqn.params["precision"])
        ):
            return as_traced(eqn, frame)
        operands = [frame.cast(atom, self.dtype) for atom in eqn.invars]
        if preferred is None:
            return bind(eqn, operands)
        return bind(eqn, operands, preferred_element_type=self.dtype)


def _common(eqn: JaxprEqn, frame: Frame) -> Any:
    """The dtype the operands meet in; None if they were traced in several."""
    atoms: list[Any] = [atom for atom in eqn.invars if castable(atom.aval)]
    if len({atom.aval.dtype for atom in atoms}) != 1:
        return None
    scalars = [frame.scalar(atom) for atom in atoms]
    dtypes = [frame.dtype(atom) for atom, s in zip(atoms, scalars, strict=True) if s is None]
    dtype = widest(dtypes) if dtypes else atoms[0].aval.dtype
    wide = eqn.primitive.name in ARITHMETIC and frame.wide.issuperset(eqn.outvars)
    if wide or not all(_holds(dtype, s) for s in scalars if s is not None):
        return WIDE
    return dtype


def _convert(eqn: JaxprEqn, frame: Frame) -> list[Any]:
    atom: Any = eqn.invars[0]
    same = castable(atom.aval) and atom.aval.dtype == eqn.params["new_dtype"]
    if (same and frame.dtype(atom) != atom.aval.dtype) or eqn.outvars[0] in frame.uncast:
        return [frame.read(atom)]
    return bind(eqn, [frame.read(atom)])


def _holds(dtype: Any, value: float) -> bool:
    """Whether `dtype` holds the constant as something other than 0, infinity or a subnormal."""
    numbers = FORMATS[jnp.dtype(dtype).name]
    ordinary = np.isfinite(value) and value != 0
    return not ordinary or numbers.smallest_normal <= abs(value) <= numbers.max


def _is_algorithm(precision: Any) -> bool:
    """Whether the user named the dtypes of the multiplication itself."""
    return isinstance(precision, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset)


def _names_a_dtype(eqn: JaxprEqn) -> bool:
    dtypes = [v for v in eqn.params.values() if isinstance(v, np.dtype | type(jnp.float32))]
    return any(jnp.issubdtype(v, jnp.floating) for v in dtypes)
