"""`autocast`: the precision of each operation of a function, chosen from its jaxpr.

    jaxpr = make_jaxpr(fun)(arrays of args)
    for equation in jaxpr:
        matmul, convolution      operands to the compute dtype
        exp, log, pow, sums      operands to float32
        arithmetic, data moves   operands to the widest dtype among them
        jit, remat, scan, cond,  the same inside; what a loop carries and a branch
        while                    returns keeps the dtype it was traced with
        anything else            operands to the dtypes it was traced with
    floating outputs to the policy's output dtype

Values are traced in the dtypes the user gave and may be narrower or wider while they flow.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from polyamp._formats import shown
from polyamp._policy import Policy, parse_policy, require_supported
from polyamp_jax._cast import cast
from polyamp_jax._interpret import MARK, Interpreter

_DTYPES = ("float16", "bfloat16", "float32")


def autocast(fun: Callable[..., Any], policy: Policy | str | None = None) -> Callable[..., Any]:
    """`fun` with matrix work in the policy's compute dtype and the sensitive rest in float32.

    Args:
        fun: any function of arrays and pytrees that JAX can trace. Arrays among its arguments are
            traced; everything else (Python numbers, strings, functions, None) is passed as it is.
        policy: a Policy or any string `Policy.parse` knows. Its param_dtype must be float32;
            compute_dtype and output_dtype float16, bfloat16 or float32. Parameters are cast where
            an operation uses them, so gradients have their dtype. With compute_dtype float32 `fun`
            is called as it is, also inside another autocast.

    Returns:
        A function of the same signature; its floating outputs are in output_dtype. It traces `fun`
        on every call: put `jax.jit` around it.

    Raises:
        PolicyError: the string is not a policy, or autocast cannot apply it.
        TypeError: `fun` is not callable; on the call: `fun` changes one of its arguments.
    """
    if not callable(fun):
        raise TypeError(
            f"autocast takes a function and a policy, autocast(fun, 'fp16'), and is no context;"
            f" got {shown(fun)} of type {type(fun).__name__} as function"
        )
    if policy is None:
        raise TypeError("autocast needs a policy: autocast(fun, 'fp16')")
    chosen = parse_policy(policy)
    require_supported(chosen, "jax.autocast", param=("float32",), compute=_DTYPES, output=_DTYPES)

    @functools.wraps(fun, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if chosen.compute_dtype == "float32":
            with jax.named_scope(MARK):
                return cast(fun(*args, **kwargs), chosen.output_dtype)
        return cast(_run(fun, chosen.compute_dtype, args, kwargs), chosen.output_dtype)

    return wrapped


def _run(fun: Callable[..., Any], compute: str, args: Any, kwargs: Any) -> Any:
    leaves, treedef = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
    rest: dict[str, Any] = {}

    def traced(*arrays: Any) -> list[Any]:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        inside = jax.tree.unflatten(treedef, filled)
        out, rest["treedef"] = jax.tree.flatten(fun(*inside[0], **inside[1]))
        _check_unchanged(inside, filled)
        rest["places"] = [i for i, leaf in enumerate(out) if _is_array(leaf)]
        rest["leaves"] = [None if _is_array(leaf) else leaf for leaf in out]
        return [out[i] for i in rest["places"]]

    arrays = [leaves[i] for i in places]
    closed = jax.make_jaxpr(traced)(*arrays)
    with jax.named_scope(MARK):
        results = Interpreter(compute).run(closed.jaxpr, closed.consts, arrays)
    for place, result in zip(rest["places"], results, strict=True):
        rest["leaves"][place] = result
    return jax.tree.unflatten(rest["treedef"], rest["leaves"])


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _check_unchanged(inside: Any, filled: list[Any]) -> None:
    known = {id(leaf) for leaf in filled}
    for path, leaf in jax.tree_util.tree_flatten_with_path(inside, is_leaf=_is_state)[0]:
        if isinstance(leaf, jax.core.Tracer) and id(leaf) not in known:
            raise TypeError(
                f"autocast: the function changed its argument at {jax.tree_util.keystr(path)}, and"
                " the change would be lost. Return the new value; for a stateful nnx module split"
                " it outside, merge it inside, and return its new state"
            )


def _is_state(node: Any) -> bool:
    """Whether this is what nnx.split gives, which a module merged from it shares and changes."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.State)
