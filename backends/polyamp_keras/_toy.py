"""One real training step through the public API, for the backend contract."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from polyamp._interchange import scaler_to_dict
from polyamp._scaling import Rule
from polyamp._state import ScalerState
from polyamp_keras._ops import FRAMEWORK, to_numpy
from polyamp_keras._scaler import LossScaleOptimizer


def toy_step(
    weights: Any, batch: Any, rule: Rule, state: ScalerState | None = None
) -> tuple[Any, ScalerState]:
    """See `polyamp.Backend.toy_step`: loss = sum(weights * batch), SGD, learning rate 1."""
    variable = keras.Variable(weights, dtype="float32")
    start = rule.init() if state is None else state
    inner = keras.optimizers.SGD(1.0)
    optimizer = LossScaleOptimizer.from_dict(scaler_to_dict(rule, start), inner)
    data = ops.convert_to_tensor(batch)

    def loss(values: Any) -> Any:
        return optimizer.scale_loss(ops.sum(values * data))

    optimizer.apply([_gradient(loss, variable)], [variable])
    return to_numpy(variable.value).copy(), optimizer.state


def _gradient(loss: Any, variable: Any) -> Any:
    if FRAMEWORK == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = loss(variable.value)
        return tape.gradient(value, variable.value)
    if FRAMEWORK == "jax":
        import jax

        return jax.grad(loss)(variable.value)
    import torch

    return torch.autograd.grad(loss(variable.value), variable.value)[0]
