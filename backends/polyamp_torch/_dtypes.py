"""Which dtype a policy gives to a module's own parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from polyamp._errors import PolicyError
from polyamp._policy import Policy
from polyamp_torch._cast import dtype_of

Module = torch.nn.Module

LOW = ("float16", "bfloat16")
WIDE = ("float32", "float64")
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BATCH_NORM = torch.nn.modules.batchnorm._NormBase
_SPECTRAL_NORM = torch.nn.utils.parametrizations._SpectralNorm
"""Whose buffers are multiplied with the parameter, and have its dtype."""
_NORMS = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm, _BATCH_NORM)


class Decided(Protocol):
    """What is read here of the decision for one module."""

    policy: Policy
    wide_norms: bool


def target_of(
    module: Module, applied: Decided, own: torch.Tensor, before: torch.dtype
) -> torch.dtype:
    """The dtype that one of `own_of(module)` is to have; `before` is without any policy."""
    wanted = dtype_of(applied.policy.param_dtype)
    batch = isinstance(module, _BATCH_NORM)
    if before not in _FLOATING:
        return before
    if batch or (applied.wide_norms and isinstance(module, _NORMS)):
        wanted = torch.float32 if applied.policy.param_dtype in LOW else wanted
    follows = batch or wanted == torch.float64 or isinstance(module, _SPECTRAL_NORM)
    return wanted if follows or isinstance(own, torch.nn.Parameter) else before


def own_of(module: Module) -> list[tuple[str, torch.Tensor]]:
    """A module's own parameters and buffers, with their names."""
    params: list[tuple[str, torch.Tensor]] = list(module.named_parameters(recurse=False))
    return params + list(module.named_buffers(recurse=False))


def check_parameters(
    root: Module,
    plan: Mapping[Module, Decided],
    before: Mapping[Module, Mapping[str, torch.dtype]],
) -> None:
    """Refuse a parameter that two modules want in different dtypes."""
    wanted: dict[torch.nn.Parameter, tuple[str, torch.dtype, int]] = {}
    for path, module in root.named_modules():
        for own, param in module.named_parameters(recurse=False):
            name = f"{path}.{own}" if path else own
            target = target_of(module, plan[module], param, before[module][own])
            shift = plan[module].policy.shift
            first, other, bits = wanted.setdefault(param, (name, target, shift))
            if bits != shift:
                raise PolicyError(
                    f"{first} and {name} are one tied parameter, in modules with powers of two"
                    f" {bits} and {shift} of their own; give both the same"
                )
            if other != target:
                raise PolicyError(
                    f"{first} and {name} are one tied parameter, wanted in {other} and {target};"
                    " give both modules policies with the same params="
                )


def retype(param: torch.Tensor, dtype: torch.dtype) -> None:
    """Cast a parameter or buffer, its gradient too, in place."""
    if param.dtype != dtype:
        grad, param.grad = param.grad, None
        param.data = param.data.to(dtype)
        param.grad = None if grad is None else grad.to(dtype)
