"""The tap: tensors as they are, which measure their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras import ops

from polyamp_keras._measure import raw, summable
from polyamp_keras._ops import FRAMEWORK


def _of_tensorflow() -> Callable[..., Any]:
    import tensorflow as tf

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def through(sink: Any, known: Any, *outputs: Any) -> Any:
        def back(*upstream: Any) -> Any:
            grads = [tf.convert_to_tensor(grad) for grad in upstream]
            return _found(known, grads), None, *grads

        return [tf.identity(out) for out in outputs], back

    found: Callable[..., Any] = through
    return found


def _of_jax() -> Callable[..., Any]:
    import jax

    @jax.custom_vjp
    def through(sink: Any, known: Any, *outputs: Any) -> Any:
        return list(outputs)

    def back(known: Any, grads: Any) -> Any:
        return _found(known, grads), ops.zeros_like(known), *grads

    through.defvjp(lambda sink, known, *outputs: (list(outputs), known), back)
    found: Callable[..., Any] = through
    return found


def _of_torch() -> Callable[..., Any]:
    import torch

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, sink: Any, known: Any, *outputs: Any) -> Any:
            ctx.known = known
            return tuple(out.clone() for out in outputs)  # views refuse to be changed in place

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return _found(ctx.known, grads), None, *grads

    found: Callable[..., Any] = Through.apply
    return found


def _found(known: Any, grads: Sequence[Any]) -> Any:
    return summable(ops.concatenate([known, raw(grads)[None]]))


_THROUGH = {"tensorflow": _of_tensorflow, "jax": _of_jax, "torch": _of_torch}[FRAMEWORK]()


def tap(sink: Any, known: Any, outputs: Sequence[Any]) -> list[Any]:
    """`outputs`, where the gradient of `sink` is `summable` of `known` and of their gradients.

    Args:
        sink: f32 (3, WIDTH), zeros.
        known: f32 (2, 8), numbers of what was measured in the forward pass.
        outputs: floating tensors.
    """
    return list(_THROUGH(sink, known, *outputs))
