"""Policies per module: forwards wrapped, nothing else changed.

    run(module, applied, *inputs):
        inputs -> compute dtype
        autocast to the compute dtype (off for float32), families of operations in float32
        outputs = the module's own forward
        outputs -> output dtype, then the enclosing region's compute dtype if that is wide

A module's `forward` becomes `functools.partial(run, module, applied)`: picklable, deep-copyable,
traced by torch.compile without a break, and gone again with `remove_policy`. Only modules whose
policy differs from the enclosing one's are wrapped so. Modules inside a low-precision region
that may call an operation of a family themselves get the families too, since activation
checkpointing calls them anew from the backward pass, where autocast is restored and function modes
are not.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from polyamp._errors import PolicyError
from polyamp._policy import Policy, parse_policy, require_supported
from polyamp._policy_map import PolicyMap
from polyamp._policy_pattern import OP_FAMILIES
from polyamp_torch._cast import cast, default_device_type, dtype_of, map_tensors
from polyamp_torch._dtypes import LOW, WIDE, check_parameters, own_of, retype, target_of
from polyamp_torch._families import Again, FamilyMode, Region, keep_from_dynamo, traced
from polyamp_torch._shift import Unshifted, cast_shifted
from polyamp_torch._wrappers import check_ddp, unwrapped

Module = torch.nn.Module

APPLIED = "_polyamp_applied"
_PLAIN = frozenset(
    kind.forward
    for kind in (
        *(torch.nn.Linear, torch.nn.Embedding, torch.nn.Sequential, torch.nn.Identity),
        *(torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.Flatten),
        *(torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d),
        *(torch.nn.BatchNorm1d, torch.nn.InstanceNorm1d, torch.nn.Dropout, torch.nn.Dropout2d),
        *(torch.nn.ReLU, torch.nn.GELU, torch.nn.SiLU, torch.nn.Tanh, torch.nn.Sigmoid),
        *(torch.nn.MaxPool2d, torch.nn.AvgPool2d, torch.nn.AdaptiveAvgPool2d),
    )
)
"""Forwards that call no operation of a family."""


@dataclass(eq=False)
class Applied:
    """What `apply_policy` did to one module."""

    policy: Policy
    rule: str | None
    """The pattern that gave the policy; None: the default."""
    owner: str
    """Path of the module that the pattern matched."""
    families: frozenset[str]
    wide_norms: bool
    """Whether norms keep float32 parameters."""
    boundary: bool
    """Whether the policy differs from the enclosing module's, so that inputs are cast here."""
    returns: torch.dtype | None = None
    """Compute dtype of the enclosing region where that is wide, so that no autocast casts there."""
    forward: Any = None
    """The instance's own forward, if it had one."""
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """dtypes of what `_own` gives, before."""
    rules: PolicyMap | None = None
    """Of the model itself: the whole map."""
    region: Applied | None = None
    """The boundary that encloses the module, if it is none itself."""
    bits: int = 0
    """Power of two by which gradients inside are larger than around the module."""
    unshifted: Unshifted | None = None
    ran: bool = False

    def __post_init__(self) -> None:
        self.low = self.policy.compute_dtype in LOW
        self.compute = dtype_of(self.policy.compute_dtype)
        self.output = dtype_of(self.policy.output_dtype)


def run(module: Module, applied: Applied, /, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module under its policy."""
    applied.ran = True
    forward = applied.forward or functools.partial(type(module).forward, module)
    tracing = torch.compiler.is_compiling()
    if not tracing:
        keep_from_dynamo()
    if not applied.boundary:
        if not tracing:
            with Again(applied.families):
                return forward(*args, **kwargs)
        with FamilyMode(_device_type(module, args, kwargs), applied.families):
            return forward(*args, **kwargs)
    dtype = applied.compute
    device = _device_type(module, args, kwargs)
    if applied.unshifted is not None:
        applied.unshifted.check(tracing)
    bits = applied.bits
    inwards = functools.partial(cast_shifted, bits=-bits) if bits else cast
    args = tuple([inwards(arg, dtype) for arg in args])
    kwargs = {key: inwards(value, dtype) for key, value in kwargs.items()}
    with (traced if tracing else Region)(device, dtype if applied.low else None, applied.families):
        out = forward(*args, **kwargs)
    out = cast_shifted(out, applied.output, bits) if bits else cast(out, applied.output)
    return out if applied.returns is None else cast(out, applied.returns)


def _device_type(module: Module, args: Any, kwargs: Any) -> str:
    """Where the module computes: the device of its first floating input, else of its parameters."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.device.type
    tensors = itertools.chain(module.parameters(), module.buffers(), _tensors((args, kwargs)))
    first = next(tensors, None)
    return default_device_type() if first is None else first.device.type


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(tree, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    yield from found


def replicate(module: Module, applied: Applied, /) -> Module:
    """DataParallel's copy of a module, whose forward must run on the copy's own weights."""
    replica: Module = type(module)._replicate_for_data_parallel(module)  # type: ignore[no-untyped-call]
    _wrap(replica, applied)
    return replica


def _wrap(module: Module, applied: Applied) -> None:
    module.__dict__[APPLIED] = applied
    if applied.boundary or applied.families:
        forward = functools.partial(run, module, applied)
        forward.__signature__ = _signature(module)  # type: ignore[attr-defined]
        module.__dict__["forward"] = forward
        module.__dict__["_replicate_for_data_parallel"] = functools.partial(
            replicate, module, applied
        )


def _signature(module: Module) -> inspect.Signature:
    """Of the module's own forward, for those who look for argument names; picklable."""
    simple = (type(None), bool, int, float, str)
    own = inspect.signature(module.forward)
    params = [
        param.replace(
            annotation=inspect.Parameter.empty,
            default=param.default if isinstance(param.default, simple) else ...,
        )
        if param.default is not inspect.Parameter.empty
        else param.replace(annotation=inspect.Parameter.empty)
        for param in own.parameters.values()
    ]
    return inspect.Signature(params)


def rules_of(model: Module) -> PolicyMap | None:
    """The policy map that `model` has, None if none."""
    applied = unwrapped(model).__dict__.get(APPLIED)
    return None if applied is None else applied.rules


def apply_policy(model: Module, policy: Policy | PolicyMap | str) -> Module:
    """Make `model` compute as a policy says; in place, and undone by `remove_policy`.

    Floating inputs are cast where the policy changes from one module to the next, in both
    directions; so are outputs, to the policy's output dtype. Parameters are cast to the policy's
    param_dtype in place, so the Parameter objects stay (an optimizer that has made its state
    already needs `MasterWeights`); norms keep float32 ones under a low policy. Buffers keep their
    dtypes, but under float64. Only `forward` is covered: other methods compute as before.

    Args:
        model: any module; wrappers of torch.compile, DataParallel and DistributedDataParallel are
            looked through. A policy that is applied already is replaced.
        policy: one for the whole model, or a map of rules by module path. `op:` rules name families
            that are left to autocast where their policy is low; float32 is what they have anyway.

    Returns:
        `model`.

    Raises:
        PolicyError: not a policy, one that torch cannot apply, a pattern that matches no module, or
            a module or parameter shared by places with different policies, or parameters to be
            cast inside DistributedDataParallel. Nothing is changed.
    """
    if not isinstance(model, Module):
        raise PolicyError(f"apply_policy needs a torch.nn.Module, got {type(model).__name__}")
    root = unwrapped(model)
    rules = policy if isinstance(policy, PolicyMap) else PolicyMap(default=parse_policy(policy))
    plan = _plan(root, rules)
    known = _known(root)
    before = {
        module: {name: known.get(module, {}).get(name, own.dtype) for name, own in own_of(module)}
        for module in plan
    }
    wanted = {
        own: target_of(module, applied, own, before[module][name])
        for module, applied in plan.items()
        for name, own in own_of(module)
    }
    check_parameters(root, plan, before)
    check_ddp(model, wanted)
    _strip(root)
    plan[root].rules = rules
    for own, dtype in wanted.items():
        retype(own, dtype)
    for module, applied in plan.items():
        applied.forward = module.__dict__.get("forward")
        applied.dtypes = before[module]
        _wrap(module, applied)
    hooked: list[Unshifted] = []
    for region, inside in _shifted(plan).items():
        region.unshifted = Unshifted(inside, region.policy.shift, hooked)
        hooked.append(region.unshifted)
    return model


def _shifted(plan: dict[Module, Applied]) -> dict[Applied, list[Module]]:
    """The modules that a power of two covers, by the boundary that has it."""
    found: dict[Applied, list[Module]] = {}
    for module, applied in plan.items():
        if applied.policy.shift:
            found.setdefault(applied.region or applied, []).append(module)
    return found


def remove_policy(model: Module) -> Module:
    """Undo `apply_policy`: forwards, dtypes. What rounding took does not come back.

    Returns:
        `model`, which may have had no policy.

    Raises:
        PolicyError: parameters would be cast inside DistributedDataParallel.
    """
    root = unwrapped(model)
    known = _known(root)
    before = {
        own: dtypes[name]
        for module, dtypes in known.items()
        for name, own in own_of(module)
        if name in dtypes
    }
    check_ddp(model, before)
    _strip(root)
    for own, dtype in before.items():
        retype(own, dtype)
    return model


def _known(root: Module) -> dict[Module, dict[str, torch.dtype]]:
    """The dtypes that the modules with a policy had before, by name."""
    return {m: m.__dict__[APPLIED].dtypes for m in root.modules() if APPLIED in m.__dict__}


def _strip(root: Module) -> None:
    """Give every module its own forward back."""
    for module in root.modules():
        applied = module.__dict__.pop(APPLIED, None)
        if applied is None:
            continue
        if applied.unshifted is not None:
            applied.unshifted.remove()
        for name in ("_replicate_for_data_parallel", "forward"):
            module.__dict__.pop(name, None)
        if applied.forward is not None:
            module.__dict__["forward"] = applied.forward


def _plan(root: Module, rules: PolicyMap) -> dict[Module, Applied]:
    """What to do to each module, the enclosing ones first."""
    paths = dict(root.named_modules(remove_duplicate=False))
    rules.check(paths)
    for policy in rules.policies:
        check_policy(policy)
    wrong = [f"op:{family}" for family, p in rules.op_rules if p.compute_dtype == "float64"]
    if wrong:
        raise PolicyError(
            f"backend 'torch' cannot compute {', '.join(wrong)} in float64; allowed: float32,"
            " float16, bfloat16"
        )
    low_families = [family for family, p in rules.op_rules if p.compute_dtype in LOW]
    families = frozenset(OP_FAMILIES) - set(low_families)
    plan: dict[Module, Applied] = {}
    where: dict[Module, str] = {}
    for path, module in paths.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise PolicyError(
                f"{path or 'the model'} is a script module of torch.jit, whose forward cannot be"
                " wrapped; apply the policy to the module it was made from"
            )
        pattern, owner, policy = rules.explain(path)
        enclosing = _enclosing(plan, paths, path)
        boundary = _runs(module) and (enclosing is None or enclosing.policy != policy)
        widens = _runs(module) and (boundary or not _plain(module))
        widen = families if widens and policy.compute_dtype in LOW else frozenset()
        new = Applied(policy, pattern, owner, widen, "norm" in families, boundary)
        old = plan.setdefault(module, new)
        new.returns = None if enclosing is None or enclosing.low else enclosing.compute
        new.region = None if boundary else enclosing
        new.bits = policy.shift - (0 if enclosing is None else enclosing.policy.shift)
        if old.policy == policy:
            new.returns = new.returns or old.returns
            plan[module] = old if old.boundary and not new.boundary else new
        else:
            raise PolicyError(
                f"{where[module] or 'the model'} and {path} are one shared module with two"
                f" policies, {old.policy} and {policy}; give it one rule that matches both paths"
            )
        where.setdefault(module, path)
    return plan


def _enclosing(plan: dict[Module, Applied], paths: dict[str, Module], path: str) -> Applied | None:
    """The nearest enclosing boundary."""
    while path:
        path = path.rpartition(".")[0]
        applied = plan[paths[path]]
        if applied.boundary:
            return applied
    return None


def _runs(module: Module) -> bool:
    """Whether the module has a forward (ModuleList and ModuleDict have none)."""
    return type(module).forward is not Module.forward or "forward" in module.__dict__


def _plain(module: Module) -> bool:
    return type(module).forward in _PLAIN and "forward" not in module.__dict__


def check_policy(policy: Policy) -> None:
    """Raise PolicyError where `apply_policy` cannot apply `policy`."""
    require_supported(
        policy,
        "torch",
        param=(*LOW, *WIDE),
        compute=(*LOW, *WIDE),
        output=(*LOW, *WIDE),
        master=("float32",),
        shift=True,
    )
    if policy.shift and policy.param_dtype in LOW:
        raise PolicyError(
            f"backend 'torch' cannot apply @2^{policy.shift} to {policy.param_dtype} parameters,"
            " whose gradients it would take out of range again; allowed: params=float32"
        )
    if policy.param_dtype not in ("float32", policy.compute_dtype) or (
        policy.compute_dtype == "float64" != policy.param_dtype
    ):
        raise PolicyError(
            f"backend 'torch' cannot compute in {policy.compute_dtype} with {policy.param_dtype}"
            " parameters; allowed: parameters in the compute dtype, or float32 parameters with"
            " float16 or bfloat16 compute"
        )
