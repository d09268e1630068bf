"""A `polyamp.ScalerState` in Keras variables."""

from __future__ import annotations

from typing import Any

from keras.initializers import Constant

from polyamp._scaling import Rule
from polyamp._state import ScalerState
from polyamp._xp import host
from polyamp_keras._ops import number_in, own_tensor, read

_NAMES = {"loss_scale": "dynamic_scale", "clean": "step_counter"}
"""Names that Keras' own LossScaleOptimizer gives to two of the variables."""


def make_variables(optimizer: Any, rule: Rule) -> ScalerState:
    """One variable per field, added to `optimizer`: loss_scale f32, the others and memory i32."""
    start = rule.init(host)

    def variable(name: str, value: float) -> Any:
        return optimizer.add_variable(
            shape=(),
            dtype="float32" if name == "loss_scale" else "int32",
            initializer=Constant(value),
            aggregation="none",
            name=_NAMES.get(name, name),
        )

    head = [variable(name, getattr(start, name)) for name in ScalerState._fields[:-1]]
    memory = tuple(variable(f"memory_{i}", value) for i, value in enumerate(start.memory))
    return ScalerState._make([*head, memory])


def tensors(variables: ScalerState) -> ScalerState:
    """The state as tensors, fit for a traced transition."""
    *head, memory = variables
    return ScalerState._make([*(read(v) for v in head), tuple(read(v) for v in memory)])


def numbers(variables: ScalerState) -> ScalerState:
    """The state as Python numbers; waits for the device where the variables live on one."""
    *head, memory = variables
    values = [number_in(v) for v in (*head, *memory)]
    return ScalerState._make([*values[: len(head)], tuple(values[len(head) :])])


def write(variables: ScalerState, new: ScalerState, old: ScalerState | None = None) -> None:
    """Assign a state to the variables; only where it differs from `old`, if that is given.

    Of tensors, which may be traced, only those that are the same object are equal.
    """
    *head, memory = variables
    *values, kept = new
    known = None if old is None else [*old[:-1], *old.memory]
    for i, (v, value) in enumerate(zip((*head, *memory), (*values, *kept), strict=True)):
        if known is None or not _same(known[i], value):
            _assign(v, value)


def _same(old: Any, new: Any) -> bool:
    return old is new or (isinstance(new, int | float) and bool(old == new))


def _assign(variable: Any, value: Any) -> None:
    tensor = own_tensor(variable)
    if tensor is None:
        variable.assign(value)
    else:
        tensor.detach().fill_(value)
