"""Dtype policies by rules, on any Keras backend; run by test_keras_backends.py."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers as kl
from keras_policy_cases import Spy, Tower, mlp, names, run, x
from keras_policy_cases import fresh as fresh

import polyamp
from polyamp import Policy, PolicyMap
from polyamp_keras._describe import describe, policy_tree
from polyamp_keras._dtype_policies import dtype_policy, set_policy
from polyamp_keras._modules import apply_policy, dtype_policy_map, remove_policy

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


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


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")
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
