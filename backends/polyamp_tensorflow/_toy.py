"""One real training step through the public API, for the backend contract."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from polyamp._interchange import scaler_to_dict
from polyamp._scaling import Rule
from polyamp._state import ScalerState
from polyamp_tensorflow._scaler import LossScaler


def toy_step(
    weights: Any, batch: Any, rule: Rule, state: ScalerState | None = None
) -> tuple[Any, ScalerState]:
    """See `polyamp.Backend.toy_step`: loss = sum(weights * batch), SGD, learning rate 1."""
    param = tf.Variable(weights, dtype=tf.float32)
    optimizer = tf.keras.optimizers.SGD(learning_rate=1.0)
    start = rule.init() if state is None else state
    scaler = LossScaler.from_dict(scaler_to_dict(rule, start))
    with tf.GradientTape() as tape:
        scaled = scaler.scale(tf.reduce_sum(param * tf.constant(batch, tf.float32)))
    scaler.apply(optimizer, [(tape.gradient(scaled, param), param)])
    return param.numpy(), scaler.state
