"""Real training steps through the public API, for the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import keras
from keras import ops

from polyamp._interchange import scaler_to_dict
from polyamp._state import ScalerState
from polyamp_keras._cast import cast
from polyamp_keras._ops import FRAMEWORK, to_numpy
from polyamp_keras._replay import function
from polyamp_keras._scaler import LossScaleOptimizer

if TYPE_CHECKING:
    from polyamp.testing import Training


def toy_train(training: Training) -> list[tuple[list[Any], ScalerState]]:
    """See `polyamp.Backend.toy_train`: compiled is a whole step, on torch its loss and backward."""
    rule = training.rule
    with keras.device(training.device), _float32_as_it_is():
        weights = [keras.Variable(w, dtype="float32") for w in training.weights]
        start = rule.init() if training.state is None else training.state
        optimizer = LossScaleOptimizer.from_dict(scaler_to_dict(rule, start), _inner(training))
        optimizer.build(weights)
        step = _stepper(training, optimizer, weights)
        rows = []
        for batch in training.batches:
            step([ops.convert_to_tensor(part, dtype="float32") for part in batch])
            rows.append(([to_numpy(w.value).copy() for w in weights], optimizer.state))
    return rows


def _stepper(training: Training, optimizer: Any, weights: list[Any]) -> Callable[[Any], None]:
    if FRAMEWORK == "jax" and training.mode != "eager":
        return _jitted(training, optimizer, weights)
    compiles_loss = FRAMEWORK == "torch" and training.mode != "eager"
    loss_of = _compiled_by_torch() if compiles_loss else _loss

    def step(batch: Any) -> None:
        def scaled(values: Any) -> Any:
            return optimizer.scale_loss(loss_of(values, batch, training.dtype))

        optimizer.apply(_gradients(scaled, weights), weights)

    return step if compiles_loss else function(step, training.mode)


def _jitted(training: Training, optimizer: Any, weights: list[Any]) -> Callable[[Any], None]:
    """Keras' way on JAX: values in, new values out."""
    import jax

    @jax.jit
    def new(values: Any, state: Any, batch: Any) -> Any:
        def scaled(values: Any) -> Any:
            loss = _loss(values, batch, training.dtype)
            return optimizer.stateless_scale_loss(state, loss)

        return optimizer.stateless_apply(state, jax.grad(scaled)(values), values)

    def step(batch: Any) -> None:
        found = new([w.value for w in weights], [v.value for v in optimizer.variables], batch)
        for variables, values in zip((weights, optimizer.variables), found, strict=True):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

    return step


def _compiled_by_torch() -> Any:
    """The loss compiled so that float16 is rounded where it is eagerly: Inductor would not."""
    import torch

    rounds: dict[str, Any] = {"emulate_precision_casts": True}
    return torch.compile(_loss, fullgraph=True, dynamic=False, options=rounds)


def _float32_as_it_is() -> Any:
    """No TensorFloat-32 in the place of float32 inside."""
    if FRAMEWORK == "jax":
        import jax

        return jax.default_matmul_precision("highest")
    if FRAMEWORK == "tensorflow":
        from polyamp_tensorflow._toy import float32_as_it_is

        return float32_as_it_is()
    return nullcontext()


def _inner(training: Training) -> Any:
    if training.optimizer == "adam":
        return keras.optimizers.Adam(training.learning_rate)
    from polyamp.testing import MOMENTUM

    momentum = MOMENTUM if training.optimizer == "momentum" else 0.0
    return keras.optimizers.SGD(training.learning_rate, momentum)


def _loss(weights: Sequence[Any], batch: Sequence[Any], dtype: str) -> Any:
    x, target, root, shift = batch
    if len(weights) == 1:
        out = cast(weights[0], dtype)
    else:
        x, first, second = cast([x, *weights], dtype)
        out = ops.matmul(ops.relu(ops.matmul(x, first)), second)
    wide = ops.cast(out, "float32")
    return ops.sum(wide * target) + ops.sum(ops.sqrt(wide * root + shift))


def _gradients(loss: Any, variables: Sequence[Any]) -> list[Any]:
    values = [variable.value for variable in variables]
    if FRAMEWORK == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = loss(values)
        return list(tape.gradient(value, values))
    if FRAMEWORK == "jax":
        import jax

        return list(jax.grad(loss)(values))
    import torch

    return list(torch.autograd.grad(loss(values), values))
