"""Policies per layer: Keras' own dtype policies, set in place by rules over layer paths.

    for each place of a layer, the enclosing ones first:
        policy   = the rules' for the nearest path that has one, else the default
        name     = Keras' name of its variables and computation
        low compute, and an output layer, a softmax or a norm that is wanted in float32:
            name = float32
        low variables of a norm: float32 variables after all
        layer.dtype_policy = name; where Keras makes the layers inside from the layer's own policy,
            and they differ, a DTypePolicyMap of them
    train, test and predict functions are made anew

Nothing of polyamp is left in the layers' configurations, so that Keras alone loads a saved model.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from polyamp._errors import PolicyError
from polyamp._policy import Policy
from polyamp._policy_map import PolicyMap
from polyamp_keras._dtype_policies import LOW, name_of, read_policy, wants_float32_outputs
from polyamp_keras._places import (
    Place,
    family,
    is_graph,
    needs_float32,
    output_layers,
    places,
)

APPLIED = "_polyamp_applied"
_FAMILIES = ("softmax", "norm")


@dataclass
class Applied:
    """What `apply_policy` did to one layer."""

    name: str
    """Keras' name of the policy."""
    why: str
    """The rule that decided and where it matched, or why it is float32 all the same."""
    before: Any = None
    """The Keras policy that the layer had before the first `apply_policy`."""


def apply_policy(
    model: Any,
    policy: Policy | PolicyMap | keras.DTypePolicy | str,
    *,
    float32_outputs: bool | None = None,
) -> Any:
    """Give every layer of `model` its Keras dtype policy; in place, undone by `remove_policy`.

    Works before and after the model is built, and between or within epochs (from a callback).
    Layers that do not compute in floating point (tokenizers, lookups) are left alone.

    Args:
        model: a Functional, Sequential or subclassed model, or a layer.
        policy: one for the whole model (also one of Keras' own), or a map of rules. A rule matches
            a layer's path: names of layers (or of the attributes that hold them), without the
            model's own, joined by "." or, as Keras does, by "/". `op:softmax` and `op:norm` with
            float32 put those layers in float32; with a low-precision policy they leave them to
            their layers' policy.
        float32_outputs: put the layers that make the model's outputs in float32 where they would
            compute in float16 or bfloat16. None: where their policy has `output=float32`, unless
            the model is a subclassed one, whose output layers are not known. With `output=float32`
            softmax layers compute in float32 too, and norms that would not by themselves.

    Returns:
        `model`.

    Raises:
        PolicyError: not a policy, one Keras cannot express, a pattern that matches no layer, a
            shared layer with two policies, variables that are built in another dtype, a quantized
            layer, or `float32_outputs=True` for a subclassed model. Nothing is changed.
    """
    found, plan = plan_for(model, policy, float32_outputs)
    for place in found:
        if place.layer in plan:
            _check_layer(place, plan[place.layer].name)
    for layer, applied in plan.items():
        old = vars(layer).get(APPLIED)
        applied.before = layer.dtype_policy if old is None else old.before
    for place in found:
        if place.layer in plan:
            _set(place.layer, _keras_policy(place, found, plan), plan[place.layer])
    _refresh(found)
    return model


def remove_policy(model: Any) -> Any:
    """Undo `apply_policy`: every layer has the dtype policy it had before.

    Returns:
        `model`, which may have had no policy applied.
    """
    found = places(model)
    for place in found:
        applied = vars(place.layer).pop(APPLIED, None)
        if applied is not None:
            place.layer._dtype_policy = applied.before
    _refresh(found)
    return model


def has_policy(model: Any) -> bool:
    """Whether `apply_policy` gave the model a policy that is still there."""
    return any(APPLIED in vars(place.layer) for place in places(model))


def to_float32(model: Any) -> Any:
    """Make a model that was trained in mixed precision compute in float32; in place.

    Its float32 variables are untouched, so that its predictions are those of a float32 model with
    these weights. `apply_policy` puts it back into mixed precision, `remove_policy` into its first
    state.

    Returns:
        `model`.

    Raises:
        PolicyError: a layer has float16 or bfloat16 variables. Nothing is changed.
    """
    return apply_policy(model, "float32")


def dtype_policy_map(
    policy_map: PolicyMap | Policy | keras.DTypePolicy | str,
    model: Any,
    *,
    float32_outputs: bool | None = None,
) -> keras.dtype_policies.DTypePolicyMap:
    """The Keras map that gives the layers of `model` what `apply_policy` would give them.

    Its keys are the exact paths of layers (`layer.path`; "model/layer" for what is not built; in a
    subclassed model also without the model's name, which Keras leaves out when it loads one), its
    default is the map's default. Where a model is made anew by code, `set_policy` with this map, or
    Keras' own `keras.config.set_dtype_policy`, gives layers of these paths their policies.

    Args:
        policy_map, float32_outputs: as in `apply_policy`.
        model: the model whose layers the rules are about; not changed.

    Raises:
        PolicyError: as `apply_policy`, two layers with one Keras path that want two policies, or a
            layer that Keras gives no path (a softmax within MultiHeadAttention) and that is not to
            have the default.
    """
    found, plan = plan_for(model, policy_map, float32_outputs)
    rules = policy_map if isinstance(policy_map, PolicyMap) else _map_of(policy_map)
    default = name_of(rules.default)
    keras_map = keras.dtype_policies.DTypePolicyMap(default_policy=default)
    for place in (p for p in found if p.layer in plan):
        name, paths = plan[place.layer].name, [place.keras_path]
        if place.layer.built and place.layer.path is None and name != default:
            raise PolicyError(
                f"layer {place.path!r} is to have {name!r}, but Keras gives it no path, so that a"
                " DTypePolicyMap cannot name it; use apply_policy"
            )
        if not is_graph(model) and place.parent is not None:
            paths.append(place.keras_path.removeprefix(f"{model.name}/"))
        for path in paths:
            if keras_map[path].name != name and path in keras_map:
                raise PolicyError(
                    f"two layers have the Keras path {path!r} and are to have the policies"
                    f" {keras_map[path].name!r} and {name!r}; give them different names"
                )
            _enter(keras_map, path, name)
    return keras_map


def _enter(keras_map: Any, path: str, name: str) -> None:
    if path not in keras_map:
        keras_map[path] = keras.DTypePolicy(name)


def plan_for(
    model: Any, policy: Policy | PolicyMap | keras.DTypePolicy | str, float32_outputs: bool | None
) -> tuple[list[Place], dict[Any, Applied]]:
    """Every place in a model, and what to do to each layer that computes in floating point."""
    if not isinstance(model, keras.Layer):
        raise PolicyError(
            f"a policy is applied to a keras model or layer, got {type(model).__name__}"
        )
    rules = _normal(policy if isinstance(policy, PolicyMap) else _map_of(policy), model)
    for each in rules.policies:
        name_of(each)
    families = _families(rules)
    found = places(model)
    rules.check(dict.fromkeys(path for place in found for path in (place.path, place.alias)))
    plan: dict[Any, Applied] = {}
    policies: dict[Any, tuple[str, Policy]] = {}
    for place in found:
        if not keras.backend.is_float_dtype(place.layer.compute_dtype):
            continue
        why, chosen = _explain(rules, place)
        first, other = policies.setdefault(place.layer, (place.path, chosen))
        if other != chosen:
            raise PolicyError(
                f"{first} and {place.path} are one shared layer with two policies, {other} and"
                f" {chosen}; give it one rule that matches both paths"
            )
        plan.setdefault(place.layer, _decide(place, chosen, why, families))
    _widen_outputs(model, plan, policies, float32_outputs)
    return found, plan


def _map_of(policy: Policy | keras.DTypePolicy | str) -> PolicyMap:
    return PolicyMap(default=read_policy(policy))


def _normal(rules: PolicyMap, model: Any) -> PolicyMap:
    """The rules with Keras' separator read as ours, and the model's own name left out."""

    def one(pattern: str) -> str:
        if "/" not in pattern or pattern.startswith("re:"):
            return pattern
        return pattern.removeprefix(f"{model.name}/").replace("/", ".")

    return PolicyMap([(one(pattern), policy) for pattern, policy in rules.rules], rules.default)


def _families(rules: PolicyMap) -> dict[str, Policy]:
    """Policies of `op:` rules by family."""
    for name, policy in rules.op_rules:
        if name not in _FAMILIES or policy.compute_dtype == "float64":
            raise PolicyError(
                f"backend 'keras' cannot apply the rule 'op:{name}' with {str(policy)!r}; allowed:"
                f" {', '.join(f'op:{f}' for f in _FAMILIES)}, in float32 or low precision. Losses"
                " and metrics are in keras.config.floatx() anyway; remove the rule"
            )
    return dict(rules.op_rules)


def _explain(rules: PolicyMap, place: Place) -> tuple[str, Policy]:
    """Why a layer has its policy, and the policy; the earlier rule wins between path and alias."""
    order = [pattern for pattern, _ in rules.rules]
    for owner in place.upwards():
        matches = [rules.match(path) for path in (owner.path, owner.alias)]
        hits = [(order.index(pattern), pattern, p) for pattern, p in matches if pattern is not None]
        if hits:
            _, pattern, policy = min(hits, key=lambda hit: hit[0])
            at = "" if owner is place else f" at {owner.path!r}"
            return f"rule {pattern!r}{at}", policy
    return "default", rules.default


def _decide(place: Place, policy: Policy, why: str, families: dict[str, Policy]) -> Applied:
    name, kind = name_of(policy), family(place.layer)
    if policy.compute_dtype not in LOW or kind is None:
        return Applied(name, why)
    told = families.get(kind)
    if told is not None and told.compute_dtype not in LOW:
        return Applied(name_of(told), f"rule 'op:{kind}'")
    if told is None and wants_float32_outputs(policy) and needs_float32(place):
        return Applied("float32", f"{why}; a {kind} computes in float32")
    if told is None and kind == "norm" and policy.param_dtype in LOW:
        return Applied(f"mixed_{name}", f"{why}; a norm keeps float32 variables")
    return Applied(name, why)


def _widen_outputs(
    model: Any,
    plan: dict[Any, Applied],
    policies: dict[Any, tuple[str, Policy]],
    float32_outputs: bool | None,
) -> None:
    if float32_outputs is False:
        return
    last = output_layers(model) if isinstance(model, keras.Model) else None
    if last is None:
        if float32_outputs and any(p.compute_dtype in LOW for _, p in policies.values()):
            raise PolicyError(
                f"the output layers of {model.name!r}, a {type(model).__name__}, are not known"
                " (a Functional or Sequential model's are); give them a rule of their own, such as"
                ' PolicyMap({"head": "float32"}, default=...), without float32_outputs'
            )
        return
    for layer in last:
        _, policy = policies.get(layer, ("", None))
        if policy is None or policy.compute_dtype not in LOW:
            continue
        if float32_outputs or wants_float32_outputs(policy):
            plan[layer] = Applied("float32", f"{plan[layer].why}; an output layer is in float32")


def _check_layer(place: Place, name: str) -> None:
    layer = place.layer
    if layer.quantization_mode is not None:
        raise PolicyError(
            f"layer {place.path or layer.name!r} is quantized ({layer.dtype_policy.name}); apply"
            " the policy before model.quantize, or to the float model"
        )
    wanted, now = keras.DTypePolicy(name).variable_dtype, layer.variable_dtype
    own = {keras.backend.standardize_dtype(v.dtype) for v in own_variables(layer)}
    if wanted != now and now in own:
        raise PolicyError(
            f"layer {place.path or layer.name!r} is built with {now} variables, and policy {name!r}"
            f" wants {wanted}: Keras cannot change a variable's dtype. Apply the policy before the"
            " model is built, or set_policy before it is made and copy the weights (get_weights,"
            " set_weights); float32, mixed_float16 and mixed_bfloat16 share float32 variables"
        )


def own_variables(layer: Any) -> list[Any]:
    """Variables that a layer itself holds."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def _keras_policy(place: Place, found: Sequence[Place], plan: dict[Any, Applied]) -> Any:
    """A policy by name, or a map where the layer makes its inner layers from its own policy.

    Models are left out: Keras saves the layers of a Functional or Sequential one each with its own
    policy, and calls the constructor of a subclassed one.
    """
    name = plan[place.layer].name
    inner = place.layer._layers and not isinstance(place.layer, keras.Model)
    inside = [p for p in found if inner and p.layer in plan and place in p.upwards()]
    if all(plan[p.layer].name == name for p in inside):
        return keras.DTypePolicy(name)
    keras_map = keras.dtype_policies.DTypePolicyMap(default_policy=name)
    depth = len(list(place.upwards()))
    for p in inside:
        names = [q.layer.name for q in reversed(list(p.upwards()))]
        # A wrapper makes the layer in it without a scope of its own when it is loaded.
        for path in (p.keras_path, "/".join(names[depth - 1 :])):
            _enter(keras_map, path, plan[p.layer].name)
    return keras_map


def _set(layer: Any, policy: Any, applied: Applied) -> None:
    layer._dtype_policy = policy  # the property would write into a map that other layers share
    vars(layer)[APPLIED] = applied


def _refresh(found: Sequence[Place]) -> None:
    """Let the models in `found` trace anew what they had traced under the policies before."""
    for layer in {id(p.layer): p.layer for p in found if isinstance(p.layer, keras.Model)}.values():
        if isinstance(layer, keras.Sequential):
            _widen_input(layer)
        for kind in ("train", "test", "predict"):
            if getattr(layer, f"{kind}_function", None) is not None:
                _renew_step(layer, f"{kind}_step")
                getattr(layer, f"make_{kind}_function")(force=True)


def _renew_step(model: Any, name: str) -> None:
    """Another object for a step that is not the class's: jax.jit knows what it traced by it."""
    step = vars(model).get(name)
    if step is not None:
        new = copy.copy(step)
        setattr(model, name, functools.partial(step) if new is step else new)


def _widen_input(model: Any) -> None:
    """Undo the low-precision input of a Sequential, which took its first layer's dtype if built."""
    first = model._layers[0] if model._layers else None
    if not isinstance(first, keras.layers.InputLayer) or not model.layers:
        return
    wanted = model.layers[0].compute_dtype
    if first.dtype in LOW and wanted not in LOW and keras.backend.is_float_dtype(wanted):
        first._dtype = wanted
        first.output._dtype = wanted
