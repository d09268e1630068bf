"""What a policy asks of one module: the decision, apart from any module system.

compute = float32 for a norm inside a low-precision region, else the policy's compute dtype
inputs  -> compute                  where the policy changes, and where parameters are held
outputs -> the policy's output dtype, then the enclosing region's compute dtype if that is wide,
                                    where the policy changes
outputs -> the region's compute dtype                                  of a norm inside a region
bits    =  the policy's power of two less the enclosing region's: see `_shift`
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from polyamp._errors import PolicyError
from polyamp._policy import Policy, parse_policy
from polyamp._policy_map import PolicyMap
from polyamp_jax._cast import cast
from polyamp_jax._shift import cast_shifted
from polyamp_jax._watch import Ticket, tapped

LOW = ("float16", "bfloat16")
WIDE = ("float32", "float64")
FAMILIES = ("softmax", "norm")
"""Families of operations that modules decide about."""


@dataclass(unsafe_hash=True)
class Applied:
    """What `apply_policy` did to one module. Equal where the computation is."""

    policy: Policy
    compute: str
    """Name of the dtype the module computes in."""
    outputs: tuple[str, ...]
    """Names of the dtypes its outputs are cast to, in order."""
    inputs: bool
    """Whether its inputs are cast."""
    boundary: bool
    """Whether the policy differs from the enclosing module's."""
    norm: bool
    """Whether it is a norm kept in float32 inside a low-precision region."""
    bits: int = 0
    """Power of two by which gradients inside are larger than around the module."""
    watch: Ticket | None = None
    """Where its tensors are measured; None: nowhere."""
    rule: str | None = field(default=None, compare=False)
    """The pattern that gave the policy; None: the default."""
    owner: str = field(default="", compare=False)
    """Path of the module that the pattern matched."""
    before: Any = field(default=None, compare=False, repr=False)
    """What `remove_policy` puts back."""
    ran: bool = field(default=False, compare=False, repr=False)

    @property
    def params(self) -> str:
        """Name of the dtype the module's own parameters are kept in."""
        return "float32" if self.norm else self.policy.param_dtype

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`forward(*args, **kwargs)` with inputs and outputs cast, and measured."""
        self.ran = True
        given = args, kwargs
        if self.inputs:
            if self.bits:
                _refuse_modules(given, self.policy)
            args, kwargs = cast_values(given, self.compute, -self.bits)
        out = forward(*args, **kwargs)
        for dtype, bits in zip(self.outputs, (self.bits, 0), strict=False):
            out = cast_values(out, dtype, bits)
        if self.watch is None:
            return out
        return tapped(self.watch, self.policy.shift - self.bits, given, out, _opaque)


class Found(NamedTuple):
    """One module of a model, as `policy_tree` shows it."""

    path: str
    kind: str
    """Name of its class."""
    held: list[tuple[int, str]]
    """Size and dtype of each parameter of its own."""
    applied: Applied | None


class Held(NamedTuple):
    """A module as its module system shows it."""

    path: str
    kind: str
    """Name of its class."""
    shapes: Sequence[tuple[int, ...]]
    """Of the floating parameters of its own."""


def decide(
    rules: PolicyMap,
    path: str,
    enclosing: Policy | None,
    *,
    norm: bool = False,
    own: str | None = None,
    holds: bool = False,
) -> Applied:
    """The decision for the module at `path`.

    Args:
        enclosing: policy of the region the module is called from; None for the model itself.
        norm: the module is a norm that float32 is kept for.
        own: dtype that the user gave to the module itself, which wins.
        holds: the module holds parameters and does not cast its inputs itself.
    """
    pattern, owner, policy = rules.explain(path)
    boundary = enclosing != policy
    norm = norm and policy.compute_dtype in LOW
    outputs: tuple[str, ...] = ()
    if boundary:
        outputs = (policy.output_dtype,)
        if enclosing is not None and enclosing.compute_dtype in WIDE:
            outputs += (enclosing.compute_dtype,)
    elif norm and own is None:
        outputs = (policy.compute_dtype,)
    return Applied(
        policy=policy,
        compute=own or ("float32" if norm else policy.compute_dtype),
        outputs=tuple(dict.fromkeys(outputs)),
        inputs=boundary or (own is None and (holds or norm)),
        boundary=boundary,
        norm=norm,
        bits=policy.shift - (0 if enclosing is None else enclosing.shift),
        rule=pattern,
        owner=owner,
    )


def warn_of_own(given: Mapping[str, tuple[str | None, Applied]], *, stacklevel: int = 2) -> None:
    """Warn of layers whose own `dtype=` is not what the policy says.

    Args:
        given: by path, the dtype the user gave to the layer, and the decision for it.
    """
    wins = [
        f"{path or 'the model'} ({own}, not {applied.policy.compute_dtype})"
        for path, (own, applied) in given.items()
        if own not in (None, applied.policy.compute_dtype)
        and not (applied.norm and own == "float32")
    ]
    if wins:
        warnings.warn(
            f"a dtype= given to a layer wins over the policy: {', '.join(wins)}. Leave it out to"
            " let the policy decide",
            UserWarning,
            stacklevel=stacklevel + 1,
        )


def plan(
    rules: PolicyMap, paths: Mapping[str, Any], look: Callable[[Any], Mapping[str, Any] | None]
) -> dict[str, Applied]:
    """The decision for every module of a model whose modules are known beforehand.

    Args:
        paths: modules and containers by path, the enclosing ones first.
        look: the keywords of `decide` for a module, None for a container.

    Raises:
        PolicyError: a pattern matches no path.
    """
    rules.check(paths)
    found: dict[str, Applied] = {}
    for path, value in paths.items():
        seen = look(value)
        if seen is not None:
            found[path] = decide(rules, path, _enclosing(found, path), **seen)
    return found


def walk(
    value: Any,
    parts: Callable[[Any], list[tuple[str, Any]]],
    called: Callable[[Any], bool],
    path: str = "",
    above: frozenset[int] = frozenset(),
) -> Iterator[tuple[str, Any]]:
    """(path, value) of a model, its modules, and the containers that hold any.

    Shared modules come under every path they have; cycles are cut.

    Args:
        parts: name and value of what a module or container holds; nothing for a leaf.
        called: whether a value is a module that can be called.
    """
    if id(value) in above:
        return
    above |= {id(value)}
    inner = [
        found
        for name, part in parts(value)
        for found in walk(part, parts, called, f"{path}.{name}" if path else name, above)
    ]
    if not path or called(value) or inner:
        yield path, value
    yield from inner


def items(container: Any) -> list[tuple[str, Any]]:
    """Key, as a segment of a path, and value of what a dict, list or tuple holds."""
    if isinstance(container, Mapping):
        return [(str(key), value) for key, value in container.items()]
    if isinstance(container, (list, tuple)):
        return [(str(i), value) for i, value in enumerate(container)]
    return []


def _enclosing(found: Mapping[str, Applied], path: str) -> Policy | None:
    while path:
        path = path.rpartition(".")[0]
        if path in found and found[path].boundary:
            return found[path].policy
    return None


def rules_of(policy: Policy | PolicyMap | str, ops: tuple[str, ...]) -> PolicyMap:
    """`policy` as a map that JAX can apply.

    Args:
        ops: families of operations that an `op:` rule may name.

    Raises:
        PolicyError: not a policy, or a field, dtype or family that cannot be applied.
    """
    rules = policy if isinstance(policy, PolicyMap) else PolicyMap(default=parse_policy(policy))
    known = (*LOW, *WIDE)
    rules.require_supported(
        "jax",
        ops=ops,
        shift=True,
        param=known,
        compute=known,
        output=known,
        master=(),
        store=(),
        accumulate=(),
    )
    narrow = [p for p in rules.policies if p.shift and p.param_dtype in LOW]
    if narrow:
        raise PolicyError(
            f"backend 'jax' cannot apply @2^{narrow[0].shift} to {narrow[0].param_dtype}"
            " parameters, whose gradients it would take out of range again; allowed: params=float32"
        )
    wide = [
        str(p)
        for p in rules.policies
        if "float64" in (p.param_dtype, p.compute_dtype, p.output_dtype)
    ]
    if wide and jax.dtypes.canonicalize_dtype("float64") != "float64":
        raise PolicyError(
            f"policy {wide[0]!r} asks for float64, which JAX makes float32 unless"
            ' jax.config.update("jax_enable_x64", True) comes first'
        )
    return rules


def in_float32(rules: PolicyMap, family: str) -> bool:
    """Whether a family of operations is kept in float32: always, unless an `op:` rule is low."""
    return not any(f == family and p.compute_dtype in LOW for f, p in rules.op_rules)


def cast_values(tree: Any, dtype: str, bits: int = 0) -> Any:
    """`tree` with its floating arrays in `dtype`; live nnx modules and equinox state as they are.

    Of nnx variables only parameters are cast. Cotangents are multiplied by 2**bits.
    """

    def one(leaf: Any) -> Any:
        if _opaque(leaf):
            return leaf
        return cast_shifted(leaf, dtype, bits) if bits else cast(leaf, dtype)

    return jax.tree.map(one, tree, is_leaf=_opaque)


def _refuse_modules(given: Any, policy: Policy) -> None:
    """Refuse live nnx modules as arguments: the gradients of their parameters would be wrong."""
    for leaf in jax.tree.leaves(given, is_leaf=_opaque):
        if is_a(leaf, "flax.nnx", "Module"):
            raise PolicyError(
                f"a module with @2^{policy.shift} is called with a live {type(leaf).__name__} as"
                " argument, the gradients of whose parameters would be 2**j as large; make it an"
                " attribute of the module, or give the module a policy without a power of two"
            )


def _opaque(value: Any) -> bool:
    if is_a(value, "flax.nnx", "Variable"):
        return not is_a(value, "flax.nnx", "Param")
    return (
        isinstance(value, jax.ShapeDtypeStruct)
        or is_a(value, "flax.nnx", "Pytree")
        or is_a(value, "flax.nnx", "Object")
        or is_a(value, "equinox.nn", "State")
        or is_a(value, "equinox.nn", "StateIndex")
    )


def is_a(value: Any, module: str, *names: str) -> bool:
    """Whether `value` is an instance of a class of `module`; imports nothing for the answer."""
    home = sys.modules.get(module)
    kinds = tuple(kind for name in names if (kind := getattr(home, name, None)) is not None)
    return isinstance(value, kinds)


def subclass(kind: Any, namespace: dict[str, Any], **options: Any) -> Any:
    """A subclass of `kind` under the same name, with `namespace`; `options` as its class takes."""
    names = ("__module__", "__qualname__", "__doc__")
    same = {name: getattr(kind, name) for name in names}
    return type(kind)(kind.__name__, (kind,), {**same, **namespace}, **options)
