"""Casting: trees of tensors, unscaling, and autocast behind a policy."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch

from polyamp._errors import PolicyError
from polyamp._formats import format_of
from polyamp._policy import Policy, parse_policy, require_supported

Tensor = torch.Tensor

LOW = (torch.float16, torch.bfloat16)
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

    Goes through dicts, lists, tuples, named tuples and dataclasses, and gives back the very same
    container where nothing in it changes. Complex and integer tensors are left alone.
    """
    target = dtype if isinstance(dtype, torch.dtype) else dtype_of(dtype)
    return map_tensors(tree, lambda t: t.to(target) if t.is_floating_point() else t)


def map_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`tree` with `function` applied to its tensors: dicts, lists, (named) tuples, dataclasses.

    A container in which nothing changes is returned itself, so that what is appended to it later
    is seen by whoever holds it.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        new = {key: map_tensors(value, function) for key, value in tree.items()}
        same = all(new[key] is value for key, value in tree.items())
        return tree if same else like_mapping(tree, new)
    if isinstance(tree, (list, tuple)):
        values = [map_tensors(value, function) for value in tree]
        same = all(new is old for new, old in zip(values, tree, strict=True))
        return tree if same else _like_sequence(tree, values)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [f.name for f in dataclasses.fields(tree) if f.init]
        named = {name: map_tensors(getattr(tree, name), function) for name in fields}
        same = all(new is getattr(tree, name) for name, new in named.items())
        return tree if same else dataclasses.replace(tree, **named)
    return tree


def _like_sequence(original: Any, values: list[Any]) -> Any:
    """`values` in a sequence of the kind of `original`, which is as long."""
    if type(original) in (list, tuple):
        return type(original)(values)
    if hasattr(original, "_fields"):
        return type(original)(*values)
    if isinstance(original, list):
        twin = copy.copy(original)
        twin[:] = values
        return twin
    return type(original)(values)


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


def scaled(value: Any, scale_on: Callable[[torch.device], Tensor]) -> Any:
    """`value` times the scale: a tensor, or lists, tuples, dicts and iterables of them.

    Args:
        value: floating tensors. A float16 tensor with dimensions is widened to float32 first,
            since float16 ends at 65504. An iterable that is no collection is scaled lazily.
        scale_on: gives the scale, f32, 0-d, on a device.

    Raises:
        ValueError: something in `value` is neither a tensor nor a collection of them.
    """
    if isinstance(value, Tensor):
        wide = value.float() if value.dtype == torch.float16 and value.dim() else value
        return wide * scale_on(value.device)
    if isinstance(value, Mapping):
        return like_mapping(value, {key: scaled(item, scale_on) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(scaled(item, scale_on) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(scaled(item, scale_on) for item in value)
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return (scaled(item, scale_on) for item in value)
    raise ValueError(
        "scale() takes a tensor, or lists, tuples, dicts and other iterables of tensors, nested or"
        f" not; got {type(value).__name__} among them"
    )


@torch.no_grad()
def unscale(grads: Iterable[Tensor | None], inverse: Any) -> list[Tensor | None]:
    """New gradients: `grads` times `inverse` (float or 0-d f32 tensor), multiplied in float32.

    Args:
        grads: tensors, dense or sparse, or None; not changed. float16 and bfloat16 come back as
            float32, since an unscaled gradient may be below their range.
        inverse: 1 / scale.
    """
    return [None if g is None else wide(g) * _on(inverse, g) for g in grads]


def wide(value: Any) -> Any:
    """A float16 or bfloat16 tensor in float32, anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW else value


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
