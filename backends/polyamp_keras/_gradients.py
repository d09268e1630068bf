"""Gradients of a function of values, on any Keras backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyamp_keras._ops import FRAMEWORK


def value_and_gradients(
    fun: Callable[[Sequence[Any]], Any], values: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """`fun(values)`, a 0-d tensor, and its gradients; None for values that it does not depend on.

    Args:
        fun: differentiable.
        values: of variables or tensors, floating.
    """
    if FRAMEWORK == "tensorflow":
        import tensorflow as tf

        tensors = [tf.convert_to_tensor(value) for value in values]
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            result = fun(tensors)
        return result, list(tape.gradient(result, tensors))
    if FRAMEWORK == "jax":
        import jax

        result, grads = jax.value_and_grad(fun)(list(values))
        return result, list(grads)
    import torch

    with torch.enable_grad():
        result = fun(values)
    return result.detach(), list(torch.autograd.grad(result, list(values), allow_unused=True))
