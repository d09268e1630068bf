"""The demo's two models, written as anyone would: nothing in them knows about precision."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from polyamp.demo import Settings, Task


def residual_block(x: Any, out: int, stride: int) -> Any:
    """(n, h, w, c) -> (n, h / stride, w / stride, out): two convolutions and a way round them."""
    y = _normed(layers.Conv2D(out, 3, stride, padding="same", use_bias=False)(x))
    y = layers.Activation("relu")(y)
    y = _normed(layers.Conv2D(out, 3, padding="same", use_bias=False)(y))
    if stride != 1 or x.shape[-1] != out:
        x = _normed(layers.Conv2D(out, 1, stride, use_bias=False)(x))
    return layers.Activation("relu")(layers.Add()([x, y]))


def _normed(x: Any) -> Any:
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)


def resnet(classes: int, size: int, width: int, depth: int) -> keras.Model:
    """(n, size, size) -> logits (n, classes).

    Three stages of `depth` residual blocks, of 1, 2 and 4 times `width` channels.
    """
    images = keras.Input((size, size))
    x = layers.Reshape((size, size, 1))(images)
    x = _normed(layers.Conv2D(width, 3, padding="same", use_bias=False)(x))
    x = layers.Activation("relu")(x)
    channels = width
    for out in (width, 2 * width, 4 * width):
        for _ in range(depth):
            x = residual_block(x, out, 1 if channels == out else 2)
            channels = out
    logits = layers.Dense(classes, name="head")(layers.GlobalAveragePooling2D()(x))
    return keras.Model(images, logits)


class CausalAttention(layers.Layer):  # type: ignore[misc]
    """Causal self-attention of `heads` heads, (n, t, width) -> (n, t, width)."""

    def __init__(self, width: int, heads: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.heads, self.size = heads, width // heads
        self.qkv, self.out = layers.Dense(3 * width), layers.Dense(width)

    def build(self, shape: tuple[int, ...]) -> None:
        """Make the two projections' weights."""
        self.qkv.build(shape)
        self.out.build(shape)

    def call(self, x: Any) -> Any:
        """Attend to oneself and what came before."""
        length = x.shape[1]
        qkv = ops.reshape(self.qkv(x), (-1, length, 3, self.heads, self.size))
        q, k, v = (qkv[:, :, i] for i in range(3))
        scores = ops.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(self.size)
        future = np.triu(np.ones((length, length), bool), 1)
        weights = ops.softmax(ops.where(future, -math.inf, scores))
        attended = ops.einsum("nhqk,nkhd->nqhd", weights, v)
        return self.out(ops.reshape(attended, (-1, length, self.heads * self.size)))


class Positions(layers.Layer):  # type: ignore[misc]
    """Adds a learned vector per position, which starts as sinusoids (Vaswani et al. 2017)."""

    def build(self, shape: tuple[int, ...]) -> None:
        """Make the vectors, (t, width)."""

        def start(shape: Any, dtype: Any = None) -> Any:
            return ops.convert_to_tensor(0.1 * sinusoids(*shape), dtype=dtype)

        self.vectors = self.add_weight(shape=shape[1:], initializer=start, name="vectors")

    def call(self, x: Any) -> Any:
        """(n, t, width) -> (n, t, width)."""
        return x + self.vectors


def transformer(symbols: int, context: int, width: int, depth: int, heads: int) -> keras.Model:
    """Integers (n, context) -> logits (n, context, symbols); decoder-only, norms first."""
    text = keras.Input((context,), dtype="int32")
    small = keras.initializers.RandomNormal(stddev=0.1)
    x = Positions()(layers.Embedding(symbols, width, embeddings_initializer=small)(text))
    for _ in range(depth):
        normed = layers.LayerNormalization(epsilon=1e-5)(x)
        x = layers.Add()([x, CausalAttention(width, heads)(normed)])
        normed = layers.LayerNormalization(epsilon=1e-5)(x)
        hidden = layers.Dense(4 * width, activation="gelu")(normed)
        x = layers.Add()([x, layers.Dense(width)(hidden)])
    x = layers.LayerNormalization(epsilon=1e-5)(x)
    return keras.Model(text, layers.Dense(symbols, name="head")(x))


def sinusoids(length: int, width: int) -> Any:
    """(length, width): sine and cosine of the position at width / 2 frequencies, 1 to 1/100."""
    frequency = np.logspace(0, -2, width // 2)
    angle = np.arange(length)[:, None] * frequency
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1).astype("float32")


def build(task: Task, settings: Settings) -> keras.Model:
    """The model for `task`, built, its weights given by `settings.seed`."""
    keras.utils.set_random_seed(settings.seed)
    size = task.inputs.shape[1]
    if task.name == "digits":
        return resnet(task.classes, size, settings.width, settings.depth)
    return transformer(task.classes, size, settings.width, settings.depth, settings.heads)
