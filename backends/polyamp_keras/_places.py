"""Where the layers of a Keras model are: paths, output layers, families."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
from keras.src.models.functional import Functional

_SOFTMAX = (keras.activations.softmax, keras.activations.log_softmax)
_NORMS_IN_FLOAT32 = (
    keras.layers.BatchNormalization,
    keras.layers.GroupNormalization,
    keras.layers.LayerNormalization,
    keras.layers.RMSNormalization,
)
_NORMS_AS_TOLD = (keras.layers.Normalization, keras.layers.UnitNormalization)
NORMS = (*_NORMS_IN_FLOAT32, *_NORMS_AS_TOLD)


@dataclass(frozen=True, eq=False)
class Place:
    """One place of a layer in a model; a shared layer has several."""

    layer: Any
    path: str
    """Names of the enclosing layers and its own, without the model's, joined by "."."""
    alias: str
    """The same with the names of attributes, where a parent holds the layer in one."""
    parent: Place | None

    @property
    def keras_path(self) -> str:
        """The path Keras gave the layer when it was built, or will give it in a plain model."""
        return self.layer.path or "/".join(p.layer.name for p in reversed(list(self.upwards())))

    def upwards(self) -> Iterator[Place]:
        """The place and those it lies in, the model's last."""
        place: Place | None = self
        while place is not None:
            yield place
            place = place.parent


def places(model: Any) -> list[Place]:
    """Every place of a layer in a model, its own first, enclosing ones before enclosed ones."""
    found = [Place(model, "", "", None)]
    for place in found:
        around = {id(p.layer) for p in place.upwards()}
        attributes = {} if is_graph(place.layer) else _attributes(place.layer)
        for child in place.layer._layers:
            if id(child) not in around and not isinstance(child, keras.layers.InputLayer):
                alias = attributes.get(id(child), child.name)
                found.append(
                    Place(child, _join(place.path, child.name), _join(place.alias, alias), place)
                )
    return found


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _attributes(layer: Any) -> dict[int, str]:
    """Attribute names by the id of the layer they hold; `blocks.0` for one in a list."""
    names: dict[int, str] = {}
    for name, value in {**vars(layer), **vars(layer).get("_modules", {})}.items():
        if isinstance(value, keras.Layer):
            names.setdefault(id(value), name)
        elif isinstance(value, (list, tuple, dict)) and not name.startswith("_"):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                if isinstance(item, keras.Layer):
                    names.setdefault(id(item), f"{name}.{key}")
    return names


def is_graph(layer: Any) -> bool:
    """Whether a layer is a Functional or Sequential model, whose order of layers is known."""
    return isinstance(layer, (keras.Sequential, Functional))


def output_layers(model: Any) -> list[Any] | None:
    """The layers that make a model's outputs, and all that is in them; None if not known.

    Looks into nested Functional and Sequential models, and through operations that are no layers.
    """
    if not isinstance(model, keras.Model):
        return list(model._flatten_layers())
    if not is_graph(model):
        return None
    if isinstance(model, keras.Sequential):
        last = model.layers[-1:]
    else:
        last = [layer for tensor in keras.tree.flatten(model.outputs) for layer in _makers(tensor)]
    found: list[Any] = []
    for layer in last:
        inner = output_layers(layer)
        if inner is None:
            return None
        found += inner
    return found


def _makers(tensor: Any) -> Iterator[Any]:
    operation, index, _ = tensor._keras_history
    if isinstance(operation, keras.Layer):
        yield operation
        return
    for source in operation._inbound_nodes[index].input_tensors:
        yield from _makers(source)


def family(layer: Any) -> str | None:
    """`"softmax"` or `"norm"` for a layer of that family of operations."""
    if isinstance(layer, NORMS):
        return "norm"
    softmax = isinstance(layer, keras.layers.Softmax) or getattr(layer, "activation", 0) in _SOFTMAX
    return "softmax" if softmax else None


def needs_float32(place: Place) -> bool:
    """Whether a layer of a family would compute in a low-precision policy's compute dtype.

    Keras' other norms cast to float32 inside. A softmax within a layer (MultiHeadAttention) is left
    to that layer, which makes it anew when it is loaded.
    """
    if isinstance(place.layer, NORMS):
        return isinstance(place.layer, _NORMS_AS_TOLD)
    in_a_model = place.parent is None or isinstance(place.parent.layer, keras.Model)
    return in_a_model and family(place.layer) == "softmax"


def computes_in_float16(model: Any) -> bool:
    """Whether any layer of a model computes in float16, as far as layers and policies tell."""
    return any(_layer_computes_in_float16(layer) for layer in model._flatten_layers())


def _layer_computes_in_float16(layer: Any) -> bool:
    policy = layer.dtype_policy
    known = [layer.compute_dtype]
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap) and not layer.built:
        known += [entry.compute_dtype for entry in policy.values()]
    return "float16" in known
