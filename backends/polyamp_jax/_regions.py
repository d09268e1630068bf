"""The primitives that hold a jaxpr: the same evaluation inside, boundaries cast where they must be.

jit, remat      inside and outside agree on any dtype
scan, while     what is carried keeps the dtypes it was traced with; conditions run as traced
cond            branches return the dtypes they were traced with
custom_jvp      called as it was traced
all others      called as they were traced (custom_vjp, shard_map, pallas_call, ...)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from polyamp_jax._analysis import WIDE, castable
from polyamp_jax._compat import own_name
from polyamp_jax._frame import Frame, as_traced, bind, widest
from polyamp_jax._primitives import NARROW, WIDENED_FUNCTIONS

if TYPE_CHECKING:
    from polyamp_jax._interpret import Interpreter

_rewritten: weakref.WeakKeyDictionary[ClosedJaxpr, dict[Any, ClosedJaxpr]] = (
    weakref.WeakKeyDictionary()
)


def rewrite(
    interpreter: Interpreter,
    closed: ClosedJaxpr,
    avals: Sequence[Any],
    *,
    fixed: int | None = 0,
    scalars: Sequence[float | None] = (),
) -> ClosedJaxpr:
    """`closed` as a jaxpr of its own with the operations in their dtypes, made once.

    Args:
        interpreter: the compute dtype.
        closed: the jaxpr of a region.
        avals: abstract inputs in the dtypes they flow in.
        fixed: how many outputs, from the first, keep the dtype they were traced with; None: all.
        scalars: see `Interpreter.run`.
    """
    key = (interpreter.compute, tuple(avals), fixed, repr(scalars))
    known = _rewritten.setdefault(closed, {})
    if key not in known:

        def region(*args: Any) -> list[Any]:
            out = interpreter.run(closed.jaxpr, closed.consts, args, scalars)
            last = len(out) if fixed is None else fixed
            kept = map(_as_declared, out[:last], closed.out_avals)
            return [*kept, *out[last:]]

        known[key] = jax.make_jaxpr(region)(*avals)
    return known[key]


def _as_declared(value: Any, aval: Any) -> Any:
    if castable(aval) and value.dtype != aval.dtype:
        return jax.lax.convert_element_type(value, aval.dtype)
    return value


def _jit(interpreter: Interpreter, eqn: JaxprEqn, frame: Frame) -> list[Any]:
    wide = own_name(eqn.params["jaxpr"].jaxpr) in WIDENED_FUNCTIONS
    args = [frame.cast(a, WIDE) if wide else frame.read(a) for a in eqn.invars]
    scalars = [frame.scalar(atom) for atom in eqn.invars]
    inside = rewrite(interpreter, eqn.params["jaxpr"], _avals(args), scalars=scalars)
    return bind(eqn, args, jaxpr=inside)


def _remat(interpreter: Interpreter, eqn: JaxprEqn, frame: Frame) -> list[Any]:
    jaxpr: Jaxpr = eqn.params["jaxpr"]
    args = [frame.read(atom) for atom in eqn.invars]
    scalars = [frame.scalar(atom) for atom in eqn.invars]

    def region(*args: Any) -> list[Any]:
        return interpreter.run(jaxpr, (), args, scalars)

    closed = jax.make_jaxpr(region)(*_avals(args))
    inside = closed.jaxpr.replace(
        constvars=(), invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars]
    )
    return bind(eqn, [*closed.consts, *args], jaxpr=inside)


def _call(interpreter: Interpreter, eqn: JaxprEqn, frame: Frame) -> list[Any]:
    closed = eqn.params["call_jaxpr"]
    return interpreter.run(closed.jaxpr, closed.consts, [frame.read(a) for a in eqn.invars])


def _cond(interpreter: Interpreter, eqn: JaxprEqn, frame: Frame) -> list[Any]:
    args = [frame.read(atom) for atom in eqn.invars]
    branches = tuple(
        rewrite(interpreter, branch, _avals(args[1:]), fixed=None)
        for branch in eqn.params["branches"]
    )
    return bind(eqn, args, branches=branches)


def _scan(interpreter: Interpreter, eqn: JaxprEqn, frame: Frame) -> list[Any]:
    body = eqn.params["jaxpr"]
    consts, carry = eqn.params["num_consts"], eqn.params["num_carry"]
    args = _loop_args(eqn, frame, consts, carry)
    inside = rewrite(interpreter, body, _like(body.in_avals, args), fixed=carry)
    return bind(eqn, args, jaxpr=inside)


def _while(interpreter: Interpreter, eqn: JaxprEqn, frame: Frame) -> list[Any]:
    tests, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    body = eqn.params["body_jaxpr"]
    operands = [frame.declared(atom) for atom in eqn.invars[:tests]]
    rest = eqn.invars[tests:]
    args = [frame.read(atom) for atom in rest[:consts]]
    args += [frame.declared(atom) for atom in rest[consts:]]
    inside = rewrite(interpreter, body, _like(body.in_avals, args), fixed=None)
    return bind(eqn, [*operands, *args], body_jaxpr=inside)


def _loop_args(eqn: JaxprEqn, frame: Frame, consts: int, carry: int) -> list[Any]:
    return [
        frame.declared(atom) if consts <= i < consts + carry else frame.read(atom)
        for i, atom in enumerate(eqn.invars)
    ]


def _custom_jvp(interpreter: Interpreter, eqn: JaxprEqn, frame: Frame) -> list[Any]:
    out = as_traced(eqn, frame)
    if own_name(eqn.params["call_jaxpr"].jaxpr) not in NARROW:
        return out
    dtypes = [frame.dtype(atom) for atom in eqn.invars if castable(atom.aval)]
    dtype = widest(dtypes)
    return [jax.lax.convert_element_type(value, dtype) for value in out]


def _avals(args: Sequence[Any]) -> list[Any]:
    return [jax.typeof(arg) for arg in args]


def _like(avals: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """`avals` in the dtypes of `args`."""
    return [
        aval.update(dtype=arg.dtype) if castable(aval) else aval
        for aval, arg in zip(avals, args, strict=True)
    ]


REGIONS: Mapping[str, Callable[[Interpreter, JaxprEqn, Frame], list[Any]]] = MappingProxyType(
    {
        "jit": _jit,
        "pjit": _jit,
        "remat2": _remat,
        "checkpoint": _remat,
        "closed_call": _call,
        "cond": _cond,
        "scan": _scan,
        "while": _while,
        "custom_jvp_call": _custom_jvp,
    }
)
"""By primitive name; JAX before 0.7 says pjit and checkpoint."""
