"""Models that the selector's tests measure and train; they run on any Keras backend."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers as kl
from keras_policy_cases import Spy

import polyamp.keras as amp
from polyamp import Capabilities, Static, Statistics

CAN = Capabilities()
NONE = Capabilities(frozenset())
SCALE = 2.0**10
JIT = keras.config.backend() == "jax"


def close(found: Statistics, *tensors: Any, rtol: float = 1e-5) -> None:
    """`found` is what numpy finds in the tensors together."""
    x = np.abs(np.concatenate([np.asarray(t, np.float32).ravel() for t in tensors]))
    finite = x[np.isfinite(x)]
    positive = finite[finite > 0]
    count = max(len(positive), 1)
    expected = Statistics(
        amax=finite.max(initial=0.0),
        rms=np.sqrt((finite.astype(np.float64) ** 2).mean()) if len(finite) else 0.0,
        size=len(x),
        nonfinite=1 - len(finite) / len(x),
        nonzero=len(positive) / len(x),
        sub=(positive < 2.0**-14).sum() / count,
        bad=(positive < 2.0**-20).sum() / count,
        far=(positive < finite.max(initial=0.0) * 2.0**-30).sum() / count,
    )
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-7)


def data(batches: int, top: float = 1.0, size: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """A batch of four, so many times; the largest entry of the inputs is `top`."""
    x = np.random.default_rng(3).uniform(-0.5, 0.5, size=(4, size)).astype("float32")
    x[0, 0] = 1.0
    x = np.tile(x, (batches, 1))
    return x * np.float32(top), np.tanh(x.sum(axis=1, keepdims=True))


def identity(size: int = 8, name: str = "first") -> Any:
    """A layer that gives what comes in, and does not learn."""
    return kl.Dense(size, use_bias=False, kernel_initializer="identity", trainable=False, name=name)


def wide_model() -> Any:
    """`first` gives its inputs; what follows brings them back to size."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8,)),
            identity(),
            Spy(name="spy", dtype="float32"),
            kl.UnitNormalization(name="norm"),
            kl.Dense(4, name="second"),
            kl.Dense(1, name="head"),
        ]
    )


def trained(
    model: Any, batches: int, top: float = 1.0, every: int = 4, adaptive: Any = None, **options: Any
) -> Any:
    """An Adaptive (the one given, or a new one) after so many steps of `fit` with scaling."""
    if adaptive is None:
        adaptive = amp.Adaptive(model, capabilities=CAN, every=every, **options)
        amp.compile(model, keras.optimizers.SGD(1e-3), "mse", rule=Static(SCALE), jit_compile=JIT)
    x, y = data(batches, top)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[adaptive])
    return adaptive
