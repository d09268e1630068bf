"""What stays in float32 under a dtype policy: outputs, families, variables; run by
test_keras_backends.py."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers as kl
from keras_policy_cases import Tower, mlp, names, run, x
from keras_policy_cases import fresh as fresh

import polyamp
from polyamp import PolicyMap
from polyamp_keras._modules import apply_policy, remove_policy, to_float32
from polyamp_keras._places import places

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


# Outputs, softmax and norms.


def classifier(*tail: Any) -> Any:
    return keras.Sequential(
        [
            keras.Input((6,)),
            kl.Dense(8, name="body"),
            kl.BatchNormalization(name="batch"),
            kl.UnitNormalization(name="unit"),
            kl.Dense(8, activation="softmax", name="gate"),
            kl.Dense(3, name="logits"),
            *tail,
        ]
    )


@pytest.mark.parametrize(
    ("rules", "wide"),
    [
        ("mixed_float16", ""),
        ("fp16", "unit gate logits"),
        ("c=bf16,o=f32", "unit gate logits"),
        (PolicyMap({"op:softmax": "float32"}, default="mixed_float16"), "gate"),
        (PolicyMap({"op:norm": "float32"}, default="mixed_float16"), "batch unit"),
        (PolicyMap({"op:softmax": "fp16", "op:norm": "fp16"}, default="fp16"), "logits"),
        (PolicyMap({"logits": "mixed_float16"}, default="fp16"), "unit gate"),
    ],
)
def test_what_stays_in_float32(rules: Any, wide: str) -> None:
    model = apply_policy(classifier(), rules)
    found = {p: d for p, d in names(model).items() if p}
    assert " ".join(p for p, d in found.items() if d == "float32") == wide
    assert {v.dtype for v in model.variables if v.dtype != "uint32"} == {"float32"}


def test_outputs_in_float32_when_asked() -> None:
    model = apply_policy(mlp(), "mixed_float16", float32_outputs=True)
    assert [p for p, d in names(model).items() if d == "float32"] == ["head"]
    apply_policy(model, "fp16", float32_outputs=False)
    assert set(names(model).values()) == {"float16"}
    apply_policy(model, "fp16")
    assert names(model)["head"] == "float32"
    assert run(model, x(2, 3), x(2, 3)).dtype == np.float32


def test_the_last_layer_of_a_sequential_before_it_is_built() -> None:
    model = apply_policy(keras.Sequential([kl.Dense(4), kl.Dense(2)]), "fp16")
    assert [layer.compute_dtype for layer in model.layers] == ["float16", "float32"]
    assert run(model, x(2, 3)).dtype == np.float32
    assert {v.dtype for v in model.variables} == {"float32"}


def test_output_layers_are_found_in_nested_models_and_through_operations() -> None:
    inputs = keras.Input((4, 6))
    head = keras.Sequential(
        [keras.Input((4, 6)), kl.Dense(5), kl.Dense(2, name="last")], name="head"
    )
    other = kl.TimeDistributed(kl.Dense(3, name="d"), name="td")(inputs)
    out = [keras.ops.reshape(head(inputs), (-1, 8)), other]
    model = apply_policy(keras.Model(inputs, out), "fp16")
    wide = [p for p, d in names(model).items() if d == "float32"]
    assert sorted(wide) == ["head.last", "td", "td.d"]


def test_the_outputs_of_a_subclassed_model_are_not_known() -> None:
    model = Tower()
    with pytest.raises(polyamp.PolicyError, match=r"output layers of 'tower\w*', a Tower, are not"):
        apply_policy(model, "fp16", float32_outputs=True)
    assert set(names(model).values()) == {"float32"}
    apply_policy(model, "float32", float32_outputs=True)
    apply_policy(model, "fp16")
    assert set(names(model).values()) == {"float16"}


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_norms_compute_their_statistics_in_float32() -> None:
    big = np.full((4, 6), 300.0, "float32") * np.linspace(0.5, 1.5, 6, dtype="float32")
    for layer, sound in (
        (kl.LayerNormalization(), True),
        (kl.GroupNormalization(2), True),
        (kl.RMSNormalization(), True),
        (kl.UnitNormalization(), False),
    ):
        model = keras.Sequential([keras.Input((6,)), layer, kl.Flatten()])
        exact = run(model, big)
        low = run(apply_policy(model, "mixed_float16"), big).astype("float32")
        assert np.allclose(low, exact, rtol=0, atol=2e-3) is sound, layer
        ours = run(apply_policy(model, "fp16"), big)
        np.testing.assert_allclose(ours, exact, rtol=0, atol=2e-3)


# Built models and variables.


def test_a_built_model_keeps_its_float32_variables() -> None:
    model = mlp()
    with pytest.raises(polyamp.PolicyError, match=r"'text\.one' is built with float32 variables"):
        apply_policy(model, PolicyMap({"text": "float16"}))
    assert set(names(model).values()) == {"float32"}


@pytest.mark.parametrize("kept", [True, False])
def test_low_variables_before_the_model_is_built(kept: bool) -> None:
    layers = [kl.Dense(4), kl.BatchNormalization(), kl.Dense(2)]
    model = keras.Sequential(layers)
    rules = PolicyMap({} if kept else {"op:norm": "float16"}, default="float16")
    apply_policy(model, rules)
    model.build((None, 3))
    assert [layer.variables[0].dtype for layer in layers] == [
        "float16",
        "float32" if kept else "float16",
        "float16",
    ]
    assert {layer.compute_dtype for layer in layers} == {"float16"}
    with pytest.raises(polyamp.PolicyError, match="built with float16 variables"):
        to_float32(model)
    assert model.layers[0].compute_dtype == "float16"


def test_policies_can_be_changed_and_removed() -> None:
    theirs = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    theirs["pair/x"] = keras.DTypePolicy("mixed_float16")
    model = mlp(head=theirs)
    before = [p.layer.dtype_policy for p in places(model)]
    apply_policy(apply_policy(model, "mixed_float16"), PolicyMap({"text": "bf16"}))
    assert list(theirs) == ["pair/x"]
    assert names(model)["text.one"] == "bfloat16"
    assert remove_policy(model) is model
    assert all(
        a is b for a, b in zip(before, [p.layer.dtype_policy for p in places(model)], strict=True)
    )
    assert remove_policy(model) is model
