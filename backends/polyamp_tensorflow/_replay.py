"""A rule's transition over whole sequences of signals, for the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from polyamp._scaling import Rule, bind
from polyamp._state import ScalerState, Signal
from polyamp_tensorflow._ops import xp

if TYPE_CHECKING:
    from polyamp.testing import Signals


def modes(kind: str) -> list[str]:
    """The ways in which `replay` ("transition") and `toy_train` ("training") run here."""
    return ["eager", "graph", "xla"]


def function(fn: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """`fn` as it is, in a `tf.function`, or in one under XLA."""
    if mode == "eager":
        return fn
    return tf.function(fn, jit_compile=mode == "xla", autograph=False)  # type: ignore[no-any-return]


def replay(rule: Rule, sequences: Sequence[Signals], mode: str, device: str) -> list[ScalerState]:
    """See `polyamp.Backend.replay`. In graphs it is one `tf.while_loop` over a whole sequence."""
    with tf.device(device):
        run = _driven if mode == "eager" else _looped
        over = function(lambda *columns: run(rule, columns), mode)
        found = [over(*_columns(signals)) for signals in sequences]
        return [tf.nest.map_structure(lambda a: a.numpy(), states) for states in found]


def _driven(rule: Rule, columns: Sequence[tf.Tensor]) -> ScalerState:
    step, state, states = bind(rule, xp), rule.init(xp), []
    for row in zip(*(tf.unstack(column) for column in columns), strict=True):
        state = step(state, Signal(*row))
        states.append(state)
    rows: ScalerState = tf.nest.map_structure(lambda *values: tf.stack(values), *states)
    return rows


def _looped(rule: Rule, columns: Sequence[tf.Tensor]) -> ScalerState:
    step, start, steps = bind(rule, xp), rule.init(xp), columns[0].shape[0]

    def body(number: tf.Tensor, state: Any, kept: Any) -> Any:
        new = step(state, Signal(*(column[number] for column in columns)))
        flat = tf.nest.flatten(new)
        return number + 1, new, [k.write(number, v) for k, v in zip(kept, flat, strict=True)]

    def more(number: tf.Tensor, *others: Any) -> tf.Tensor:
        return number < steps

    room = [
        tf.TensorArray(value.dtype, steps, element_shape=value.shape)
        for value in tf.nest.flatten(start)
    ]
    loop = (tf.constant(0), start, room)
    _, _, kept = tf.while_loop(more, body, loop, maximum_iterations=steps)
    rows: ScalerState = tf.nest.pack_sequence_as(start, [array.stack() for array in kept])
    return rows


def _columns(signals: Signals) -> list[tf.Tensor]:
    columns = [tf.constant(signals.finite), tf.constant(signals.loss_finite)]
    for values in (signals.amax, signals.sub):
        if values is not None:
            columns.append(tf.constant(values, tf.float32))
    return columns
