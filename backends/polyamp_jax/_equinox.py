"""Policies on equinox modules.

    a new module of the same tree; in it, for every module that can be called:
        arrays it holds itself -> the parameter dtype
        class                   = a subclass whose `__call__` casts inputs, outputs and those arrays

The decision is static data of the tree, so that jit, grad, scan, vmap and checkpoint see it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax

from polyamp._policy_map import PolicyMap
from polyamp_jax._cast import cast, is_floating
from polyamp_jax._families import norm_types
from polyamp_jax._plan import Applied, Found, Held, in_float32, items, plan, subclass, walk
from polyamp_jax._shift import cast_shifted
from polyamp_jax._watch import ticket

Module = eqx.Module

APPLIED = "polyamp_applied"
_NORMS = norm_types(eqx.nn)
_BASE = "_polyamp_base"
OUTPUTS = 0
"""Axis of a weight along which it has its outputs."""


def apply(model: Module, rules: PolicyMap) -> Module:
    """`model` under `rules`: see `polyamp_jax.apply_policy`."""
    wide_norms = in_float32(rules, "norm")

    def look(module: Any) -> dict[str, Any] | None:
        if not _called(module):
            return None
        return {
            "norm": wide_norms and isinstance(module, _NORMS),
            "holds": any(True for _ in _own_arrays(module)),
        }

    decided = plan(rules, dict(_walk(model)), look)

    def adopt(module: Module, path: str) -> Module:
        applied = decided.get(path)
        if applied is None:
            return module
        applied.watch = ticket(path)
        applied.before = tuple(a.dtype.name for a in _own_arrays(module))
        kept = _own_cast(module, lambda _: applied.params)
        return _as(kept, _subclass(type(module)), {APPLIED: applied})

    made: Module = _rebuilt(model, "", adopt)
    return made


def remove(model: Module) -> Module:
    """`model` without a policy."""

    def restore(module: Module, path: str) -> Module:
        applied = getattr(module, APPLIED, None)
        if applied is None:
            return module
        dtypes = iter(applied.before)
        plain = _own_cast(module, lambda _: next(dtypes))
        return _as(plain, getattr(type(module), _BASE), {})

    if not any(hasattr(m, APPLIED) for _, m in _walk(model)):
        return model
    made: Module = _rebuilt(model, "", restore)
    return made


def found(model: Module) -> list[Found]:
    """What `policy_tree` shows, the enclosing modules first."""
    return [
        Found(
            path,
            type(module).__name__,
            [(a.size, a.dtype.name) for a in _own_arrays(module)] if _called(module) else [],
            getattr(module, APPLIED, None),
        )
        for path, module in _walk(model)
    ]


def held(model: Module, inputs: Any, keywords: Any) -> list[Held]:
    """Every module with the shapes of its own arrays."""
    return [
        Held(path, type(module).__name__, [a.shape for a in _own_arrays(module)])
        for path, module in _walk(model)
        if _called(module)
    ]


def _walk(model: Module) -> Iterator[tuple[str, Any]]:
    return walk(model, _parts, _called)


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Module):
        dynamic = [f.name for f in dataclasses.fields(value) if not f.metadata.get("static")]
        return [(name, getattr(value, name)) for name in dynamic if hasattr(value, name)]
    return items(value)


def _called(value: Any) -> bool:
    return isinstance(value, Module) and callable(value)


def _rebuilt(value: Any, path: str, change: Callable[[Module, str], Module]) -> Any:
    """`value` with `change` applied to every module that can be called, the inner ones first."""
    inner = {n: _rebuilt(v, f"{path}.{n}" if path else n, change) for n, v in _parts(value)}
    if isinstance(value, Module):
        new = _as(value, type(value), inner)
        return change(new, path) if _called(value) else new
    if isinstance(value, Mapping):
        return type(value)({k: inner[str(k)] for k in value})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*inner.values())
    return type(value)(inner.values()) if isinstance(value, (list, tuple)) else value


def _as(module: Module, kind: type, changes: Mapping[str, Any]) -> Module:
    """A copy of `module` of class `kind`, some of its fields changed."""
    made: Module = object.__new__(kind)
    for name, value in {**vars(module), **changes}.items():
        if name != APPLIED or hasattr(kind, _BASE):
            object.__setattr__(made, name, value)
    return made


def _is_leaf(module: Module, value: Any) -> bool:
    return value is not module and (_called(value) or isinstance(value, eqx.nn.StateIndex))


def _own_arrays(module: Any) -> Iterator[Any]:
    """The floating arrays a module holds itself or in what cannot be called."""
    leaves = jax.tree.leaves(module, is_leaf=lambda v: _is_leaf(module, v))
    return (leaf for leaf in leaves if is_floating(leaf))


def _own_cast(module: Module, dtype: Callable[[Any], str]) -> Module:
    """`module` with the arrays it holds itself in the dtypes that `dtype` names."""
    made: Module = jax.tree.map(
        lambda leaf: cast(leaf, dtype(leaf)) if is_floating(leaf) else leaf,
        module,
        is_leaf=lambda v: _is_leaf(module, v),
    )
    return made


@functools.cache
def _subclass(kind: Any) -> Any:
    """`kind` with a `__call__` under the policy that the instance carries."""

    @functools.wraps(kind.__call__)
    def __call__(self: Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        applied: Applied = getattr(self, APPLIED)
        twin = cast_shifted(self, None, -applied.bits) if applied.bits else self
        if not applied.norm:
            twin = _own_cast(twin, lambda _: applied.compute)
        return applied.run(functools.partial(kind.__call__, twin), args, kwargs)

    def __reduce__(self: Module) -> Any:  # noqa: N807
        return _restored, (kind, vars(self))

    namespace: dict[str, Any] = {
        "__annotations__": {APPLIED: Any},
        "__call__": __call__,
        "__reduce__": __reduce__,
        APPLIED: eqx.field(static=True, default=None),
        _BASE: kind,
    }
    return subclass(kind, namespace)


def _restored(kind: type[Module], state: dict[str, Any]) -> Module:
    """Unpickling: an instance of the subclass of `kind`."""
    made: Module = object.__new__(_subclass(kind))
    for name, value in state.items():
        object.__setattr__(made, name, value)
    return made
