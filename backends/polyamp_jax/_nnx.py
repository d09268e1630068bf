"""Policies on flax.nnx modules.

    a clone of the model; in it, for every module that can be called:
        parameters -> the parameter dtype
        dtype      = the compute dtype, where the module has one that its user left open
        class      = a subclass whose `__call__` casts inputs, outputs and own parameters, where
                     something is to be cast

All of it is static data of the clone's graph, so nnx.jit, grad, scan, remat and vmap see the policy
as a part of the model, and compile anew for another one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import flax.nnx as nnx
import jax
import jax.numpy as jnp

from polyamp._errors import PolicyError
from polyamp._policy_map import PolicyMap
from polyamp_jax._cast import cast, is_floating
from polyamp_jax._compat import class_options, is_internal, is_layer_code
from polyamp_jax._families import WideSoftmax, norm_types
from polyamp_jax._plan import (
    LOW,
    Applied,
    Found,
    Held,
    in_float32,
    items,
    plan,
    subclass,
    walk,
    warn_of_own,
)
from polyamp_jax._shift import cast_shifted
from polyamp_jax._watch import ticket

Module = nnx.Module

APPLIED = "polyamp_applied"
_NORMS = norm_types(nnx)
_BASE = "_polyamp_base"
OUTPUTS = -1
"""Axis of a weight along which it has its outputs."""
_REWRITING = (nnx.WeightNorm, nnx.SpectralNorm)
"""These write into the layer they wrap, in their own dtype."""
_CONTAINERS = tuple(getattr(nnx, name) for name in ("List", "Dict") if hasattr(nnx, name))


def apply(model: Module, rules: PolicyMap) -> Module:
    """`model` under `rules`: see `polyamp_jax.apply_policy`."""
    wide_norms = in_float32(rules, "norm")

    def look(module: Any) -> dict[str, Any] | None:
        if not _called(module):
            return None
        return {
            "norm": wide_norms and isinstance(module, _NORMS),
            "own": _own_dtype(module),
            "holds": not _casts(module) and any(True for _ in _own_params(module)),
        }

    paths = dict(_walk(model))
    chosen = _unshared(paths, plan(rules, paths, look))
    _check_variables(paths, chosen)
    warn_of_own({path: (_own_dtype(paths[path]), applied) for path, applied in chosen.items()})
    clone = nnx.clone(model)
    for path, module in _modules(clone):
        chosen[path].watch = ticket(path)
        _adopt(module, chosen[path], in_float32(rules, "softmax"))
    return clone


def remove(model: Module) -> Module:
    """`model` without a policy: a clone, if it has one."""
    if not any(APPLIED in vars(module) for _, module in _modules(model)):
        return model
    clone = nnx.clone(model)
    for _, module in _modules(clone):
        applied = vars(module).get(APPLIED)
        if applied is None:
            continue
        object.__setattr__(module, "__class__", getattr(type(module), _BASE, type(module)))
        attributes, dtypes = applied.before
        for name, value in attributes:
            setattr(module, name, value)
        for param, dtype in zip(_own_params(module), dtypes, strict=True):
            _retype(param, dtype)
        delattr(module, APPLIED)
    return clone


def found(model: Module) -> list[Found]:
    """What `policy_tree` shows, the enclosing modules first."""
    return [
        Found(
            path,
            type(value).__name__,
            [(p.size, p.dtype.name) for p in _own_params(value)] if _called(value) else [],
            getattr(value, APPLIED, None),
        )
        for path, value in _walk(model)
    ]


def held(model: Module, inputs: Any, keywords: Any) -> list[Held]:
    """Every module once, with the shapes of its own parameters."""
    return [
        Held(path, _kind(module).__name__, [p.shape for p in _own_params(module)])
        for path, module in _modules(model)
    ]


def _walk(model: Module) -> Iterator[tuple[str, Any]]:
    return walk(model, _parts, _called)


def _called(value: Any) -> bool:
    return isinstance(value, Module) and callable(value)


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Module):
        return [(n, v) for n, v in vars(value).items() if not is_internal(n)]
    return items(value)


def _modules(model: Module) -> Iterator[tuple[str, Module]]:
    """Every module that can be called, once, under its first path."""
    seen = set()
    for path, module in _walk(model):
        if _called(module) and id(module) not in seen:
            seen.add(id(module))
            yield path, module


def _unshared(paths: Mapping[str, Any], decided: Mapping[str, Applied]) -> dict[str, Applied]:
    """The decision for each module by its first path.

    Raises:
        PolicyError: a module has two paths with different policies.
    """
    first: dict[int, str] = {}
    chosen: dict[str, Applied] = {}
    for path, applied in decided.items():
        home = first.setdefault(id(paths[path]), path)
        known = chosen.setdefault(home, applied)
        if known.policy != applied.policy:
            raise PolicyError(
                f"{home or 'the model'} and {path} are one shared module with two policies,"
                f" {known.policy} and {applied.policy}; give it one rule that matches both paths"
            )
        if applied.bits != known.bits:
            raise PolicyError(
                f"{home or 'the model'} and {path} are one shared module inside modules with"
                " different powers of two (@2^j); give it and what encloses it one rule"
            )
        if applied.boundary and (not known.boundary or len(applied.outputs) > len(known.outputs)):
            chosen[home] = applied
    return chosen


def _check_variables(paths: Mapping[str, Any], chosen: Mapping[str, Applied]) -> None:
    """Refuse a parameter that two modules want in different dtypes."""
    wanted: dict[int, tuple[str, str]] = {}
    for path, applied in chosen.items():
        for param in _own_params(paths[path]):
            first, dtype = wanted.setdefault(id(param), (path, applied.params))
            if dtype != applied.params:
                raise PolicyError(
                    f"{first or 'the model'} and {path or 'the model'} share one tied parameter,"
                    f" wanted in {dtype} and {applied.params}; give both modules policies with the"
                    " same params="
                )


def _own_params(module: Any) -> Iterator[Any]:
    """The floating parameters a module holds itself, in containers too."""
    for name, value in _parts(module):
        if name != APPLIED:
            yield from (v for v in _leaves(value) if _is_param(v))


def _leaves(value: Any) -> list[Any]:
    return jax.tree.leaves(value, is_leaf=_is_leaf)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, nnx.Variable) or (
        isinstance(value, Module) and not isinstance(value, _CONTAINERS)
    )


def _is_param(value: Any) -> bool:
    return isinstance(value, nnx.Param) and is_floating(value.get_raw_value())


def _is_layer(module: Module) -> bool:
    """Whether the module is a layer of flax's own, or of a subclass, and has a `dtype`."""
    return hasattr(module, "dtype") and any(map(_is_flax, type(module).__mro__))


def _casts(module: Module) -> bool:
    """Whether the module is called by flax's own code, which casts parameters to its `dtype`."""
    return _is_layer(module) and _is_flax(_kind(module).__call__)


def _kind(module: Any) -> Any:
    """The class of a module without a policy."""
    return getattr(type(module), _BASE, type(module))


def _is_flax(of: Any) -> bool:
    """Whether a class or a method is one of flax's layers."""
    return is_layer_code(of, "nnx.nn")


def _own_dtype(module: Any) -> str | None:
    """Name of the `dtype` a user gave to a layer of flax; None where it is left open.

    Embed makes an open one its table's.
    """
    dtype = module.dtype if _is_layer(module) else None
    default = module.embedding.dtype if isinstance(module, nnx.Embed) else None
    return None if dtype is None or dtype == default else jnp.dtype(dtype).name


def _retype(param: Any, dtype: str) -> None:
    value = param.get_raw_value()
    if value.dtype.name != dtype:
        param.set_raw_value(cast(value, dtype))


def _adopt(module: Any, applied: Applied, wide_softmax: bool) -> None:
    """Make one module of the clone follow its decision."""
    new: dict[str, Any] = {}
    if _is_layer(module) and _own_dtype(module) is None and not isinstance(module, _REWRITING):
        new["dtype"] = jnp.dtype(applied.compute)
    if (
        wide_softmax
        and applied.compute in LOW
        and getattr(module, "attention_fn", None) is nnx.dot_product_attention
    ):
        new["attention_fn"] = WideSoftmax(nnx.dot_product_attention)
    params = list(_own_params(module))
    before = tuple((name, getattr(module, name)) for name in new)
    applied.before = (before, tuple(p.dtype.name for p in params))
    for name, value in new.items():
        setattr(module, name, value)
    for param in params:
        _retype(param, applied.params)
    setattr(module, APPLIED, applied)
    if applied.inputs or applied.outputs or applied.watch is not None:
        kind: Any = type(module)
        object.__setattr__(module, "__class__", _subclass(kind))


@functools.cache
def _subclass(kind: Any) -> Any:
    """`kind` with a `__call__` under the policy that the instance carries."""

    @functools.wraps(kind.__call__)
    def __call__(self: Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        applied = vars(self)[APPLIED]
        forward = functools.partial(kind.__call__, self)
        own = None if applied.norm or _casts(self) else applied.compute
        with ExitStack() as stack:
            for module in _inside(self) if applied.bits else [self]:
                dtype = own if module is self else None
                stack.enter_context(_narrowed(module, kind, dtype, applied.bits))
            return applied.run(forward, args, kwargs)

    def __reduce__(self: Any) -> Any:  # noqa: N807
        return _blank, (kind,), self.__getstate__()

    namespace: dict[str, Any] = {
        "__call__": __call__,
        "__reduce__": __reduce__,
        _BASE: kind,
    }
    return subclass(kind, namespace, **class_options(kind))


def _blank(kind: Any) -> Module:
    """An empty instance for unpickling."""
    blank: Module = object.__new__(_subclass(kind))
    return blank


def _inside(module: Module) -> list[Module]:
    """The module and all modules it holds, those that cannot be called too, each once."""
    found: dict[int, Module] = {id(module): module}
    todo = [module]
    while todo:
        held = (leaf for _, value in _parts(todo.pop()) for leaf in _leaves(value))
        new = {id(leaf): leaf for leaf in held if isinstance(leaf, Module)}
        todo += [leaf for key, leaf in new.items() if key not in found]
        found.update(new)
    return list(found.values())


@contextmanager
def _narrowed(module: Module, kind: type, dtype: str | None, bits: int) -> Iterator[None]:
    """While open, the module's own parameters are copies that refuse to be written.

    Args:
        kind: the class whose call this is.
        dtype: of the copies; None: that of each parameter.
        bits: by which the gradients of the copies are larger than those of the parameters.
    """
    refuse = _Refusal(kind, dtype)
    before = {
        name: value
        for name, value in vars(module).items()
        if name != APPLIED and any(_is_other(leaf, dtype, bits) for leaf in _leaves(value))
    }
    for name, value in before.items():
        copies = jax.tree.map(
            lambda leaf: _copy(leaf, dtype, bits, refuse), value, is_leaf=_is_leaf
        )
        object.__setattr__(module, name, copies)
    inside = {name: vars(module)[name] for name in before}
    try:
        yield
        for name, value in inside.items():
            if vars(module).get(name) is not value:
                refuse(name, None)
    finally:
        for name, value in before.items():
            object.__setattr__(module, name, value)


def _is_other(leaf: Any, dtype: str | None, bits: int) -> bool:
    return _is_param(leaf) and (bool(bits) or dtype not in (None, leaf.dtype.name))


def _copy(leaf: Any, dtype: str | None, bits: int, refuse: _Refusal) -> Any:
    if not _is_other(leaf, dtype, bits):
        return leaf
    value = cast_shifted(leaf.get_raw_value(), dtype, -bits)
    return leaf.replace(value, on_set_value=(refuse,))


@dataclass(frozen=True)
class _Refusal:
    """What a parameter's copy does when it is written: the parameter itself would not change."""

    kind: type
    dtype: str | None

    def __call__(self, param: Any, value: Any) -> Any:
        raise PolicyError(
            f"{self.kind.__name__}.__call__ writes a parameter, of which it has a copy"
            f" in {self.dtype or 'its own dtype'}: the write would be lost. Keep what a call"
            " changes in another variable, such as nnx.BatchStat, or give the module a float32"
            " policy"
        )
