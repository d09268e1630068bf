"""LossScaler on whole Keras models: the mixed-precision tutorial's loop, batch statistics."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="this is about TensorFlow")

from tensorflow_cases import INF, MODES, applied, numbers, tf

import polyamp
import polyamp.tensorflow as amp

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")
layers = tf.keras.layers


@pytest.fixture
def mixed_float16():
    """The global policy of Keras, for one test."""
    before = tf.keras.mixed_precision.dtype_policy()
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    tf.keras.mixed_precision.set_global_policy(before)


def digits(count=64):
    """Images of 8 x 8 with a bright row, whose number is the label."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, count)
    images = rng.normal(0.0, 0.1, (count, 8, 8, 1))
    images[np.arange(count), labels * 2] += 1.0
    return tf.constant(images, tf.float32), tf.constant(labels)


def cnn():
    """As TensorFlow's tutorial has it: float16 inside, a float32 softmax at the end."""
    tf.keras.utils.set_random_seed(0)
    inputs = tf.keras.Input((8, 8, 1))
    hidden = layers.Conv2D(4, 3, activation="relu")(inputs)
    hidden = layers.MaxPooling2D()(hidden)
    hidden = layers.Dense(4)(layers.Flatten()(hidden))
    outputs = layers.Activation("softmax", dtype="float32")(hidden)
    return tf.keras.Model(inputs, outputs)


def training(model, scaler, optimizer):
    """The step that a user writes."""
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
            scaled = scaler.scale(loss)
        grads = tape.gradient(scaled, model.trainable_variables)
        made = scaler.apply(optimizer, zip(grads, model.trainable_variables, strict=True), loss)
        return loss, made

    return step


class TestMixedFloat16:
    @pytest.mark.parametrize("mode", ["eager", "graph"])
    def test_a_cnn_learns(self, mixed_float16, mode):
        model, scaler = cnn(), amp.LossScaler()
        assert {w.dtype for w in model.trainable_variables} == {"float32"}
        assert model.layers[1].compute_dtype == "float16"
        step = MODES[mode](training(model, scaler, tf.keras.optimizers.Adam(0.01)))
        x, y = digits()
        losses = [float(step(x, y)[0]) for _ in range(40)]
        assert losses[-1] < 0.5 * losses[0]
        assert scaler.state.step == 40
        assert scaler.state.skipped <= 1

    def test_too_large_a_scale_comes_down_by_itself(self, mixed_float16):
        scaler = amp.LossScaler(polyamp.Dynamic(init_scale=2.0**40))
        model = cnn()
        step = MODES["graph"](training(model, scaler, tf.keras.optimizers.SGD(0.5)))
        x, y = digits()
        before = [numbers(w) for w in model.trainable_variables]
        skips = [not applied(step(x, y)[1]) for _ in range(40)]
        assert 10 < sum(skips) < 30
        assert skips == sorted(skips, reverse=True)
        assert scaler.state.loss_scale == 2.0 ** (40 - sum(skips))
        assert [numbers(w) for w in model.trainable_variables] != before

    def test_gradients_that_float16_would_lose(self, mixed_float16):
        """Of a loss times 1e-9: without scaling, what comes through the float16 layer is 0."""

        def trained(scaler):
            tf.keras.utils.set_random_seed(0)
            model = tf.keras.Sequential([tf.keras.Input((4,)), layers.Dense(2)])
            before = model.layers[0].kernel.numpy()
            optimizer = tf.keras.optimizers.SGD(1e7)

            @tf.function
            def step(x):
                with tf.GradientTape() as tape:
                    loss = 1e-9 * tf.reduce_sum(tf.cast(model(x), tf.float32))
                    scaled = scaler.scale(loss)
                pairs = zip(
                    tape.gradient(scaled, model.trainable_variables),
                    model.trainable_variables,
                    strict=True,
                )
                return scaler.apply(optimizer, pairs)

            step(tf.ones((1, 4)))
            return model.layers[0].kernel.numpy() - before

        assert not trained(amp.LossScaler(polyamp.Static(1.0))).any()
        assert trained(amp.LossScaler()) == pytest.approx(np.full((4, 2), -0.01), rel=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_batch_statistics_put_back_after_a_skip(mode):
    """The documented way."""
    model = tf.keras.Sequential(
        [tf.keras.Input((3,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)]
    )
    scaler, optimizer = amp.LossScaler("keras"), tf.keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    def step(x):
        before = [tf.identity(v) for v in model.non_trainable_variables]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
            scaled = scaler.scale(loss)
        pairs = zip(
            tape.gradient(scaled, model.trainable_variables),
            model.trainable_variables,
            strict=True,
        )
        made = scaler.apply(optimizer, pairs, loss)
        for variable, old in zip(model.non_trainable_variables, before, strict=True):
            variable.assign(tf.where(made.applied, variable, old))
        return made

    run = MODES[mode](step)
    good, bad = tf.random.stateless_normal((8, 3), (1, 2)), tf.fill((8, 3), INF)
    assert applied(run(good))
    kept = [numbers(w) for w in model.weights]
    assert kept[2] != [1.0] * 4
    assert not applied(run(bad))
    assert [numbers(w) for w in model.weights] == kept
    assert np.isfinite(model(good, training=False).numpy()).all()
    assert applied(run(good))
    assert [numbers(w) for w in model.weights] != kept


def test_importing_says_nothing_and_touches_no_device():
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "import polyamp.tensorflow, polyamp_tensorflow, tensorflow as tf\n"
        "from tensorflow.python.eager import context\n"
        "assert context._context is None or not context._context._initialized\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
