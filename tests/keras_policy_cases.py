"""Small models for the tests of Keras' dtype policies; they run on any Keras backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers as kl

from polyamp_keras._places import places


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_dtype_policy("float32")


class Spy(kl.Layer):
    """Passes its input on and keeps the dtypes it came in."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        self.seen: list[str] = []

    def call(self, x: Any) -> Any:
        self.seen.append(keras.backend.standardize_dtype(x.dtype))
        return x


class Tower(keras.Model):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.enter = kl.Dense(4, activation="relu")
        self.blocks = [kl.Dense(4), kl.Dense(4)]
        self.spy = Spy()

    def call(self, x: Any) -> Any:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.spy(x)


def x(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype("float32")


def names(model: Any) -> dict[str, str]:
    """Compute dtype by path."""
    return {p.path: p.layer.compute_dtype for p in places(model)}


def run(model: Any, *inputs: np.ndarray) -> np.ndarray:
    out = model.predict(inputs[0] if len(inputs) == 1 else list(inputs), verbose=0)
    return np.asarray(out)


def mlp(text: Any = None, image: Any = None, head: Any = None) -> Any:
    """Two towers and a head; each with a policy made by hand, or Keras' global one."""
    left, right = keras.Input((3,), name="left"), keras.Input((3,), name="right")
    towers = []
    for name, tensor, policy in (("text", left, text), ("image", right, image)):
        inside = keras.Input((3,))
        y = kl.Dense(8, activation="relu", name="one", dtype=policy)(inside)
        y = Spy(name="spy", dtype=policy)(y)
        towers.append(keras.Model(inside, kl.Dense(4, name="two", dtype=policy)(y), name=name))
        towers[-1] = towers[-1](tensor)
    y = kl.Concatenate(name="both", dtype=head)(towers)
    return keras.Model([left, right], kl.Dense(2, name="head", dtype=head)(y), name="pair")
