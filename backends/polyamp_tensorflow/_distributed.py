"""Agreement over replicas, and doing something on all of them or on none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from polyamp._state import Signal


def reduce(signal: Signal, group: Any = None) -> Signal:
    """`signal` agreed over replicas: finite only if so on all, largest amax.

    Args:
        signal: what this replica measured, as 0-d tensors or Python values.
        group: the `tf.distribute.ReplicaContext` of the strategy in force, as
            `tf.distribute.get_replica_context()` gives it inside `strategy.run`; None means that
            there are no replicas to agree with, and leaves the signal as it is.

    Returns:
        The agreed signal as 0-d tensors. One all-reduce of a few float32: tf.distribute sums, so
        each replica fills a place of its own where the largest is wanted. `sub` is the largest
        over the replicas; a NaN amax counts as infinite.
    """
    if group is None:
        return signal
    amax = -1.0 if signal.amax is None else signal.amax
    bad = [1.0 - tf.cast(good, tf.float32) for good in (signal.finite, signal.loss_finite)]
    own = tf.stack([*bad, _number(amax), _number(signal.sub)])
    places = tf.one_hot(group.replica_id_in_sync_group, group.num_replicas_in_sync)
    table = tf.where(places[:, None] > 0.0, own, tf.zeros_like(own))
    top = tf.reduce_max(group.all_reduce(tf.distribute.ReduceOp.SUM, table), axis=0)
    return Signal(
        finite=tf.equal(top[0], 0.0),
        loss_finite=tf.equal(top[1], 0.0),
        amax=None if signal.amax is None else top[2],
        sub=top[3],
    )


def _number(value: Any) -> tf.Tensor:
    value = tf.cast(value, tf.float32)
    return tf.where(tf.math.is_nan(value), float("inf"), value)


def apply_where(
    flag: Any, update: Callable[[Sequence[Any], Any], None], grads: Sequence[Any], scale: Any
) -> None:
    """`update(grads, scale)` if `flag`, on this replica and, where there are others, on all.

    Args:
        flag: bool or 0-d bool tensor, the same on every replica. `update` may communicate.
        update: applies gradients; in a strategy with several replicas it must not use tensors that
            are not among its arguments.
        grads: gradients of this replica.
        scale: what they are to be divided by.

    Optimizers call `merge_call`, which tf.distribute forbids in a branch taken by a replica; so
    the branch is taken across the replicas and each is entered again inside it.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        _when(flag, lambda: update(grads, scale))
        return

    def across(strategy: Any, flag: Any, grads: Sequence[Any], scale: Any) -> None:
        def every() -> None:
            strategy.extended.call_for_each_replica(update, args=(grads, scale))

        _when(strategy.experimental_local_results(flag)[0], every)

    tf.distribute.get_replica_context().merge_call(across, args=(flag, grads, scale))


def _when(flag: Any, action: Callable[[], None]) -> None:
    if isinstance(flag, bool):
        if flag:
            action()
        return
    tf.cond(flag, action, _nothing)


def _nothing() -> None:
    pass
