"""The units of a model: the layers whose format is decided, by path.

A unit is a layer that computes in floating point. Keras' own layers with layers inside (RNN,
MultiHeadAttention, wrappers) are one unit with what is in them; models and other layers that only
hold layers are none: they follow what they hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import keras

from polyamp._errors import PolyampError
from polyamp._formats import shown
from polyamp._policy_map import PolicyMap
from polyamp._selection import OUTPUT, Choice, ModuleState, Selection
from polyamp_keras._places import Place, family, needs_float32, output_layers, places

_WHOLE = ("keras.layers", "keras.src.layers")
"""Modules of Keras' own layers."""


class Unit(NamedTuple):
    """One layer."""

    layer: Any
    family: str | None
    """Of operations that it is: "norm", "softmax", or "output"; None: any other."""
    work: float
    """Multiply-adds an entry that is written."""
    paths: tuple[str, ...]
    """Every place of the layer, the unit's own path first."""

    @property
    def variables(self) -> list[Any]:
        """Floating variables of the layer and of what is in it."""
        found = self.layer.trainable_variables
        return [v for v in found if keras.backend.is_float_dtype(v.dtype)]


def units_of(model: Any, float32_outputs: bool | None = None) -> dict[str, Unit]:
    """The units of a built model, by path, the enclosing ones first.

    Args:
        model: a model or a layer.
        float32_outputs: as in `apply_policy`: whether the layers that make the model's outputs
            are kept in float32.

    Raises:
        PolyampError: not a model, not built, or nothing in it computes in floating point.
    """
    if not isinstance(model, keras.Layer):
        raise PolyampError(f"expected a keras model or layer, got {shown(model)}")
    if not model.built:
        raise PolyampError(
            f"{model.name!r} is not built, so that its layers are not known: call it on a batch"
            " first"
        )
    last = (output_layers(model) or []) if isinstance(model, keras.Model) else []
    kept = {id(layer) for layer in last if float32_outputs is not False}
    found: dict[int, Unit] = {}
    for place in places(model):
        layer = place.layer
        if id(layer) in found:
            unit = found[id(layer)]
            found[id(layer)] = unit._replace(paths=(*unit.paths, place.path))
        elif _is_unit(place):
            kind = _family(place) or (OUTPUT if id(layer) in kept else None)
            found[id(layer)] = Unit(layer, kind, _work(layer), (place.path,))
    if not found:
        raise PolyampError(f"{model.name!r} has no layer that computes in floating point")
    return {unit.paths[0]: unit for unit in found.values()}


def policy_map_of(
    selection: Selection, units: Mapping[str, Unit], containers: Iterable[Place]
) -> PolicyMap:
    """The decisions as rules for `apply_policy`.

    Layers that hold layers get what those have, float32 where they differ: they cast what comes in.
    Norms get float32 by a rule for their family, shared layers a rule at each of their places.
    """
    modules = dict(selection.modules)
    for path, unit in units.items():
        modules.update(dict.fromkeys(unit.paths, modules[path]))
    for place in containers:
        inside = {
            state.choice.level
            for path, state in selection.modules.items()
            if state.family is None and path.startswith(f"{place.path}." if place.path else "")
        }
        if inside:
            level = inside.pop() if len(inside) == 1 else 3
            modules[place.path] = ModuleState(Choice(level))
    rules = selection._replace(modules=modules).policy_map()
    if any(unit.family == "norm" for unit in units.values()):
        return PolicyMap([*rules.rules, ("op:norm", "float32")], rules.default)
    return rules


def containers_of(model: Any, units: Mapping[str, Unit]) -> list[Place]:
    """Places of layers that only hold units, and cast what comes in."""
    known = {path for unit in units.values() for path in unit.paths}
    return [
        place
        for place in places(model)
        if place.layer._layers
        and keras.backend.is_float_dtype(place.layer.compute_dtype)
        and place.layer._convert_input_args
        and not any(p.path in known for p in place.upwards())
    ]


def _is_unit(place: Place) -> bool:
    layer = place.layer
    if not keras.backend.is_float_dtype(layer.compute_dtype) or isinstance(layer, keras.Model):
        return False
    if any(_is_whole(p.layer) for p in place.upwards() if p is not place):
        return False
    return _is_whole(layer) or not layer._layers or bool(layer._trainable_variables)


def _is_whole(layer: Any) -> bool:
    own = type(layer).__module__.startswith(_WHOLE)
    return own and bool(layer._layers) and not isinstance(layer, keras.Model)


def _family(place: Place) -> str | None:
    kind = family(place.layer)
    return kind if kind != "softmax" or needs_float32(place) else None


def _work(layer: Any) -> float:
    """Entries of the weights that one output takes."""
    if isinstance(layer, keras.layers.Embedding):
        return 0.0
    if isinstance(layer, keras.layers.EinsumDense):
        terms, output = layer.equation.split("->")
        sizes = dict(zip(terms.split(",")[1], layer._kernel.shape, strict=True))
        return float(math.prod(size for letter, size in sizes.items() if letter not in output))
    if isinstance(layer, keras.layers.DepthwiseConv2D | keras.layers.DepthwiseConv1D):
        return float(math.prod(layer.kernel_size))
    weights = [v for v in layer.trainable_variables if len(v.shape) > 1 and v.name != "bias"]
    sizes_of = [math.prod(v.shape) for v in weights]
    outputs = 0
    if isinstance(layer, keras.layers.RNN):  # its kernels are of several gates
        outputs = getattr(layer, "units", 0)
    elif isinstance(layer, keras.layers.MultiHeadAttention):
        outputs = layer.output_dense.kernel.shape[-1]
    if outputs:
        return float(sum(sizes_of)) / outputs
    pairs = zip(weights, sizes_of, strict=True)
    return float(sum(size // max(v.shape[-1], 1) for v, size in pairs))
