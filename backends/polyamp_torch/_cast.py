"""Casting: trees of tensors, unscaling, and autocast behind a policy."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch

from polyamp._errors import PolicyError
from polyamp._formats import format_of
from polyamp._policy import Policy, parse_policy, require_supported

Tensor = torch.Tensor

_AUTOCAST = ("float16", "bfloat16", "float32")


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a format's name, e.g. "float16" or "bf16".

    Raises:
        PolicyError: the format is not known, or torch has no dtype for it (tfloat32).
    """
    canonical = format_of(name).name
    dtype = getattr(torch, canonical, None)
    if not isinstance(dtype, torch.dtype):
        raise PolicyError(f"torch has no dtype for {canonical}; it is a compute mode of float32")
    return dtype


def cast(tree: Any, dtype: str | torch.dtype) -> Any:
    """`tree` with its floating tensors in `dtype`; everything else is passed through as it is.

    Goes through dicts, lists, tuples, named tuples and dataclasses. Complex and integer tensors
    are left alone.
    """
    target = dtype if isinstance(dtype, torch.dtype) else dtype_of(dtype)
    if isinstance(tree, Tensor):
        return tree.to(target) if tree.is_floating_point() else tree
    if isinstance(tree, Mapping):
        return like_mapping(tree, {key: cast(value, target) for key, value in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(cast(value, target) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(cast(value, target) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        named = {
            f.name: cast(getattr(tree, f.name), target) for f in dataclasses.fields(tree) if f.init
        }
        return dataclasses.replace(tree, **named)
    return tree


def like_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """`items` in a mapping of the kind of `original`, which has the same keys."""
    if type(original) is dict:
        return items
    if isinstance(original, MutableMapping):
        twin = copy.copy(original)
        for key, value in items.items():
            twin[key] = value
        return twin
    return type(original)(items)  # type: ignore[call-arg]


@torch.no_grad()
def unscale(grads: Iterable[Tensor | None], inverse: Any) -> list[Tensor | None]:
    """New gradients: `grads` times `inverse` (float or 0-d f32 tensor), multiplied in float32.

    Args:
        grads: tensors, dense or sparse, or None; not changed. float16 and bfloat16 come back as
            float32, since an unscaled gradient may be below their range.
        inverse: 1 / scale.
    """
    return [None if g is None else _wide(g) * _on(inverse, g) for g in grads]


def _wide(grad: Tensor) -> Tensor:
    return grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad


def _on(inverse: Any, grad: Tensor) -> Any:
    return inverse.to(grad.device) if isinstance(inverse, Tensor) else inverse


def default_device_type() -> str:
    """ "cuda" where there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def autocast(policy: Policy | str, device_type: str | None = None) -> torch.autocast:
    """torch.autocast behind a policy: matrix work of a region in its compute dtype.

    Args:
        policy: a Policy or any string `Policy.parse` knows. Its compute_dtype must be float16,
            bfloat16 or float32 (which switches an outer autocast off), its param_dtype float32. A
            region casts operations, not tensors: outputs have the dtype of the last operation.
        device_type: "cuda", "cpu" or another device type of torch; by default "cuda" where there
            is one, else "cpu".

    Returns:
        A `torch.autocast`, usable as context manager and as decorator.

    Raises:
        PolicyError: the string is not a policy, or torch cannot autocast to its compute dtype.

    Under torch.compile enter it inside the compiled function: an outer one lets eager and compiled
    gradients differ.
    """
    if isinstance(policy, str) and policy in ("cuda", "cpu"):
        raise PolicyError(
            f"amp.autocast takes the policy first and the device second, got {policy!r} as policy;"
            f' write autocast("fp16", {policy!r}) for torch.autocast({policy!r}, torch.float16)'
        )
    chosen = parse_policy(policy)
    require_supported(chosen, "torch.autocast", param=("float32",), compute=_AUTOCAST)
    low = chosen.compute_dtype != "float32"
    return torch.autocast(
        torch.device(device_type).type if device_type else default_device_type(),
        dtype=dtype_of(chosen.compute_dtype) if low else None,
        enabled=low,
    )
