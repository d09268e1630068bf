"""Dtype policies in fit, changed within it, and in files; run by test_keras_backends.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers as kl
from keras_policy_cases import Spy
from keras_policy_cases import fresh as fresh

from polyamp import PolicyMap
from polyamp_keras._dtype_policies import set_policy
from polyamp_keras._modules import apply_policy, dtype_policy_map, remove_policy, to_float32
from polyamp_keras._places import places

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


class Change(keras.callbacks.Callback):
    """Applies a policy when an epoch begins, or after a batch of it."""

    def __init__(self, policy: str, epoch: int, batch: int | None = None) -> None:
        super().__init__()
        self.policy, self.epoch, self.batch, self.now = policy, epoch, batch, 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.now = epoch
        if epoch == self.epoch and self.batch is None:
            apply_policy(self.model, self.policy)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self.now, batch) == (self.epoch, self.batch):
            apply_policy(self.model, self.policy)


X = np.random.default_rng(1).normal(size=(16, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def net() -> Any:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            kl.Dense(8, activation="relu"),
            Spy(),
            kl.BatchNormalization(),
            kl.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", auto_scale_loss=False)
    return model


def fit(model: Any, epochs: int, first: int = 0, callbacks: Any = ()) -> Any:
    return model.fit(
        X,
        Y,
        batch_size=4,
        epochs=epochs,
        initial_epoch=first,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    ).history["loss"]


def same(left: Any, right: Any) -> bool:
    pairs = zip(left.get_weights(), right.get_weights(), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


# Training.


def test_a_change_between_two_epochs_of_one_fit() -> None:
    model, twice = net(), net()
    fit(model, 3, callbacks=[Change("mixed_bfloat16", 1), Change("float32", 2)])
    fit(twice, 1)
    fit(apply_policy(twice, "mixed_bfloat16"), 2, 1)
    fit(apply_policy(twice, "float32"), 3, 2)
    assert same(model, twice)
    plain = net()
    fit(plain, 3)
    assert not same(model, plain)
    seen = model.layers[1].seen
    order = [d for i, d in enumerate(seen) if i == 0 or d != seen[i - 1]]
    assert order == ["float32", "bfloat16", "float32"]


def test_a_change_within_an_epoch() -> None:
    model, plain = net(), net()
    fit(model, 1, callbacks=[Change("mixed_bfloat16", 0, 1)])
    fit(plain, 1)
    assert model.layers[1].seen[-1] == "bfloat16"
    assert not same(model, plain)
    np.testing.assert_allclose(model.get_weights()[0], plain.get_weights()[0], atol=3e-3)


def test_fit_is_that_of_a_model_made_with_the_policy() -> None:
    model = apply_policy(net(), "mixed_bfloat16")
    set_policy("mixed_bfloat16")
    hand = net()
    assert fit(model, 2) == fit(hand, 2)
    assert same(model, hand)


def test_a_mixed_trained_model_is_served_in_float32() -> None:
    model = net()
    fit(apply_policy(model, "mixed_bfloat16"), 2)
    low = model.predict(X, verbose=0)
    model.evaluate(X, Y, verbose=0)
    assert to_float32(model) is model
    fresh = net()
    fresh.set_weights(model.get_weights())
    exact = model.predict(X, verbose=0)
    assert exact.dtype == np.float32
    assert np.array_equal(exact, fresh.predict(X, verbose=0))
    assert model.evaluate(X, Y, verbose=0) == fresh.evaluate(X, Y, verbose=0)
    assert not np.array_equal(exact, low)
    assert {p.layer.dtype_policy.name for p in places(model)} == {"float32"}


def test_a_sequential_that_took_a_low_input_loses_it() -> None:
    set_policy("mixed_float16")
    model = keras.Sequential([kl.Dense(2)])
    model.build((None, 3))
    set_policy("float32")
    assert model.inputs[0].dtype == "float16"
    to_float32(model)
    fresh = keras.Sequential([keras.Input((3,)), kl.Dense(2)])
    fresh.set_weights(model.get_weights())
    assert np.array_equal(model.predict(X, verbose=0), fresh.predict(X, verbose=0))
    assert model.inputs[0].dtype == "float32"
    assert model.get_config()["layers"][0]["config"]["dtype"] == "float32"


# Files.

LOAD = """
import json, sys
import keras, numpy as np
model = keras.models.load_model(sys.argv[1])
np.save(sys.argv[2], np.asarray(model.predict(np.load(sys.argv[3]), verbose=0), "float64"))
dtypes = [(type(one).__name__, one.compute_dtype) for one in model._flatten_layers(False)
          if not isinstance(one, keras.Model)]
print(json.dumps({"polyamp": [m for m in sys.modules if "polyamp" in m], "dtypes": dtypes}))
"""


def without_polyamp(program: str, *arguments: Any) -> Any:
    """What `program` prints, in a process of this Keras backend."""
    env = {**os.environ, "PYTHONWARNINGS": "ignore", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def dtypes(model: Any) -> list[list[str]]:
    """Class and compute dtype of every layer that is no model (Keras saves no dtype for those)."""
    layers = model._flatten_layers(False)
    return [
        [type(one).__name__, one.compute_dtype]
        for one in layers
        if not isinstance(one, keras.Model)
    ]


def test_a_file_is_loaded_by_keras_alone(tmp_path: Path) -> None:
    inputs = keras.Input((4, 8), name="in")
    inside = keras.Input((4, 8), name="inside")
    block = keras.Model(inside, kl.Dense(8, name="mix")(inside), name="block")
    y = kl.MultiHeadAttention(2, 4, name="mha")(block(inputs), inputs)
    y = kl.Bidirectional(kl.GRU(4, name="gru", return_sequences=True), name="bi")(y)
    y = kl.TimeDistributed(kl.Dense(4, name="d"), name="td")(y)
    tail = keras.Sequential(
        [keras.Input((4, 4), name="tail_in"), kl.Dense(2, name="e")], name="tail"
    )
    model = keras.Model(inputs, tail(y), name="all")
    rules = {
        "block.mix": "float32",
        "mha.query": "float32",
        "bi.forward_gru": "mixed_bfloat16",
        "td.d": "float32",
    }
    if keras.config.backend() != "jax":  # whose scan wants a cell that has the layer's dtype
        rules["bi.backward_gru.gru_cell"] = "mixed_bfloat16"
    apply_policy(model, PolicyMap(rules, default="16-mixed"))
    found = {p.path: p.layer.compute_dtype for p in places(model)}
    assert found["tail.e"] == found["mha.query"] == "float32"
    assert found["mha.key"] == found["td"] == "float16"
    batch = np.random.default_rng(2).normal(size=(3, 4, 8)).astype("float32")
    np.save(tmp_path / "x.npy", batch)
    model.save(tmp_path / "model.keras")
    told = without_polyamp(LOAD, tmp_path / "model.keras", tmp_path / "y.npy", tmp_path / "x.npy")
    assert told["polyamp"] == []
    assert told["dtypes"] == dtypes(model)
    here = np.asarray(model.predict(batch, verbose=0), "float64")
    assert np.array_equal(np.load(tmp_path / "y.npy"), here)


SUBCLASSED = """
import json, sys
import keras, numpy as np

@keras.saving.register_keras_serializable("checks")
class Net(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.low = keras.layers.Dense(8, name="low")
        self.head = keras.layers.Dense(1, name="head")
    def call(self, x):
        return self.head(self.low(x))
"""


def test_a_subclassed_model_from_a_file(tmp_path: Path) -> None:
    scope: dict[str, Any] = {}
    exec(SUBCLASSED, scope)
    model = scope["Net"](name="net")
    rules = PolicyMap({"low": "mixed_float16"})
    apply_policy(model, rules)
    model(X)
    np.save(tmp_path / "x.npy", X)
    model.save(tmp_path / "model.keras")
    policies = keras.dtype_policies.serialize(dtype_policy_map(rules, model))
    (tmp_path / "policies.json").write_text(json.dumps(policies))
    setting = f"""
with open({str(tmp_path / "policies.json")!r}) as file:
    keras.config.set_dtype_policy(keras.dtype_policies.deserialize(json.load(file)))
"""
    told = without_polyamp(
        SUBCLASSED + setting + LOAD,
        *(tmp_path / name for name in ("model.keras", "y.npy", "x.npy")),
    )
    assert told["polyamp"] == []
    assert told["dtypes"] == dtypes(model) == [["Dense", "float16"], ["Dense", "float32"]]
    here = np.asarray(model.predict(X, verbose=0), "float64")
    assert np.array_equal(np.load(tmp_path / "y.npy"), here)
    assert not np.array_equal(remove_policy(model).predict(X, verbose=0), here)
