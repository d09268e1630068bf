"""Dtype policies by rules, on any Keras backend; run by test_keras_backends.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers as kl

import polyamp
from polyamp import Policy, PolicyMap
from polyamp_keras._describe import describe, policy_tree
from polyamp_keras._dtype_policies import dtype_policy, set_policy
from polyamp_keras._modules import apply_policy, dtype_policy_map, remove_policy, to_float32
from polyamp_keras._places import places

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")


class Spy(kl.Layer):
    """Passes its input on and keeps the dtypes it came in."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        self.seen: list[str] = []

    def call(self, x: Any) -> Any:
        self.seen.append(keras.backend.standardize_dtype(x.dtype))
        return x


class Tower(keras.Model):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.enter = kl.Dense(4, activation="relu")
        self.blocks = [kl.Dense(4), kl.Dense(4)]
        self.spy = Spy()

    def call(self, x: Any) -> Any:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.spy(x)


def x(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype("float32")


def names(model: Any) -> dict[str, str]:
    """Compute dtype by path."""
    return {p.path: p.layer.compute_dtype for p in places(model)}


def run(model: Any, *inputs: np.ndarray) -> np.ndarray:
    out = model.predict(inputs[0] if len(inputs) == 1 else list(inputs), verbose=0)
    return np.asarray(out)


def mlp(text: Any = None, image: Any = None, head: Any = None) -> Any:
    """Two towers and a head; each with a policy made by hand, or Keras' global one."""
    left, right = keras.Input((3,), name="left"), keras.Input((3,), name="right")
    towers = []
    for name, tensor, policy in (("text", left, text), ("image", right, image)):
        inside = keras.Input((3,))
        y = kl.Dense(8, activation="relu", name="one", dtype=policy)(inside)
        y = Spy(name="spy", dtype=policy)(y)
        towers.append(keras.Model(inside, kl.Dense(4, name="two", dtype=policy)(y), name=name))
        towers[-1] = towers[-1](tensor)
    y = kl.Concatenate(name="both", dtype=head)(towers)
    return keras.Model([left, right], kl.Dense(2, name="head", dtype=head)(y), name="pair")


# Names.


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mixed_float16", "mixed_float16"),
        ("16-mixed", "mixed_float16"),
        ("bf16", "mixed_bfloat16"),
        ("float32", "float32"),
        ("64-true", "float64"),
        ("16-true", "float16"),
        ("bfloat16", "bfloat16"),
        ("O3", "float16"),
    ],
)
def test_a_policy_has_keras_name(text: str, name: str) -> None:
    made = dtype_policy(text)
    assert type(made) is keras.DTypePolicy
    assert made == keras.DTypePolicy(name)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("O2", "master_dtype='float32'"),
        ("tf32", "compute_dtype='tfloat32'"),
        ("c=bf16,store=f16", "store_dtype='float16'"),
        ("c=bf16,accumulate=f32", "accumulate_dtype='float32'"),
        ("params=float32,compute=float8_e4m3fn,output=float32", "compute_dtype='float8_e4m3fn'"),
        ("p=f16,c=f32", "no dtype policy with float16 variables and float32 compute"),
        ("p=f16,c=bf16", "allowed: float16, bfloat16, float32, float64, mixed_float16"),
        ("c=f16,o=f64", "cannot return float64 from layers that compute in float16"),
        ("c=f32,o=f16", "allowed: output=float32$"),
        ("mixd_float16", "did you mean 'mixed_float16'"),
    ],
)
def test_what_keras_cannot_express_is_refused(text: str, told: str) -> None:
    with pytest.raises(polyamp.PolicyError, match=told):
        dtype_policy(text)
    model = mlp()
    with pytest.raises(polyamp.PolicyError, match=told):
        apply_policy(model, text)
    assert set(names(model).values()) == {"float32"}


def test_the_global_policy() -> None:
    old = set_policy("16-mixed")
    assert old == keras.DTypePolicy("float32")
    assert kl.Dense(1).dtype_policy == keras.DTypePolicy("mixed_float16")
    assert set_policy(old) == keras.DTypePolicy("mixed_float16")
    with pytest.raises(polyamp.PolicyError, match="apply_policy"):
        set_policy(PolicyMap({"a": "fp16"}))  # type: ignore[arg-type]
    assert keras.config.dtype_policy() == keras.DTypePolicy("float32")


# Rules.


def test_two_towers_are_those_made_by_hand() -> None:
    model = apply_policy(mlp(), PolicyMap({"text": "float32", "image": "mixed_float16"}))
    hand = mlp("float32", "mixed_float16", "float32")
    hand.set_weights(model.get_weights())
    inputs = x(5, 3), x(5, 3)
    ours, theirs = run(model, *inputs), run(hand, *inputs)
    assert ours.dtype == np.float32
    assert np.array_equal(ours, theirs)
    assert not np.array_equal(ours, run(remove_policy(model), *inputs))
    for net, image in ((hand, "float16"), (model, "float16")):
        assert net.get_layer("text").get_layer("spy").seen[-1] == "float32"
        assert image in net.get_layer("image").get_layer("spy").seen


def test_a_whole_model_is_that_of_the_global_policy() -> None:
    for name in ("mixed_float16", "mixed_bfloat16"):
        model = apply_policy(mlp(), name)
        set_policy(name)
        hand = mlp()
        set_policy("float32")
        hand.set_weights(model.get_weights())
        assert {v.dtype for v in model.variables} == {"float32"}
        left, right = model([x(5, 3), x(5, 3)]), hand([x(5, 3), x(5, 3)])
        assert keras.backend.standardize_dtype(left.dtype) == name.removeprefix("mixed_")
        cast = keras.ops.cast
        pair = [keras.ops.convert_to_numpy(cast(t, "float32")) for t in (left, right)]
        assert np.array_equal(*pair)


@pytest.mark.parametrize(
    ("pattern", "low"),
    [
        ("text", ["text", "text.one", "text.spy", "text.two"]),
        ("text.**", ["text", "text.one", "text.spy", "text.two"]),
        ("text/one", ["text.one"]),
        ("pair/text/one", ["text.one"]),
        ("**.one", ["text.one", "image.one"]),
        (r"re:.*\.two", ["text.two", "image.two"]),
        ("head", ["head"]),
    ],
)
def test_rules_cover_what_is_inside(pattern: str, low: list[str]) -> None:
    model = apply_policy(mlp(), PolicyMap({pattern: "mixed_bfloat16"}))
    assert [p for p, d in names(model).items() if d == "bfloat16"] == low


def test_the_first_rule_wins_and_the_nearest_layer() -> None:
    rules = PolicyMap({"text.one": "float32", "text": "mixed_float16", "text.*": "mixed_bfloat16"})
    found = names(apply_policy(mlp(), rules))
    assert (found["text"], found["text.one"], found["text.two"]) == (
        "float16",
        "float32",
        "bfloat16",
    )


@pytest.mark.parametrize("built", [False, True])
def test_a_subclassed_model_by_names_and_attributes(built: bool) -> None:
    model = Tower()
    if built:
        model(x(1, 3))
    second = model.blocks[1].name
    rules = PolicyMap({"enter": "mixed_float16", "blocks.0": "mixed_bfloat16", second: "float32"})
    apply_policy(model, rules)
    found = [model.enter, *model.blocks, model]
    assert [one.compute_dtype for one in found] == ["float16", "bfloat16", "float32", "float32"]
    run(model, x(2, 3))
    assert model.spy.seen[-1] == "float32"
    apply_policy(model, PolicyMap({"blocks.*": "bf16"}))
    run(model, x(2, 3))
    assert model.spy.seen[-1] == "bfloat16"
    assert {v.dtype for v in model.variables} == {"float32"}


def test_layers_inside_layers() -> None:
    inputs = keras.Input((4, 8))
    y = kl.MultiHeadAttention(2, 4, name="mha")(inputs, inputs)
    y = kl.Bidirectional(kl.LSTM(4, name="lstm", return_sequences=True), name="bi")(y)
    model = keras.Model(inputs, kl.TimeDistributed(kl.Dense(2, name="d"), name="td")(y))
    rules = {"mha.query": "float32", "bi.forward_lstm": "mixed_bfloat16", "td.d": "float32"}
    apply_policy(model, PolicyMap(rules, default="mixed_float16"))
    found = names(model)
    assert (found["mha"], found["mha.query"], found["mha.key"]) == ("float16", "float32", "float16")
    assert found["bi.forward_lstm.lstm_cell"] == "bfloat16"
    assert found["bi.backward_lstm.lstm_cell"] == "float16"
    assert found["td.d"] == "float32"
    assert run(model, x(2, 4, 8)).shape == (2, 4, 2)


def test_a_shared_layer_has_one_policy() -> None:
    shared, inputs = kl.Dense(3, name="shared"), keras.Input((3,))
    halves = [keras.Model(inputs, shared(inputs), name=name) for name in ("a", "b")]
    model = keras.Model(inputs, kl.Add()([half(inputs) for half in halves]))
    with pytest.raises(polyamp.PolicyError, match=r"a\.shared and b\.shared are one shared layer"):
        apply_policy(model, PolicyMap({"a": "fp16"}))
    assert set(names(model).values()) == {"float32"}
    apply_policy(model, PolicyMap({"**.shared": "fp16"}))
    assert shared.compute_dtype == "float16"


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({"txet": "fp16"}, r"no module matches 'txet' \(nearest: 'text'"),
        ({"op:loss": "float32"}, "cannot apply the rule 'op:loss'"),
        ({"op:softmax": "float64"}, "cannot apply the rule 'op:softmax'"),
        ({"text": "O2"}, "master_dtype"),
    ],
)
def test_rules_that_cannot_be_applied(rules: dict[str, str], told: str) -> None:
    model = mlp()
    with pytest.raises(polyamp.PolicyError, match=told):
        apply_policy(model, PolicyMap(rules, default="mixed_float16"))
    assert set(names(model).values()) == {"float32"}


def test_layers_of_other_dtypes_are_left_alone() -> None:
    lookup = kl.IntegerLookup(vocabulary=[3, 5], name="ids")
    inputs = keras.Input((2,), dtype="int64")
    model = keras.Model(inputs, kl.Embedding(4, 3)(lookup(inputs)))
    before = lookup.dtype_policy
    apply_policy(model, "mixed_float16")
    assert lookup.dtype_policy is before
    assert model.layers[-1].compute_dtype == "float16"
    assert run(model, np.array([[3, 5], [5, 7]])).shape == (2, 2, 3)


def test_only_models_and_layers() -> None:
    with pytest.raises(polyamp.PolicyError, match="keras model or layer, got dict"):
        apply_policy({}, "fp16")
    dense = apply_policy(kl.Dense(2), "bf16")
    assert dense.compute_dtype == "bfloat16"


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`")
def test_quantized_layers_are_refused() -> None:
    model = keras.Sequential([keras.Input((4,)), kl.Dense(4, name="d")])
    model.quantize("int8")
    with pytest.raises(polyamp.PolicyError, match="'d' is quantized"):
        apply_policy(model, "bf16")
    assert model.layers[0].dtype_policy.name == "int8_from_float32"


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


# What a model looks like.


def test_describe(capsys: pytest.CaptureFixture[str]) -> None:
    model = mlp()
    plain = policy_tree(model).splitlines()
    assert plain[0].split() == ["pair:", "Functional", "float32"]
    apply_policy(model, PolicyMap({"text": "bf16", "image.two": "fp16"}, default="fp16"))
    describe(model)
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells == [
        ["pair: Functional", "mixed_float16", "default"],
        ["text: Functional", "mixed_bfloat16", "rule 'text'"],
        ["one: Dense", "32 float32"],
        ["spy: Spy"],
        ["two: Dense", "36 float32"],
        ["image: Functional"],
        ["one: Dense", "32 float32"],
        ["spy: Spy"],
        ["two: Dense", "36 float32"],
        ["both: Concatenate"],
        ["head: Dense", "float32", "18 float32", "default; an output layer is in float32"],
    ]


def test_a_map_with_keras_own_paths() -> None:
    rules = PolicyMap({"enter": "float32", "blocks.0": "bf16"}, default="mixed_float16")

    class Named(keras.Model):
        call = Tower.call

        def __init__(self) -> None:
            super().__init__(name="net")
            self.enter = kl.Dense(4, name="a")
            self.blocks = [kl.Dense(4, name="b"), kl.Dense(4, name="c")]
            self.spy = Spy(name="s")

    model = Named()
    unbuilt = dtype_policy_map(rules, model)
    model(x(1, 3))
    made = dtype_policy_map(rules, model)
    assert {k: v.name for k, v in made.items()} == {
        "net": "mixed_float16",
        **{f"{net}a": "float32" for net in ("net/", "")},
        **{f"{net}b": "mixed_bfloat16" for net in ("net/", "")},
        **{f"{net}{name}": "mixed_float16" for net in ("net/", "") for name in "cs"},
    }
    assert {k: v.name for k, v in unbuilt.items()} == {k: v.name for k, v in made.items()}
    assert made.default_policy == keras.DTypePolicy("mixed_float16")
    assert set(names(model).values()) == {"float32"}
    set_policy(made)
    again = Named()
    again(x(1, 3))
    again.set_weights(model.get_weights())
    apply_policy(model, rules)
    assert list(names(again).values())[1:] == list(names(model).values())[1:]
    assert np.array_equal(run(again, x(4, 3)), run(model, x(4, 3)))


def test_a_map_refuses_what_keras_paths_cannot_tell() -> None:
    model = mlp()
    assert model.get_layer("text").get_layer("one").path == "one"
    with pytest.raises(polyamp.PolicyError, match="two layers have the Keras path 'one'"):
        dtype_policy_map(PolicyMap({"text": "bf16"}), model)
    inputs = keras.Input((4, 8))
    model = keras.Model(inputs, kl.MultiHeadAttention(2, 4, name="mha")(inputs, inputs))
    rules = PolicyMap({"mha._softmax": "float32"}, default=Policy.parse("mixed_float16"))
    with pytest.raises(polyamp.PolicyError, match=r"'mha\.softmax\w*' .* Keras gives it no path"):
        dtype_policy_map(rules, model)
    apply_policy(model, rules)
    assert model.layers[-1]._softmax.compute_dtype == "float32"
    assert model.layers[-1]._query_dense.compute_dtype == "float16"
