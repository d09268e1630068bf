"""A rule's transition over whole sequences of signals, for the contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from polyamp._scaling import Rule, bind
from polyamp._state import ScalerState, Signal
from polyamp_keras._ops import FRAMEWORK, compiled, to_numpy, xp

if TYPE_CHECKING:
    from polyamp.testing import Signals

_MODES = {
    "tensorflow": ["eager", "graph", "xla"],
    "jax": ["eager", "jit"],
    "torch": ["eager", "compiled"],
}


def modes(kind: str) -> list[str]:
    """The ways in which `replay` ("transition") and `toy_train` ("training") run here."""
    return _MODES[FRAMEWORK]


def function(fn: Any, mode: str) -> Any:
    """`fn` as it is, or under the compiler that `mode` names."""
    if mode == "eager":
        return fn
    if mode == "xla":
        import tensorflow as tf

        return tf.function(fn, jit_compile=True, autograph=False)
    return compiled(fn)


def replay(rule: Rule, sequences: Sequence[Signals], mode: str, device: str) -> list[ScalerState]:
    """See `polyamp.Backend.replay`. In graphs and under jit it is one `ops.scan`."""
    if FRAMEWORK == "torch":
        from polyamp_torch._replay import replay_with

        with keras.device(device):
            return replay_with(xp, rule, sequences, mode, device)
    with keras.device(device):
        if mode == "eager":
            return [_driven(rule, _columns(signals)) for signals in sequences]
        over = function(lambda columns: _scanned(rule, columns), mode)
        found = [over([ops.convert_to_tensor(c) for c in _columns(s)]) for s in sequences]
        return [keras.tree.map_structure(to_numpy, states) for states in found]


def _driven(rule: Rule, columns: Sequence[Any]) -> ScalerState:
    step, state, rows = bind(rule, xp), rule.init(xp), []
    for row in zip(*columns, strict=True):
        state = step(state, Signal(*(ops.convert_to_tensor(value) for value in row)))
        rows.append([to_numpy(value) for value in (*state[:-1], *state.memory)])
    return _state([np.stack(values) for values in zip(*rows, strict=True)])


def _scanned(rule: Rule, columns: Sequence[Any]) -> ScalerState:
    step = bind(rule, xp)

    def advance(state: Any, signal: Any) -> Any:
        new = step(_state(state), Signal(*signal))
        flat = [*new[:-1], *new.memory]
        return flat, flat

    start = rule.init(xp)
    return _state(ops.scan(advance, [*start[:-1], *start.memory], list(columns))[1])


def _state(flat: Sequence[Any]) -> ScalerState:
    head = len(ScalerState._fields) - 1
    return ScalerState._make([*flat[:head], tuple(flat[head:])])


def _columns(signals: Signals) -> list[Any]:
    columns = [np.asarray(signals.finite), np.asarray(signals.loss_finite)]
    for values in (signals.amax, signals.sub):
        if values is not None:
            columns.append(np.asarray(values, np.float32))
    return columns
