"""Small training situations for the tests of TensorFlow's LossScaler."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

import polyamp.tensorflow as amp

INF, NAN = float("inf"), float("nan")

MODES: dict[str, Callable[[Any], Any]] = {
    "eager": lambda fn: fn,
    "graph": tf.function,
    "xla": tf.function(jit_compile=True),
}


class Descent:
    """Gradient descent with learning rate 1 and nothing to remember."""

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> None:
        for grad, variable in grads_and_vars:
            if isinstance(grad, tf.IndexedSlices):
                variable.scatter_sub(grad)
            elif grad is not None:
                variable.assign_sub(tf.cast(grad, variable.dtype))


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: tf.keras.optimizers.SGD(0.125, momentum=0.5),
    "adam": lambda: tf.keras.optimizers.Adam(0.125),
    "adamw": lambda: tf.keras.optimizers.AdamW(0.125, global_clipnorm=1.0),
}


def linear_step(
    scaler: amp.LossScaler, variable: Any, optimizer: Any = None, **kwargs: Any
) -> Callable[[Any], Any]:
    """A step whose true gradient is its argument, which is of the variable's shape and dtype."""
    optimizer = Descent() if optimizer is None else optimizer

    def step(slope: Any) -> Any:
        with tf.GradientTape() as tape:
            scaled = scaler.scale(tf.reduce_sum(variable * slope))
        return scaler.apply(optimizer, [(tape.gradient(scaled, variable), variable)], **kwargs)

    return step


def given_step(
    scaler: amp.LossScaler, variables: Any, optimizer: Any = None, **kwargs: Any
) -> Callable[..., Any]:
    """A step on gradients that are given, as they came from a scaled loss."""
    optimizer = Descent() if optimizer is None else optimizer

    def step(*grads: Any) -> Any:
        return scaler.apply(optimizer, zip(grads, variables, strict=True), **kwargs)

    return step


def applied(decision: Any) -> bool:
    return bool(decision.applied)


def numbers(value: Any) -> Any:
    return np.asarray(value).tolist()


def vector(*values: Any, dtype: Any = tf.float32) -> tf.Tensor:
    return tf.constant(values, dtype)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Any:
    """How a step is run."""
    return MODES[request.param]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Neither autograph nor retracing has anything to complain of."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: "retracing" not in record.msg)  # counts functions by name
    loggers = [tf.get_logger(), logging.getLogger("absl")]
    for logger in loggers:
        logger.addHandler(handler)
    yield
    for logger in loggers:
        logger.removeHandler(handler)
    assert said == []
