"""Real training steps through the public API, for the contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from polyamp._interchange import scaler_to_dict
from polyamp._state import ScalerState
from polyamp_tensorflow._cast import cast
from polyamp_tensorflow._replay import function
from polyamp_tensorflow._scaler import LossScaler

if TYPE_CHECKING:
    from polyamp.testing import Training


def toy_train(training: Training) -> list[tuple[list[Any], ScalerState]]:
    """See `polyamp.Backend.toy_train`: in graphs, one step is one `tf.function`."""
    rule = training.rule
    with tf.device(training.device), float32_as_it_is():
        weights = [tf.Variable(w, dtype=tf.float32) for w in training.weights]
        optimizer = _optimizer(training)
        start = rule.init() if training.state is None else training.state
        scaler = LossScaler.from_dict(scaler_to_dict(rule, start))

        def step(*batch: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = _loss(weights, batch, training.dtype)
                scaled = scaler.scale(loss)
            grads = tape.gradient(scaled, weights)
            scaler.apply(optimizer, zip(grads, weights, strict=True), loss)

        run, rows = function(step, training.mode), []
        for batch in training.batches:
            run(*(tf.constant(part, tf.float32) for part in batch))
            rows.append(([w.numpy() for w in weights], scaler.state))
    return rows


@contextmanager
def float32_as_it_is() -> Iterator[None]:
    """No TensorFloat-32 in the place of float32 inside."""
    config = tf.config.experimental
    before = config.tensor_float_32_execution_enabled()
    config.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        config.enable_tensor_float_32_execution(before)


def _optimizer(training: Training) -> Any:
    if training.optimizer == "adam":
        return tf.keras.optimizers.Adam(training.learning_rate)
    from polyamp.testing import MOMENTUM

    momentum = MOMENTUM if training.optimizer == "momentum" else 0.0
    return tf.keras.optimizers.SGD(training.learning_rate, momentum)


def _loss(weights: Sequence[Any], batch: Sequence[Any], dtype: str) -> tf.Tensor:
    x, target, root, shift = batch
    values = [tf.convert_to_tensor(w) for w in weights]
    if len(values) == 1:
        out = cast(values[0], dtype)
    else:
        x, first, second = cast([x, *values], dtype)
        out = tf.nn.relu(x @ first) @ second
    wide = tf.cast(out, tf.float32)
    return tf.reduce_sum(wide * target) + tf.reduce_sum(tf.sqrt(wide * root + shift))
