"""The selector at work in `fit`; run by test_keras_backends.py."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers as kl
from keras import ops
from keras_policy_cases import fresh as fresh
from keras_selector_cases import (
    CAN,
    JIT,
    NONE,
    SCALE,
    close,
    data,
    identity,
    trained,
    wide_model,
)

import polyamp.keras as amp
from polyamp import Capabilities, PolicyError, PolyampError, StateError, Static, Statistics
from polyamp_keras._measure import ends, raw, summable, summed
from polyamp_keras._ops import compiled, to_numpy

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("default::polyamp.SkippedStepWarning"),
]
FRAMEWORK = keras.config.backend()


class TestNumbers:
    def test_they_are_numpys(self) -> None:
        source = np.random.default_rng(0)
        x = np.ldexp(source.normal(size=2000), source.integers(-40, 10, size=2000))
        x[:7] = 0.0
        x = x.astype("float32")
        close(Statistics.from_raw(to_numpy(raw([ops.convert_to_tensor(x)])).tolist()), x)
        halves = np.clip(x, -1e3, 1e3).astype("float16")
        found = to_numpy(compiled(lambda t: raw([t]))(ops.convert_to_tensor(halves)))
        close(Statistics.from_raw(found.tolist()), halves)

    def test_nothing_hides_in_a_large_one(self) -> None:
        x = np.ones((512, 512), "float32")
        x[300, 301] = 77.0
        assert to_numpy(raw([ops.convert_to_tensor(x)]))[0] == 77.0
        x[17, 5] = np.nan
        for measure in (raw, ends):
            found = to_numpy(compiled(lambda t, m=measure: m([t]))(ops.convert_to_tensor(x)))
            assert found[2] == 512 * 512
            assert found[3] >= 1

    def test_of_nothing(self) -> None:
        assert to_numpy(raw([])).tolist() == [0.0] * 8
        assert to_numpy(raw([ops.zeros((0, 3))])).tolist() == [0.0] * 8

    def test_of_a_sum_amax_is_on_the_right_side_of_every_power_of_two(self) -> None:
        rows = [raw([ops.convert_to_tensor(np.float32(v))]) for v in (3.0, 16376.0, 12.0, 0.0)]
        total = sum(summable(row[None]) for row in rows)
        found = to_numpy(summed(total))[0]
        assert 16376.0 < found[0] < 16384.0
        assert found[2] == 4.0
        assert to_numpy(summed(summable(rows[1][None])))[0, 0] == 16376.0


def small() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8,)),
            kl.Dense(6, name="first"),
            kl.LayerNormalization(name="norm"),
            kl.Dense(1, name="last"),
        ]
    )


def measured(model: Any, **compiling: Any) -> Any:
    """The statistics of one step of `fit` in float32."""
    adaptive = amp.Adaptive(model, capabilities=NONE, every=1)
    options = {"jit_compile": JIT, **compiling}
    amp.compile(model, keras.optimizers.SGD(0.0), "mse", rule=Static(SCALE), **options)
    x, y = data(1)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[adaptive])
    return adaptive.statistics


class TestMeasured:
    @pytest.mark.parametrize("jit", [False, True] if FRAMEWORK != "torch" else [False])
    def test_what_a_step_gives_is_what_the_tensors_hold(self, jit: bool) -> None:
        model = small()
        found = measured(model, jit_compile=jit)
        assert list(found) == ["first", "norm", "last"]
        x, y = data(1)
        kernel, bias = (np.array(w) for w in model.get_layer("first").get_weights())
        hidden = to_numpy(model.get_layer("norm")(x @ kernel + bias))
        last, offset = model.get_layer("last").get_weights()
        first, head = found["first"], found["last"]
        close(first.output, x @ kernel + bias)
        assert first.inputs.amax == 1.0
        assert first.weights.amax == np.abs(kernel).max()
        assert (first.work, head.work) == (8.0, 6.0)
        gradient = 2 * (hidden @ last + offset - y) / 4 * SCALE
        close(head.gradient, gradient, rtol=1e-4)
        close(head.weight_gradient, hidden.T @ gradient, gradient.sum(0), rtol=1e-4)
        assert head.inputs.amax == pytest.approx(np.abs(hidden).max(), rel=1e-5)
        assert found["norm"].gradient.amax == pytest.approx(np.abs(gradient @ last.T).max(), 1e-4)

    def test_training_is_the_same_bit_for_bit(self) -> None:
        weights = []
        for watched in (True, False):
            model = small()
            adaptive = amp.Adaptive(model, capabilities=NONE, every=3)
            amp.compile(model, keras.optimizers.Adam(0.01), "mse", jit_compile=JIT)
            x, y = data(8)
            callbacks = [adaptive] if watched else []
            history = model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
            weights.append([*model.get_weights(), np.array(history.history["loss"])])
        for one, other in zip(*weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)

    def test_nothing_of_the_model_is_changed_afterwards(self) -> None:
        model = small()
        call, step, count = keras.Layer.__call__, model.train_step, len(model.trainable_variables)
        adaptive = trained(model, 5, every=2)
        assert keras.Layer.__call__ is call
        assert len(model.trainable_variables) == count
        assert len(model.optimizer.inner_optimizer._trainable_variables) == count
        assert "apply" not in vars(model.optimizer)
        assert type(model.train_function) is not type(adaptive._switch)
        assert "train_step" in vars(model)  # polyamp's own, which takes skips back
        assert step is not None

    def test_layers_that_hold_layers(self) -> None:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4, 8))
        y = kl.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
        y = kl.Add(name="add")([inputs, y])
        y = kl.TimeDistributed(kl.Dense(8, name="inside"), name="each")(y)
        y = kl.Bidirectional(kl.LSTM(3, name="cell"), name="both")(y)
        model = keras.Model(inputs, kl.Dense(1, name="head")(y))
        adaptive = amp.Adaptive(model, capabilities=NONE, every=1)
        amp.compile(model, "sgd", "mse", rule=Static(SCALE), jit_compile=False)
        x = np.random.default_rng(0).normal(size=(4, 4, 8)).astype("float32")
        model.fit(x, np.ones((4, 1)), verbose=0, callbacks=[adaptive])
        assert list(adaptive.statistics) == ["attention", "add", "each", "both", "head"]
        for one in adaptive.statistics.values():
            assert one.gradient.amax > 0
        assert adaptive.statistics["add"].weight_gradient is None
        assert adaptive.statistics["both"].weight_gradient.amax > 0
        work = {path: one.work for path, one in adaptive.statistics.items()}
        assert (work["attention"], work["add"], work["each"]) == (4 * 8.0, 0.0, 8.0)

    def test_a_layer_called_twice(self) -> None:
        inputs = keras.Input((8,))
        layer = identity()
        model = keras.Model(inputs, kl.Dense(1, name="head")(layer(layer(inputs) * 100.0)))
        found = measured(model)["first"]
        assert found.output.size == found.gradient.size == 64
        assert 100.0 <= found.output.amax <= 112.0  # the last number of its bucket

    def test_a_train_step_of_ones_own_must_differentiate_all(self) -> None:
        model = small()
        adaptive = amp.Adaptive(model, capabilities=NONE)
        model.compile("sgd", "mse", jit_compile=False, run_eagerly=FRAMEWORK != "jax")
        model.train_step = lambda *args: ({}, args[0]) if len(args) == 2 else {}
        x, y = data(1)
        with pytest.raises(PolyampError, match=r"no gradients of all\s+model.trainable_variables"):
            model.fit(x, y, verbose=0, callbacks=[adaptive])
        adaptive.remove()


class TestAdaptive:
    def test_16376_stays_and_16400_moves_at_once(self) -> None:
        for can, safer in ((CAN, "bfloat16"), (Capabilities(frozenset({"float16"})), "float32")):
            model = wide_model()
            adaptive = amp.Adaptive(model, capabilities=can, every=2)
            amp.compile(model, "sgd", "mse", rule=Static(SCALE), jit_compile=JIT)
            trained(model, 3, 16376.0, adaptive=adaptive)
            assert adaptive.selection.choices["first"].format == "float16"
            assert model.get_layer("first").compute_dtype == "float16"
            assert adaptive.statistics["first"].output.amax == 16376.0
            trained(model, 3, 16400.0, adaptive=adaptive)
            choice = adaptive.selection.choices["first"]
            assert (choice.format, choice.statistic) == (safer, "inputs.amax")
            assert (choice.value, choice.threshold) == (16400.0, 16384.0)
            assert model.get_layer("first").compute_dtype == safer
            assert model.get_layer("head").compute_dtype == "float32"
            assert {c.format for p, c in adaptive.selection.choices.items() if p == "second"} == {
                "float16"
            }

    def test_a_change_compiles_each_step_once_more(self) -> None:
        model = wide_model()
        adaptive = trained(model, 9)
        spy = model.get_layer("spy").seen
        before = len(spy)
        trained(model, 9, 17000.0, adaptive=adaptive)
        assert adaptive.changes == 1
        if FRAMEWORK != "torch":
            assert len(spy) - before <= 4  # both before the change, both after it
        assert adaptive.steps == 18
        assert adaptive.policy.policy_for("first").compute_dtype == "bfloat16"

    def test_it_goes_on_from_its_dict(self) -> None:
        whole, one = wide_model(), wide_model()
        expected = trained(whole, 6)
        trained(whole, 14, 17000.0, adaptive=expected)
        first = trained(one, 6)
        trained(one, 4, 17000.0, adaptive=first)
        saved = json.loads(json.dumps(first.to_dict()))
        amp.remove_policy(one)
        second = amp.Adaptive(one, capabilities=CAN, every=4)
        second.from_dict(saved)
        trained(one, 10, 17000.0, adaptive=second)
        assert second.selection == expected.selection
        assert second.to_dict() == expected.to_dict()
        with pytest.raises(StateError, match="other modules"):
            amp.Adaptive(small(), capabilities=CAN).from_dict(saved)
        half = Capabilities(frozenset({"float16"}))
        with pytest.raises(StateError, match="'first' was saved as bfloat16"):
            amp.Adaptive(wide_model(), capabilities=half).from_dict(expected.to_dict())

    @pytest.mark.skipif(FRAMEWORK == "torch", reason="Keras on torch runs one step at a time")
    def test_several_steps_an_execution(self) -> None:
        model = wide_model()
        adaptive = amp.Adaptive(model, capabilities=CAN, every=6)
        amp.compile(model, "sgd", "mse", rule=Static(SCALE), steps_per_execution=3)
        trained(model, 9, 17000.0, adaptive=adaptive)
        assert adaptive.steps == 9
        assert adaptive.selection.choices["first"].format == "bfloat16"

    def test_gradients_of_a_step_after_a_skip_are_not_judged(self) -> None:
        model = small()
        adaptive = amp.Adaptive(model, capabilities=CAN, every=4)
        amp.compile(model, "sgd", "mse", rule="auto", jit_compile=JIT)
        x, y = data(9)
        x[4 * 3] = np.inf  # step 3 is skipped; 4 is a sample
        found: list[int] = []
        decide = adaptive.decide
        adaptive.decide = lambda s, gradients: found.append(gradients) or decide(s, gradients)
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[adaptive])
        assert found == [True, False, True]

    def test_a_subclassed_model_with_a_block(self) -> None:
        class Block(kl.Layer):
            def __init__(self, **kwargs: Any) -> None:
                super().__init__(**kwargs)
                self.first, self.norm = identity(), kl.UnitNormalization(name="norm")

            def call(self, x: Any) -> Any:
                return self.norm(self.first(x))

        class Net(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.block, self.head = Block(name="block"), kl.Dense(1, name="head")

            def call(self, x: Any) -> Any:
                return self.head(self.block(x))

        model = Net()
        x, y = data(6, 1e5)
        with pytest.raises(PolyampError, match="is not built"):
            amp.Adaptive(model, capabilities=CAN)
        model(x[:4])
        adaptive = amp.Adaptive(model, capabilities=CAN, every=2)
        amp.compile(model, "sgd", "mse", rule="auto", jit_compile=JIT)
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[adaptive])
        formats = {p: c.format for p, c in adaptive.selection.choices.items()}
        assert formats["block.first"] != "float16"
        assert set(formats) == {"block.first", "block.norm", "head"}
        assert model.block.compute_dtype == model.compute_dtype == "float32"
        assert np.isfinite(model.predict(x, verbose=0)).all()

    def test_refused(self) -> None:
        model = wide_model()
        with pytest.raises(PolyampError, match="every must be a whole number"):
            amp.Adaptive(model, every=0)
        with pytest.raises(PolyampError, match=r"capabilities must be polyamp\.Capabilities"):
            amp.Adaptive(model, capabilities="fp16")
        with pytest.raises(PolyampError, match="expected a keras model"):
            amp.Adaptive(np.ones(3), capabilities=CAN)
        adaptive = amp.Adaptive(model, capabilities=CAN)
        model.compile("sgd", "mse", auto_scale_loss=False)
        x, y = data(2)
        with pytest.raises(PolicyError, match="does not scale the loss"):
            model.fit(x, y, verbose=0, callbacks=[adaptive])
        with pytest.raises(PolicyError, match="has a policy already"):
            amp.Adaptive(model, capabilities=CAN)
        other = small()
        other.compile("sgd", "mse")
        with pytest.raises(PolyampError, match="was made for the model"):
            other.fit(x, y, verbose=0, callbacks=[adaptive])

    def test_a_policy_applied_by_another_callback_is_told(self) -> None:
        model = wide_model()
        adaptive = amp.Adaptive(model, capabilities=CAN)
        amp.compile(model, "sgd", "mse", rule=Static(SCALE), jit_compile=JIT)
        change = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: amp.apply_policy(model, "float32")
        )
        x, y = data(2)
        with pytest.raises(PolicyError, match="changed by hand under Adaptive"):
            model.fit(x, y, epochs=2, verbose=0, callbacks=[adaptive, change])

    def test_max_changes(self) -> None:
        model = wide_model()
        with pytest.warns(UserWarning, match="formats were changed 1 times"):
            adaptive = trained(model, 4, 17000.0, every=1, max_changes=1)
        assert adaptive.changes == 1
