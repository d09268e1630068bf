"""What a model may be wrapped in: torch.compile, DataParallel, DistributedDataParallel."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import cast

import torch

from polyamp._errors import PolicyError

Module = torch.nn.Module


def unwrapped(model: Module) -> Module:
    """The model inside torch.compile's, DataParallel's and DistributedDataParallel's wrappers."""
    while model is not (inner := _inside(model)):
        model = inner
    return model


def _inside(model: Module) -> Module:
    """What is inside the outermost wrapper, or the model itself."""
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        return cast(Module, model.module)
    dynamo = sys.modules.get("torch._dynamo")
    compiled = dynamo is not None and isinstance(model, dynamo.OptimizedModule)
    return cast(Module, model._orig_mod) if compiled else model


def check_ddp(model: Module, dtypes: Mapping[torch.Tensor, torch.dtype]) -> None:
    """Refuse to cast what DistributedDataParallel has made its buckets for."""
    wrappers = [model, *unwrapped(model).modules()]
    while model is not (inner := _inside(model)):
        wrappers.append(model := inner)
    wrapped = any(isinstance(m, torch.nn.parallel.DistributedDataParallel) for m in wrappers)
    if wrapped and any(own.dtype != dtype for own, dtype in dtypes.items()):
        raise PolicyError(
            "this policy casts parameters, whose gradients DistributedDataParallel would no longer"
            " reduce; apply or remove it before the model is wrapped"
        )
