"""The units of a model: the modules that have parameters of their own, by path."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from polyamp._errors import PolyampError
from polyamp._formats import shown
from polyamp_jax._modules import system_of
from polyamp_jax._plan import Held


class Unit(NamedTuple):
    """What is known of a unit before anything is measured."""

    family: str | None
    """Of operations that it is: "norm", or None."""
    work: float
    """Multiply-adds an entry that is written."""


def units(model: Any, *inputs: Any, **keywords: Any) -> dict[str, Unit]:
    """The units of a model, to give to `Adaptive`, `calibrate` and `advise`.

    Args:
        model: a flax.nnx, equinox or flax.linen module, with or without a policy.
        inputs, keywords: of flax.linen only, whose modules are known when `init` is traced:
            what its `init` takes after the rngs. Arrays or shapes (`jax.ShapeDtypeStruct`) first;
            anything else as keyword.

    Returns:
        By module path, the enclosing ones first.

    Raises:
        PolyampError: not a model, or one without parameters.
    """
    system = system_of(model)
    if system is None:
        raise PolyampError(
            f"expected a module of flax.linen, flax.nnx or equinox, got {shown(model)}"
        )
    held: Iterable[Held] = system.held(model, inputs, keywords)
    found = {
        one.path: Unit(_family(one.kind, system), _work(one, outputs=system.OUTPUTS))
        for one in held
        if one.shapes
    }
    if not found:
        raise PolyampError("the model has no parameters, so there is nothing to measure")
    return found


def _family(kind: str, system: Any) -> str | None:
    """Of the system's own norms; what users call a norm computes as its policy says."""
    return "norm" if kind in {norm.__name__ for norm in system._NORMS} else None


def _work(held: Held, outputs: int) -> float:
    """Entries of the weights that one output takes."""
    if "embed" in held.kind.lower():
        return 0.0
    bias, kernel, *_ = (*sorted(held.shapes, key=len), (), ())
    if len(held.shapes) == 2 and len(bias) < len(kernel):  # a bias has as many entries as outputs
        return math.prod(kernel) / math.prod(bias)
    weights = [shape for shape in held.shapes if len(shape) > 1]
    return float(sum(math.prod(shape) // max(shape[outputs], 1) for shape in weights))


def owned(tree: Any, paths: Iterable[str]) -> dict[str, list[Any]]:
    """The arrays of a tree of parameters, or of their gradients, by the unit that holds them."""
    found: dict[str, list[Any]] = {path: [] for path in paths}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        names = [_name(key) for key in keys]
        names = names[1:] if names[:1] == ["params"] and "params" not in found else names
        owner = _owner(names, found)
        if owner is not None:
            found[owner].append(leaf)
    return found


def _owner(names: Sequence[str], units: Mapping[str, Any]) -> str | None:
    """The innermost unit around a parameter."""
    prefixes = (".".join(names[:end]) for end in range(len(names) - 1, -1, -1))
    return next((prefix for prefix in prefixes if prefix in units), None)


def _name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
