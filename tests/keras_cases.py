"""Small training situations for the tests of the Keras backend; they run on any Keras backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

import polyamp
import polyamp.keras as amp
from polyamp_keras._ops import to_numpy
from polyamp_keras._toy import _gradients

INF, NAN = float("inf"), float("nan")
BAD = {".": 1.0, "x": INF, "n": NAN}
"""What the gradient of a step is multiplied by: clean, infinite, NaN."""


def optimizer(inner: Any = None, **kwargs: Any) -> amp.LossScaleOptimizer:
    return amp.LossScaleOptimizer(keras.optimizers.SGD(1.0) if inner is None else inner, **kwargs)


def value(variable: Any) -> np.ndarray:
    return np.array(to_numpy(variable.value))


def values(variables: Sequence[Any]) -> list[np.ndarray]:
    return [value(v) for v in variables]


def equal(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> bool:
    return len(left) == len(right) and all(map(np.array_equal, left, right))


def eager_step(opt: Any, variable: Any, slope: float = 1.0, symbol: str = ".") -> None:
    """One whole eager iteration with `slope` as the true gradient."""
    grad = _gradients(lambda w: opt.scale_loss(ops.sum(w[0] * slope)), [variable])[0]
    opt.apply([grad * BAD[symbol]], [variable])


def eager(opt: Any, variable: Any, trace: str, slope: float = 1.0) -> None:
    for symbol in trace:
        eager_step(opt, variable, slope, symbol)


def model(*layers: Any, size: int = 3) -> Any:
    """A small built regression model: mixed_float16, then `layers`, then a float32 head."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((size,)),
            keras.layers.Dense(4, dtype="mixed_float16"),
            *layers,
            keras.layers.Dense(1),
        ]
    )


BATCH = 4


def data(trace: str, size: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """One batch per symbol; "x" has an infinite input, "n" a NaN."""
    x = np.random.default_rng(1).normal(size=(len(trace) * BATCH, size)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    for i, symbol in enumerate(trace):
        if symbol != ".":
            x[i * BATCH, 0] = BAD[symbol]
    return x, y


def clean_part(trace: str) -> tuple[np.ndarray, np.ndarray]:
    """The clean batches of `data(trace)`."""
    x, y = data(trace)
    keep = np.repeat([s == "." for s in trace], BATCH)
    return x[keep], y[keep]


def fit(net: Any, xy: tuple[np.ndarray, np.ndarray], epochs: int = 1, **kwargs: Any) -> Any:
    """`net.fit` without shuffling; the history."""
    return net.fit(*xy, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **kwargs).history


def follow(rule: polyamp.Rule, trace: str) -> polyamp.ScalerState:
    """What the host makes of a trace."""
    state = rule.init()
    for symbol in trace:
        state = polyamp.transition(rule, state, polyamp.Signal(symbol == "."))
    return state


RULES: dict[str, Callable[[], polyamp.Rule]] = {
    "growing": lambda: polyamp.Dynamic(init_scale=256.0, growth_interval=2, max_scale=2.0**12),
    "tolerant": lambda: polyamp.Dynamic.like(
        "nemo", init_scale=64.0, growth_interval=3, tolerance=0.25
    ),
    "window": lambda: polyamp.Dynamic.like("metaseq", init_scale=64.0, growth_interval=2),
    "static": lambda: polyamp.Static(512.0),
}
