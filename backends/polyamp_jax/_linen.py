"""Policies on flax.linen modules.

    init, apply:
        for every method call of a module inside, by `flax.linen.intercept_methods`:
            path, policy = the module's scope, the rule for it
            parameters   -> compute dtype, as `scope.param` hands them out
            inputs, outputs as `_plan` says

What holds parameters is known when `init` is through: where a module turned out to hold some, whose
inputs had not been cast, `init` runs once more, so that it and `apply` compute the same.

A linen module is a description: its submodules exist while a method runs. So the result of
`apply` (a clone whose class is a subclass made here) decides while it runs. flax's own layers cast
their parameters themselves, so they get their `dtype` for the time of the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from polyamp._errors import PolicyError
from polyamp._policy import Policy
from polyamp._policy_map import PolicyMap
from polyamp_jax._cast import cast
from polyamp_jax._compat import is_layer_code, mark_scope, params_through
from polyamp_jax._families import norm_types
from polyamp_jax._plan import LOW, Applied, Found, Held, decide, in_float32, subclass, warn_of_own
from polyamp_jax._shift import cast_shifted
from polyamp_jax._watch import active_token, ticket

Module = nn.Module

_RULES = "_polyamp_rules"
_RECORD = "_polyamp_record"
OUTPUTS = -1
"""Axis of a weight along which it has its outputs."""
_NORMS = norm_types(nn)
_CASTING = (
    *(nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Embed),
    *(nn.Conv, nn.ConvTranspose, nn.ConvLocal),
)
"""Layers that cast their inputs and parameters to their own `dtype`, where it is given."""


class Run:
    """One run of `init` or `apply`: where it is, and what it met."""

    def __init__(self, rules: PolicyMap, kind: type, holders: frozenset[str]) -> None:
        self.rules, self.kind, self.holders = rules, kind, holders
        self.passing: set[str] = set()
        self.wide_norms, self.wide_softmax = (in_float32(rules, f) for f in ("norm", "softmax"))
        self.stack: list[tuple[str, Policy]] = []
        self.met: dict[str, Applied] = {}
        self.kinds: dict[str, str] = {}
        self.given: dict[str, tuple[str | None, Applied]] = {}

    def __call__(self, forward: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        """The interceptor."""
        module = context.module
        if _active.get() is not self:
            return forward(*args, **kwargs)
        path = ".".join(module.path)
        region = self.stack[-1][1] if self.stack else None
        own = _own_dtype(module)
        norm = self.wide_norms and isinstance(module, _NORMS)
        holds = not _casts(module) and path in self.holders
        applied = decide(self.rules, path, region, norm=norm, own=own, holds=holds)
        applied.watch = ticket(path)
        self._tell_jit(module, path)
        casts, shift = applied.norm or _casts(module), applied.policy.shift
        if shift or not casts:
            dtype = None if casts else applied.compute
            change = functools.partial(cast_shifted, dtype=dtype, bits=-shift)
            params_through(module.scope, (dtype, shift), change)
        if not (casts or applied.inputs):
            self.passing.add(path)
        inside = bool(self.stack) and self.stack[-1][0] == path
        if context.method_name == "setup" or inside:
            return forward(*args, **kwargs)
        self._note(module, path, applied, own)
        with self._entered(path, applied.policy), self._prepared(module, applied, own):
            return applied.run(forward, args, kwargs)

    def through(self, call: Callable[[], Any]) -> Any:
        """`call()`, intercepted."""
        token = _active.set(self)
        try:
            with nn.intercept_methods(self):
                return call()
        finally:
            _active.reset(token)

    def _note(self, module: Module, path: str, applied: Applied, own: str | None) -> None:
        known = self.met.get(path)
        if known is None or not known.boundary:
            self.met[path] = applied
        self.kinds.setdefault(path, type(module).__name__)
        self.given[path] = own, applied

    def _tell_jit(self, module: Module, path: str) -> None:
        """Mark the scope, so that flax.linen.jit does not reuse what it traced elsewhere."""
        region = str(self.stack[-1][1]) if self.stack else ""
        mark_scope(module.scope, (str(self.rules), path, region, active_token()))

    @contextmanager
    def _entered(self, path: str, policy: Policy) -> Iterator[None]:
        self.stack.append((path, policy))
        try:
            yield
        finally:
            self.stack.pop()

    @contextmanager
    def _prepared(self, module: Module, applied: Applied, own: str | None) -> Iterator[None]:
        with ExitStack() as stack:
            if isinstance(module, _CASTING) and own is None:
                stack.enter_context(_set(module, "dtype", jnp.dtype(applied.compute)))
            if (
                self.wide_softmax
                and applied.compute in LOW
                and hasattr(module, "force_fp32_for_softmax")
            ):
                stack.enter_context(_set(module, "force_fp32_for_softmax", True))
            yield


_active: ContextVar[Run | None] = ContextVar("polyamp_linen_run", default=None)


@contextmanager
def _set(module: Module, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    object.__setattr__(module, name, value)
    try:
        yield
    finally:
        object.__setattr__(module, name, before)


def _own_dtype(module: Module) -> str | None:
    """Name of the `dtype` a user gave to a layer of flax; None where it is left open."""
    if not isinstance(module, (*_CASTING, *_NORMS)):
        return None
    dtype = getattr(module, "dtype", None)
    return None if dtype is None else jnp.dtype(dtype).name


def _casts(module: Module) -> bool:
    """Whether the module is called by flax's own code, which casts parameters to its `dtype`."""
    ours = is_layer_code(type(module).__call__, "linen")
    return ours and isinstance(module, (*_CASTING, *_NORMS))


def apply(module: Module, rules: PolicyMap) -> Module:
    """`module` under `rules`: see `polyamp_jax.apply_policy`."""
    kind: Any = type(module)
    return _as(module, _subclass(kind, rules, active_token()))


def remove(module: Module) -> Module:
    """`module` without a policy."""
    return _as(module, type(module).__bases__[0]) if _rules(module) else module


def _as(module: Module, kind: type) -> Module:
    if module.scope is not None:
        raise PolicyError(
            f"{type(module).__name__} is bound to variables; apply the policy to the module before"
            " bind, and use its apply"
        )
    values = {f.name: getattr(module, f.name) for f in fields(module) if f.init}
    made: Module = kind(**{**values, "parent": None})
    return made


def _rules(module: Module) -> PolicyMap | None:
    return type(module).__dict__.get(_RULES)


@functools.lru_cache(maxsize=256)
def _subclass(kind: Any, rules: PolicyMap, token: int | None) -> Any:
    """`kind` with `init` and `apply` under a policy; one class for equal rules, and for each
    measured trace its own, so that jit does not reuse one in another."""

    @nn.nowrap
    def init_with_output(self: Module, *args: Any, **kwargs: Any) -> Any:
        out, variables = _running(self, rules, kind, "init_with_output", args, kwargs)
        return out, _stored(variables, getattr(self, _RECORD))

    @nn.nowrap
    def applied(self: Module, *args: Any, **kwargs: Any) -> Any:
        return _running(self, rules, kind, "apply", args, kwargs)

    def __post_init__(self: Module) -> None:  # noqa: N807
        kind.__post_init__(self)
        run = _active.get()
        if self.scope is not None and (run is None or run.kind is not kind):
            raise PolicyError(
                f"{kind.__name__} has a policy, which only its own init and apply follow; here it"
                " is bound or part of another module. Apply the policy to the outermost module,"
                " with a rule for this one"
            )

    @nn.nowrap
    def __reduce__(self: Module) -> Any:  # noqa: N807
        return apply, (remove(self), rules)

    namespace: dict[str, Any] = {
        "__post_init__": __post_init__,
        "__reduce__": __reduce__,
        "__annotations__": {},
        "init_with_output": init_with_output,
        "apply": applied,
        _RULES: rules,
    }
    return subclass(kind, namespace)


def _running(
    module: Module, rules: PolicyMap, kind: type[Module], name: str, args: Any, kwargs: Any
) -> Any:
    call, initial = functools.partial(getattr(kind, name), module, *args, **kwargs), name != "apply"
    variables = {} if initial else args[0] if args else kwargs["variables"]
    run = Run(rules, kind, _holders(variables))
    out = run.through(call)
    if initial:
        variables = out[1]
        if run.passing & _holders(variables):
            run = Run(rules, kind, _holders(variables))
            out = run.through(call)
    whole = initial and kwargs.get("method") is None
    _finish(module, run, variables, whole=whole)
    return out


def _finish(module: Module, run: Run, variables: Any, whole: bool) -> None:
    """Keep what was met for `describe`; refuse rules without a module; warn of given dtypes."""
    record = module.__dict__.get(_RECORD) or Record()
    record.held.update(_held(variables))
    record.kinds.update(run.kinds)
    record.met.update(run.met)
    for path in record.held:
        if path not in record.met:
            parent = run.rules.policy_for(path.rpartition(".")[0])
            record.met[path] = decide(run.rules, path, parent)
    object.__setattr__(module, _RECORD, record)
    if whole:
        run.rules.check(record.met)
    warn_of_own(run.given, stacklevel=4)


@dataclass
class Record:
    """What runs of one module met, by path."""

    met: dict[str, Applied] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    held: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    """Size and dtype of the parameters a module holds itself."""


def _params(variables: Any) -> Any:
    return variables.get("params", {}) if isinstance(variables, Mapping) else {}


def _owner(path: tuple[Any, ...]) -> str:
    """Path of the module that holds a parameter."""
    keys = [str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey)]
    return ".".join(keys[:-1])


def _held(variables: Any) -> dict[str, list[tuple[int, str]]]:
    held: dict[str, list[tuple[int, str]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(_params(variables)):
        owner = _owner(path)
        held.setdefault(owner, []).append((leaf.size, leaf.dtype.name))
        while owner:
            owner = owner.rpartition(".")[0]
            held.setdefault(owner, [])
    return held


def _holders(variables: Any) -> frozenset[str]:
    """Paths of the modules that hold parameters themselves."""
    return frozenset(path for path, held in _held(variables).items() if held)


def _stored(variables: Any, record: Record) -> Any:
    """The variables of `init` with parameters in the parameter dtype of their module's policy."""
    if "params" not in variables:
        return variables
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: cast(leaf, record.met[_owner(path)].params), variables["params"]
    )
    return {**variables, "params": params}


def found(module: Module) -> list[Found]:
    """What `policy_tree` shows, the enclosing modules first; nothing before init or apply ran."""
    record = module.__dict__.get(_RECORD)
    if record is None:
        return [Found("", type(module).__name__, [], None)]
    return [
        Found(path, record.kinds.get(path, "?"), record.held.get(path, []), record.met[path])
        for path in sorted(record.met)
    ]


def held(module: Module, inputs: Any, keywords: Any) -> list[Held]:
    """Every module that `init` meets, with the shapes of its own parameters."""
    made = apply(remove(module), PolicyMap(default="float32"))
    init = functools.partial(made.init, jax.random.key(0), **keywords)
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(_params(jax.eval_shape(init, *inputs))):
        shapes.setdefault(_owner(path), []).append(leaf.shape)
    record: Record = getattr(made, _RECORD)
    return [Held(path, record.kinds.get(path, "?"), shapes.get(path, [])) for path in record.met]
