"""What dtype policies the layers of a Keras model have, and why."""

from __future__ import annotations

import math
from typing import Any

import keras

from polyamp._describe import Row, table
from polyamp_keras._modules import APPLIED, own_variables
from polyamp_keras._places import Place, places


def describe(model: Any) -> None:
    """Print the model as a tree: layer, class, dtype policy, variables, why (`policy_tree`)."""
    print(policy_tree(model))


def policy_tree(model: Any) -> str:
    """The model as a tree of text, one line a layer.

    Each line has the layer's name and class, the name of its Keras policy where it is not that of
    what encloses the layer, the number and dtypes of the variables it owns, and the rule that
    decides. A loaded model has the policies; the rules are not saved.
    """
    return table([_row(place) for place in _depth_first(places(model))])


def _depth_first(found: list[Place]) -> list[Place]:
    inside: dict[Place | None, list[Place]] = {}
    for place in found:
        inside.setdefault(place.parent, []).append(place)
    order, waiting = [], [found[0]]
    while waiting:
        place = waiting.pop()
        order.append(place)
        waiting += reversed(inside.get(place, []))
    return order


def _row(place: Place) -> Row:
    layer, parent = place.layer, place.parent
    depth = len(list(place.upwards())) - 1
    own = own_variables(layer)
    held = [(math.prod(v.shape), keras.backend.standardize_dtype(v.dtype)) for v in own]
    policy = _name(layer)
    applied = vars(layer).get(APPLIED)
    outer = parent and vars(parent.layer).get(APPLIED)
    if parent is not None and policy == _name(parent.layer):
        policy = ""
    why = "" if applied is None or (outer and not policy) else applied.why
    return Row(depth, layer.name, type(layer).__name__, policy, held, why)


def _name(layer: Any) -> str:
    """The name of a layer's Keras policy; of its entry, where that is a map."""
    policy = layer.dtype_policy
    if not isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return str(policy.name)
    return str((policy[layer.path] if layer.path else policy.default_policy).name)
