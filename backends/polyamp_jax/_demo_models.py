"""The demo's two models, written as anyone would: nothing in them knows about precision."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from polyamp.demo import Settings, Task

Array = jax.Array


class ResidualBlock(nnx.Module):
    """Two 3x3 convolutions with batch normalisation, and a way round them."""

    def __init__(self, channels: int, out: int, stride: int, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(channels, out, (3, 3), stride, use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(out, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(out, out, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(out, momentum=0.9, rngs=rngs)
        shortcut = []
        if stride != 1 or channels != out:
            shortcut = [
                nnx.Conv(channels, out, (1, 1), stride, use_bias=False, rngs=rngs),
                nnx.BatchNorm(out, momentum=0.9, rngs=rngs),
            ]
        self.shortcut = nnx.Sequential(*shortcut)

    def __call__(self, x: Array) -> Array:
        """(n, h, w, channels) -> (n, h / stride, w / stride, out)."""
        y = nnx.relu(self.norm1(self.conv1(x)))
        around = self.shortcut(x) if self.shortcut.layers else x
        return nnx.relu(self.norm2(self.conv2(y)) + around)


class ResNet(nnx.Module):
    """Three stages of `depth` residual blocks, of 1, 2 and 4 times `width` channels."""

    def __init__(self, classes: int, width: int, depth: int, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(1, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        blocks = []
        channels = width
        for out in (width, 2 * width, 4 * width):
            for _ in range(depth):
                blocks.append(ResidualBlock(channels, out, 1 if channels == out else 2, rngs))
                channels = out
        self.blocks = nnx.Sequential(*blocks)
        self.head = nnx.Linear(channels, classes, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        """(n, 8, 8) -> logits (n, classes)."""
        x = nnx.relu(self.norm(self.stem(images[..., None])))
        return self.head(self.blocks(x).mean(axis=(1, 2)))


class Layer(nnx.Module):
    """Causal self-attention and a two-layer perceptron, each after a LayerNorm."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs) -> None:
        self.heads = heads
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(width, 4 * width, rngs=rngs),
            nnx.gelu,
            nnx.Linear(4 * width, width, rngs=rngs),
        )

    def __call__(self, x: Array) -> Array:
        """(n, t, width) -> (n, t, width)."""
        n, t, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(n, t, 3, self.heads, width // self.heads)
        q, k, v = (qkv[:, :, i] for i in range(3))
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(width // self.heads)
        past = jnp.tril(jnp.ones((t, t), bool))
        weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf))
        attended = jnp.einsum("nhqk,nkhd->nqhd", weights, v)
        x = x + self.out(attended.reshape(n, t, width))
        return x + self.mlp(self.norm2(x))


class Transformer(nnx.Module):
    """Decoder-only, learned positions that start as sinusoids (Vaswani et al. 2017)."""

    def __init__(
        self, symbols: int, context: int, width: int, depth: int, heads: int, rngs: nnx.Rngs
    ) -> None:
        small = nnx.initializers.normal(0.1)
        self.symbols = nnx.Embed(symbols, width, embedding_init=small, rngs=rngs)
        self.positions = nnx.Param(0.1 * sinusoids(context, width))
        self.layers = nnx.Sequential(*(Layer(width, heads, rngs) for _ in range(depth)))
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, symbols, rngs=rngs)

    def __call__(self, text: Array) -> Array:
        """Integers (n, context) -> logits (n, context, symbols)."""
        x = self.symbols(text) + self.positions[...]
        return self.head(self.norm(self.layers(x)))


def sinusoids(length: int, width: int) -> Array:
    """(length, width): sine and cosine of the position at width / 2 frequencies, 1 to 1/100."""
    frequency = np.logspace(0, -2, width // 2)
    angle = np.arange(length)[:, None] * frequency
    return jnp.asarray(np.concatenate([np.sin(angle), np.cos(angle)], axis=1), jnp.float32)


def build(task: Task, settings: Settings) -> nnx.Module:
    """The model for `task`, float32, its weights given by `settings.seed`."""
    rngs = nnx.Rngs(settings.seed)
    if task.name == "digits":
        return ResNet(task.classes, settings.width, settings.depth, rngs)
    context = task.inputs.shape[1]
    return Transformer(task.classes, context, settings.width, settings.depth, settings.heads, rngs)
