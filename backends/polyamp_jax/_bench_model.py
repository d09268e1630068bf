"""The model of `polyamp bench jax-step`: an MLP of 1.9M parameters, and its plain training step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

WIDTHS = (784, 1024, 1024, 10)

Step = Callable[..., Any]


def parameters() -> list[dict[str, jax.Array]]:
    """Weights and biases of the MLP, f32: 1,863,690 numbers."""
    shapes = list(itertools.pairwise(WIDTHS))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [
        {"w": jax.random.normal(key, shape) * shape[0] ** -0.5, "b": jnp.zeros(shape[1])}
        for key, shape in zip(keys, shapes, strict=True)
    ]


def batch(size: int) -> tuple[jax.Array, jax.Array]:
    """Inputs, f32 (size, 784), and labels, i32 (size,)."""
    x = jax.random.normal(jax.random.key(1), (size, WIDTHS[0]))
    return x, jnp.arange(size, dtype=jnp.int32) % WIDTHS[-1]


def loss_of(params: list[dict[str, jax.Array]], x: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy, f32."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    logits = x @ params[-1]["w"] + params[-1]["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def optimizer() -> optax.GradientTransformationExtraArgs:
    """AdamW."""
    return optax.adamw(1e-3)


def plain_step(params: Any, opt_state: Any, scaler: Any, x: Any, labels: Any) -> Any:
    """(params, opt_state, scaler) after one step without loss scaling, and the loss."""
    loss, grads = jax.value_and_grad(loss_of)(params, x, labels)
    updates, opt_state = optimizer().update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, scaler, loss
