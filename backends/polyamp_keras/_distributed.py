"""Agreement over replicas: every one must take the same decision at the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import ops

from polyamp._state import Signal
from polyamp_keras._ops import FRAMEWORK


def reduce(signal: Signal, group: Any = None) -> Signal:
    """`signal` agreed over replicas: finite only if so on all, largest amax and sub.

    Args:
        signal: what this replica measured, as 0-d tensors or Python values.
        group: who has to agree. On TensorFlow a `tf.distribute.ReplicaContext`, on JAX the name
            (or names) of a mapped axis, on torch a process group. None: nobody, and the signal
            stays as it is.

    Returns:
        The agreed signal as 0-d tensors.
    """
    if group is None:
        return signal
    if FRAMEWORK == "torch":
        from polyamp_torch._distributed import reduce as torch_reduce

        return torch_reduce(signal, group)
    if FRAMEWORK == "tensorflow":
        from polyamp_tensorflow._distributed import reduce as tensorflow_reduce

        return tensorflow_reduce(signal, group)
    absent = signal.amax is None
    flags = [ops.logical_not(ops.cast(f, "bool")) for f in (signal.finite, signal.loss_finite)]
    rest = [] if absent else [_number(signal.amax), _number(signal.sub)]
    bad, lost, *measured = _largest([ops.cast(f, "float32") for f in flags] + rest, group)
    amax, sub = measured if measured else (None, signal.sub)
    return Signal(bad == 0, lost == 0, amax, sub)


def _number(value: Any) -> Any:
    return ops.cast(value, "float32")


def _largest(values: list[Any], axis: Any) -> list[Any]:
    import jax

    return list(jax.lax.pmax(values, axis))  # type: ignore[no-untyped-call]


def replica_context() -> Any:
    """TensorFlow's replica context where several replicas train together, else None.

    Raises:
        ValueError: called in a cross-replica context, as Keras' optimizers do.
    """
    if FRAMEWORK != "tensorflow":
        return None
    import tensorflow as tf

    if not tf.distribute.has_strategy():
        return None
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "apply() must be called in a replica context: run the training step with strategy.run()"
        )
    context = tf.distribute.get_replica_context()
    return context if context.num_replicas_in_sync > 1 else None


def cross_replica(context: Any, fn: Callable[..., Any], *args: Any) -> None:
    """Call `fn(distribution, *args)` once for all replicas, with each argument's local values.

    Where TensorFlow does without merge calls (only GPUs, under XLA) `fn` runs on each replica, with
    None for the distribution.
    """
    import tensorflow as tf

    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        fn(None, *args)
    else:
        context.merge_call(fn, args=args)


def first_local(distribution: Any, value: Any) -> Any:
    """A replica's value of something that is the same on all replicas."""
    return value if distribution is None else distribution.experimental_local_results(value)[0]
