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
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from typing import cast as cast_to

import torch

from polyamp._errors import PolicyError
from polyamp._policy import Policy, parse_policy, require_supported
from polyamp._policy_map import PolicyMap
from polyamp._policy_pattern import OP_FAMILIES
from polyamp_torch._cast import cast, default_device_type, dtype_of, map_tensors
from polyamp_torch._families import Again, FamilyMode, Region, traced

Module = torch.nn.Module

APPLIED = "_polyamp_applied"
_LOW = ("float16", "bfloat16")
_WIDE = ("float32", "float64")
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BATCH_NORM = torch.nn.modules.batchnorm._NormBase
_SPECTRAL_NORM = torch.nn.utils.parametrizations._SpectralNorm
"""Whose buffers are multiplied with the parameter, and have its dtype."""
_NORMS = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm, _BATCH_NORM)
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
    ran: bool = False

    def __post_init__(self) -> None:
        self.low = self.policy.compute_dtype in _LOW
        self.compute = dtype_of(self.policy.compute_dtype)
        self.output = dtype_of(self.policy.output_dtype)


def run(module: Module, applied: Applied, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module under its policy."""
    applied.ran = True
    forward = applied.forward or functools.partial(type(module).forward, module)
    tracing = torch.compiler.is_compiling()
    if not applied.boundary:
        if not tracing:
            with Again(applied.families):
                return forward(*args, **kwargs)
        with FamilyMode(_device_type(module, args, kwargs), applied.families):
            return forward(*args, **kwargs)
    dtype = applied.compute
    device = _device_type(module, args, kwargs)
    args = tuple([cast(arg, dtype) for arg in args])
    kwargs = {key: cast(value, dtype) for key, value in kwargs.items()}
    with (traced if tracing else Region)(device, dtype if applied.low else None, applied.families):
        out = forward(*args, **kwargs)
    out = cast(out, applied.output)
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


def replicate(module: Module, applied: Applied) -> Module:
    """DataParallel's copy of a module, whose forward must run on the copy's own weights."""
    replica: Module = type(module)._replicate_for_data_parallel(module)  # type: ignore[no-untyped-call]
    _wrap(replica, applied)
    return replica


def _wrap(module: Module, applied: Applied) -> None:
    module.__dict__[APPLIED] = applied
    if applied.boundary or applied.families:
        module.__dict__["forward"] = functools.partial(run, module, applied)
        module.__dict__["_replicate_for_data_parallel"] = functools.partial(
            replicate, module, applied
        )


def unwrapped(model: Module) -> Module:
    """The model inside torch.compile's, DataParallel's and DistributedDataParallel's wrappers."""
    while model is not (inner := _inside(model)):
        model = inner
    return model


def _inside(model: Module) -> Module:
    """What is inside the outermost wrapper, or the model itself."""
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        return cast_to(Module, model.module)
    compiled = isinstance(model, torch._dynamo.OptimizedModule)
    return cast_to(Module, model._orig_mod) if compiled else model


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
    _check_parameters(root, plan)
    _check_ddp(
        model, {own: _target(m, a, own) for m, a in plan.items() for own in _own(m).values()}
    )
    remove_policy(model)
    for module, applied in plan.items():
        applied.forward = module.__dict__.get("forward")
        applied.dtypes = {name: own.dtype for name, own in _own(module).items()}
    plan[root].rules = rules
    for module, applied in plan.items():
        for own in _own(module).values():
            _retype(own, _target(module, applied, own))
        _wrap(module, applied)
    return model


def remove_policy(model: Module) -> Module:
    """Undo `apply_policy`: forwards, dtypes. What rounding took does not come back.

    Returns:
        `model`, which may have had no policy.

    Raises:
        PolicyError: parameters would be cast inside DistributedDataParallel.
    """
    found = [(m, a) for m in unwrapped(model).modules() if (a := m.__dict__.get(APPLIED))]
    before = [
        (own, applied.dtypes[name])
        for module, applied in found
        for name, own in _own(module).items()
        if name in applied.dtypes
    ]
    _check_ddp(model, dict(before))
    for module, applied in found:
        for name in (APPLIED, "_replicate_for_data_parallel", "forward"):
            module.__dict__.pop(name, None)
        if applied.forward is not None:
            module.__dict__["forward"] = applied.forward
    for own, dtype in before:
        _retype(own, dtype)
    return model


def _check_ddp(model: Module, dtypes: Mapping[torch.Tensor, torch.dtype]) -> None:
    """Refuse to cast what DistributedDataParallel has made its buckets for."""
    while model is not (inner := _inside(model)):
        cast = isinstance(model, torch.nn.parallel.DistributedDataParallel) and any(
            own.dtype != dtype for own, dtype in dtypes.items()
        )
        if cast:
            raise PolicyError(
                "this policy casts parameters, whose gradients DistributedDataParallel would no"
                " longer reduce; apply or remove it before the model is wrapped"
            )
        model = inner


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
    low_families = [family for family, p in rules.op_rules if p.compute_dtype in _LOW]
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
        widen = families if widens and policy.compute_dtype in _LOW else frozenset()
        new = Applied(policy, pattern, owner, widen, "norm" in families, boundary)
        old = plan.setdefault(module, new)
        new.returns = None if enclosing is None or enclosing.low else enclosing.compute
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
        param=(*_LOW, *_WIDE),
        compute=(*_LOW, *_WIDE),
        output=(*_LOW, *_WIDE),
        master=("float32",),
    )
    if policy.param_dtype not in ("float32", policy.compute_dtype) or (
        policy.compute_dtype == "float64" != policy.param_dtype
    ):
        raise PolicyError(
            f"backend 'torch' cannot compute in {policy.compute_dtype} with {policy.param_dtype}"
            " parameters; allowed: parameters in the compute dtype, or float32 parameters with"
            " float16 or bfloat16 compute"
        )


def _target(module: Module, applied: Applied, own: torch.Tensor) -> torch.dtype:
    """The dtype that one of `_own(module)` is to have."""
    wanted = dtype_of(applied.policy.param_dtype)
    if own.dtype not in _FLOATING:
        return own.dtype
    if isinstance(own, torch.nn.Parameter):
        batch = isinstance(module, _BATCH_NORM)
        keep = batch or (applied.wide_norms and isinstance(module, _NORMS))
        return torch.float32 if keep and applied.policy.param_dtype in _LOW else wanted
    follows = wanted == torch.float64 or isinstance(module, _SPECTRAL_NORM)
    return wanted if follows else own.dtype


def _own(module: Module) -> dict[str, torch.Tensor]:
    """A module's own parameters and buffers, by name."""
    params = dict(module.named_parameters(recurse=False))
    return {**params, **dict(module.named_buffers(recurse=False))}


def _check_parameters(root: Module, plan: dict[Module, Applied]) -> None:
    """Refuse a parameter that two modules want in different dtypes."""
    wanted: dict[torch.nn.Parameter, tuple[str, torch.dtype]] = {}
    for path, module in root.named_modules():
        for name, param in module.named_parameters(path, recurse=False):
            target = _target(module, plan[module], param)
            first, other = wanted.setdefault(param, (name, target))
            if other != target:
                raise PolicyError(
                    f"{first} and {name} are one tied parameter, wanted in {other} and {target};"
                    " give both modules policies with the same params="
                )


def _retype(param: torch.Tensor, dtype: torch.dtype) -> None:
    if param.dtype != dtype:
        grad, param.grad = param.grad, None
        param.data = param.data.to(dtype)
        param.grad = None if grad is None else grad.to(dtype)
