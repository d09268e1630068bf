"""calibrate, advise and capabilities; run by test_keras_backends.py."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers as kl
from keras_policy_cases import Spy, mlp
from keras_policy_cases import fresh as fresh
from keras_selector_cases import CAN

import polyamp.keras as amp
from polyamp import Capabilities, PolicyMap, PolyampError, Selector

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model(gain: float = 1.0) -> Any:
    keras.utils.set_random_seed(0)
    found = keras.Sequential(
        [
            keras.Input((16,)),
            kl.Dense(32, activation="relu", name="one"),
            kl.LayerNormalization(name="norm"),
            kl.Dense(32, name="two"),
            kl.BatchNormalization(name="batch"),
            kl.Dropout(0.1, name="drop"),
            kl.Dense(4, name="head"),
        ]
    )
    kernel, bias = found.get_layer("two").get_weights()
    found.get_layer("two").set_weights([kernel * np.float32(gain), bias])
    return found


def batches(count: int = 3, scale: float = 1.0) -> list[tuple[np.ndarray, np.ndarray]]:
    source = np.random.default_rng(1)
    return [
        (source.normal(size=(64, 16)).astype("float32") * scale, source.integers(0, 4, size=64))
        for _ in range(count)
    ]


def test_the_map_and_an_unchanged_model() -> None:
    net = model(gain=3e4)
    net.compile("sgd", LOSS, auto_scale_loss=False)
    net.fit(*batches(1)[0], verbose=0)
    before = [np.array(w) for w in net.get_weights()]
    seeds = [np.array(g.state) for g in net.get_layer("drop")._seed_generators]
    function, count = net.train_function, len(net.trainable_variables)
    found = amp.advise(net, batches(), LOSS, capabilities=CAN)
    formats = {path: choice.format for path, choice in found.choices.items()}
    assert (formats["one"], formats["two"], formats["drop"]) == ("float16", "bfloat16", "float16")
    assert formats["norm"] == formats["batch"] == formats["head"] == "float32"
    lines = found.table().splitlines()
    assert any("norm computes in float32" in line for line in lines)
    assert any("makes an output of the model" in line for line in lines)
    rules = amp.calibrate(net, batches(), LOSS, capabilities=CAN)
    assert rules.policy_for("two").compute_dtype == "bfloat16"
    assert PolicyMap.from_toml(rules.to_toml()) == rules
    for old, new in zip(before, net.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    for old, generator in zip(seeds, net.get_layer("drop")._seed_generators, strict=True):
        np.testing.assert_array_equal(old, np.array(generator.state))
    assert net.train_function is function
    assert len(net.trainable_variables) == count
    assert {layer.compute_dtype for layer in net.layers} == {"float32"}
    amp.apply_policy(net, rules)
    assert net.get_layer("two").compute_dtype == "bfloat16"
    assert net.get_layer("norm").compute_dtype == "float32"
    assert np.isfinite(net.predict(batches()[0][0], verbose=0)).all()


def test_a_policy_that_is_there_comes_back() -> None:
    net = amp.apply_policy(model(), "mixed_bfloat16")
    before = amp.policy_tree(net)
    amp.advise(net, [x for x, _ in batches(1)], capabilities=CAN)
    assert amp.policy_tree(net) == before


def test_without_a_loss_values_decide() -> None:
    inputs = [x for x, _ in batches()]
    rules = amp.calibrate(model(gain=3e4), inputs, capabilities=CAN)
    assert rules.policy_for("two").compute_dtype == "bfloat16"
    assert rules.policy_for("one").compute_dtype == "float16"


def test_a_budget_takes_the_layers_that_cost_least() -> None:
    net, low = model(), []
    for share in (0.0, 0.2, 1.0):
        found = amp.advise(net, batches(), LOSS, capabilities=CAN, share=share)
        low.append({p for p, c in found.choices.items() if c.level < 3})
    assert low[0] == set()
    assert len(low[1] & {"one", "two"}) == 1
    assert low[2] >= {"one", "two"}


def test_slow_formats_are_left_out() -> None:
    slow = Capabilities(slow=frozenset({"float16", "bfloat16"}))
    inputs = [x for x, _ in batches(1)]
    found = amp.calibrate(model(), inputs, capabilities=slow)
    assert found.policy_for("one").compute_dtype == "float32"
    wanted = Selector(prefer="memory")
    found = amp.calibrate(model(), inputs, capabilities=slow, selector=wanted)
    assert found.policy_for("one").compute_dtype == "float16"


def test_refused() -> None:
    for data, told in (
        ([], "no batch"),
        (batches(1, float("inf")), "calibrate on sound batches"),
        ([batches(1)[0][0]], r"a batch is \(x, y\)"),
    ):
        with pytest.raises(PolyampError, match=told):
            amp.calibrate(model(), data, LOSS, capabilities=CAN)
    with pytest.raises(PolyampError, match="share must be from 0 to 1"):
        amp.calibrate(model(), batches(), share=2.0)
    with pytest.raises(PolyampError, match="selector must be"):
        amp.calibrate(model(), batches(), selector=None)
    with pytest.raises(PolyampError, match="expected a keras model"):
        amp.calibrate(lambda x: x, batches())
    with pytest.raises(PolyampError, match="is not built"):
        amp.calibrate(keras.Sequential([kl.Dense(1)]), batches())


def test_capabilities_of_the_cpu() -> None:
    found = amp.capabilities("cpu")
    assert found.formats == {"float16", "bfloat16"}
    assert found.slow <= found.formats
    assert not found.shifts
    assert amp.capabilities("cpu") is found
    with pytest.raises(PolyampError, match="no device 'nodevice'; Keras has cpu"):
        amp.capabilities("nodevice")


def test_two_towers() -> None:
    """By hand and by calibrate: the text tower in float32, the image tower in float16."""
    net = mlp()
    amp.apply_policy(net, PolicyMap({"text": "float32"}, default="16-mixed"))
    x = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
    out = net([x, x])
    seen = {p: net.get_layer(p).get_layer("spy").seen[-1] for p in ("text", "image")}
    assert seen == {"text": "float32", "image": "float16"}
    assert keras.backend.standardize_dtype(out.dtype) == "float32"
    amp.remove_policy(net)
    for variable in net.get_layer("text").get_layer("one").weights:
        variable.assign(variable * 1e9)  # beyond float16
    half = Capabilities(frozenset({"float16"}))
    rules = amp.calibrate(net, [([x, x],), ([x + 1.0, x],)], capabilities=half)
    assert rules.policy_for("text.one").compute_dtype == "float32"
    assert rules.policy_for("image.one").compute_dtype == "float16"
    amp.apply_policy(net, rules)
    net([x, x])
    assert isinstance(net.get_layer("image").get_layer("spy"), Spy)
    assert net.get_layer("text").get_layer("spy").seen[-1] == "float32"
    assert net.get_layer("image").get_layer("spy").seen[-1] == "float16"


def test_a_policy_applied_after_training_counts() -> None:
    """jax.jit would go on with what it traced before."""
    net = keras.Sequential([keras.Input((3,)), kl.Dense(4), Spy(name="spy"), kl.Dense(1)])
    amp.compile(net, "sgd", "mse", rule="keras")
    x = np.ones((4, 3), "float32")
    net.fit(x, x[:, :1], verbose=0)
    amp.apply_policy(net, "mixed_float16")
    net.fit(x, x[:, :1], verbose=0)
    assert net.get_layer("spy").seen[-1] == "float16"
