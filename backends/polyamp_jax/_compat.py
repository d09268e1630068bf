"""What the backend uses of jax and flax beyond their documented interfaces, all in one place.

    name here            uses                                        seen in
    own_name             Jaxpr.debug_info                            jax 0.10.2
    scope_of             JaxprEqn.source_info.name_stack             jax 0.10.2
    traced_under         the same, and JaxprEqn.ctx                  jax 0.10.2
    rebind               Primitive.bind, .get_bind_params            jax 0.10.2
    varying              manual_axis_type; `vma` before jax 0.10     jax 0.10.2
    compiled_count       _cache_size of a jitted function            jax 0.10.2
    mark_scope           Scope.flags of flax.core                    flax 0.12.8
    params_through       Scope.param of flax.core, replaced          flax 0.12.8
    is_layer_code        names of flax's modules of layers           flax 0.12.8
    is_internal          _pytree__* attributes of nnx modules        flax 0.12.8
    class_options        _pytree__is_pytree of nnx classes           flax 0.12.8

`jax.extend.core` and `jax.core` are public and used directly. flax is not imported here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn

_JAX = os.path.join(os.path.dirname(jax.__file__), "")


def own_name(jaxpr: Jaxpr) -> str | None:
    """Name of the function, if it is one of JAX's own, that a jaxpr was traced from."""
    info = jaxpr.debug_info
    return info.func_name if _JAX in (info.func_src_info or "") else None


def scope_of(eqn: JaxprEqn) -> str:
    """The named scopes an equation was traced in."""
    return str(eqn.source_info.name_stack)


@contextmanager
def traced_under(eqn: JaxprEqn) -> Iterator[None]:
    """The named scopes and the configuration an equation was traced in."""
    with ExitStack() as stack:
        if scope := scope_of(eqn):
            stack.enter_context(jax.named_scope(scope))
        stack.enter_context(eqn.ctx.manager)
        yield


def rebind(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """The results of an equation's primitive on other operands, with other parameters."""
    primitive: Any = eqn.primitive
    out = primitive.bind(*operands, **primitive.get_bind_params(dict(params)))
    return list(out) if primitive.multiple_results else [out]


def varying(leaf: Any) -> frozenset[Any]:
    """Names of the axes along which `shard_map` knows an array to differ; empty elsewhere."""
    kind = jax.typeof(leaf)
    known = getattr(kind, "manual_axis_type", None)
    return getattr(kind, "vma", frozenset()) if known is None else known.varying


def compiled_count(jitted: Any) -> int:
    """How often a jitted function was compiled."""
    return int(jitted._cache_size())


def mark_scope(scope: Any, value: Any) -> None:
    """Make flax.linen.jit, which compares the flags of scopes, tell this scope from others."""
    scope.flags = type(scope.flags)({**scope.flags, "polyamp": value})


def params_through(scope: Any, key: Any, change: Callable[[Any], Any]) -> None:
    """Make a flax scope hand out `change(parameter)`; what it stores stays as it is.

    Nothing is done where it does so already for an equal `key`.
    """
    if getattr(scope.param, "polyamp_key", None) == key:
        return
    plain = type(scope).param

    def param(*args: Any, **kwargs: Any) -> Any:
        return change(plain(scope, *args, **kwargs))

    param.polyamp_key = key  # type: ignore[attr-defined]
    scope.param = param


def is_layer_code(of: Any, system: str) -> bool:
    """Whether a class or function is of the layers of flax; `system` is "linen" or "nnx.nn"."""
    return str(of.__module__).startswith(f"flax.{system}.")


def is_internal(name: str) -> bool:
    """Whether an attribute of an nnx module is flax's own bookkeeping."""
    return name.startswith("_pytree__")


def class_options(kind: type) -> dict[str, bool]:
    """The options that a subclass of an nnx class needs to be a pytree where that class is one."""
    known = getattr(kind, "_pytree__is_pytree", None)
    return {} if known is None else {"pytree": known}
