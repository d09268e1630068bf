"""Models of every make under amp.compile and fit; run by test_keras_backends.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import keras_cases as kc
import numpy as np
import pytest

import polyamp
import polyamp.keras as amp

pytestmark = [
    pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
FRAMEWORK = keras.config.backend()
LOW = polyamp.Dynamic(init_scale=2.0**8)
TRACE = ".x..n."


def small(**kwargs: Any) -> Any:
    """Adam, with what is set on the inner optimizer."""
    return keras.optimizers.Adam(0.01, **kwargs)


class OwnStep(keras.Model):  # type: ignore[misc]
    """A train step of one's own, as Keras' guides write it on each backend."""

    def __init__(self) -> None:
        super().__init__()
        self.low = keras.layers.Dense(1, dtype="mixed_float16")
        self.norm = keras.layers.BatchNormalization()

    def call(self, x: Any, training: bool = False) -> Any:
        return self.norm(self.low(x), training=training)

    if FRAMEWORK == "tensorflow":

        def train_step(self, data: Any) -> Any:
            import tensorflow as tf

            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
                scaled = self.optimizer.scale_loss(loss)
            weights = self.trainable_weights
            self.optimizer.apply(tape.gradient(scaled, weights), weights)
            return {"own": loss}

    elif FRAMEWORK == "torch":

        def train_step(self, data: Any) -> Any:
            import torch

            x, y = data
            self.zero_grad()
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            self.optimizer.scale_loss(loss).backward()
            with torch.no_grad():
                weights = self.trainable_weights
                self.optimizer.apply([v.value.grad for v in weights], weights)
            return {"own": loss.detach()}

    else:

        def train_step(self, state: Any, data: Any) -> Any:
            import jax

            weights, others, optimizer, metrics = state
            x, y = data

            def scaled(weights: Any) -> Any:
                out, new = self.stateless_call(weights, others, x, training=True)
                loss = self.compute_loss(x, y, out)
                return self.optimizer.stateless_scale_loss(optimizer, loss), (loss, new)

            grads, (loss, others) = jax.grad(scaled, has_aux=True)(weights)
            weights, optimizer = self.optimizer.stateless_apply(optimizer, grads, weights)
            return {"own": loss}, (weights, others, optimizer, metrics)


def own_step() -> Any:
    net = OwnStep()
    net(np.zeros((kc.BATCH, 3), "float32"))
    amp.compile(net, small(), "mse", rule=LOW)
    return net


def normed(optimizer: Callable[[], Any] = small, **kwargs: Any) -> Any:
    net = kc.model(keras.layers.BatchNormalization())
    amp.compile(net, optimizer(), "mse", rule=LOW, metrics=["mae"], **kwargs)
    return net


def float8() -> Any:
    net = kc.model()
    net.quantize("float8")
    # The history of the gradients' sizes knows the scale: let it not move.
    amp.compile(net, small(), "mse", rule=polyamp.Static(2.0**8))
    return net


MODELS: dict[str, Callable[[], Any]] = {
    "own train step": own_step,
    "eager": lambda: normed(run_eagerly=True),
    "jit auto": lambda: normed(jit_compile="auto"),
    "accumulation": lambda: normed(lambda: small(gradient_accumulation_steps=2)),
    "clipping": lambda: normed(lambda: small(clipnorm=0.5)),
    "ema": lambda: normed(lambda: small(use_ema=True, ema_overwrite_frequency=2)),
    "float8": float8,
}


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`")
@pytest.mark.parametrize("name", MODELS)
def test_a_skip_leaves_no_trace(name: str) -> None:
    seen = []
    for data in (kc.data(TRACE), kc.clean_part(TRACE)):
        keras.utils.set_random_seed(0)
        net = MODELS[name]()
        history = kc.fit(net, data)
        inner = net.optimizer.inner_optimizer.variables
        seen.append((history, kc.values([*net.variables, *inner])))
    assert seen[0][0] == seen[1][0]
    assert kc.equal(seen[0][1], seen[1][1])
    assert all(np.isfinite(v).all() for v in seen[0][1])


def test_several_outputs_losses_and_weights() -> None:
    def make() -> Any:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((3,))
        x = keras.layers.Dense(4, dtype="mixed_float16")(inputs)
        x = keras.layers.BatchNormalization()(x)
        outputs = {name: keras.layers.Dense(1, name=name)(x) for name in ("a", "b")}
        net = keras.Model(inputs, outputs)
        amp.compile(
            net,
            small(),
            {"a": "mse", "b": "mae"},
            rule=LOW,
            loss_weights={"a": 1.0, "b": 0.5},
            metrics={"a": ["mae"]},
            weighted_metrics={"b": ["mse"]},
        )
        return net

    seen = []
    for x, y in (kc.data(TRACE), kc.clean_part(TRACE)):
        net, weights = make(), np.full(len(x), 0.5, "float32")
        history = net.fit(
            x,
            {"a": y, "b": y},
            sample_weight={"a": weights, "b": weights},
            batch_size=kc.BATCH,
            epochs=2,
            shuffle=False,
            verbose=0,
        ).history
        seen.append((history, kc.values(net.variables)))
    assert sorted(seen[0][0]) == ["a_loss", "a_mae", "b_loss", "b_mse", "loss"]
    assert seen[0][0] == seen[1][0]
    assert kc.equal(seen[0][1], seen[1][1])


def test_the_global_policy_is_seen() -> None:
    before = amp.set_policy("mixed_float16")
    try:
        net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    finally:
        assert amp.set_policy(before).name == "mixed_float16"
    amp.compile(net, "adam", "mse")
    assert type(net.optimizer) is amp.LossScaleOptimizer
    kc.fit(net, kc.data(".."))
    assert net.optimizer.state.step == 2


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_a_model_without_weights() -> None:
    net = keras.Sequential([keras.Input((3,)), keras.layers.ReLU(dtype="mixed_float16")])
    amp.compile(net, "sgd", "mse")
    ones = np.ones((4, 3), "float32")
    assert net.fit(ones, ones, verbose=0).history["loss"] == [0.0]


def test_a_schedule_counts_applied_steps() -> None:
    net = kc.model()
    rate = keras.optimizers.schedules.CosineDecay(0.1, 10)
    amp.compile(net, keras.optimizers.SGD(rate), "mse", rule=LOW)
    kc.fit(net, kc.data(".x."))
    assert int(kc.value(net.optimizer.iterations)) == 2
    now = float(keras.ops.convert_to_numpy(net.optimizer.learning_rate))  # as TensorBoard reads it
    assert now == pytest.approx(0.1 * (1 + np.cos(0.2 * np.pi)) / 2)
