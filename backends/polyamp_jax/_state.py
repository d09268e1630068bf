"""Reading a loss scaler's state out of an optimizer state, saving it, acting on it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyamp._errors import StateError
from polyamp._interchange import scaler_from_dict, scaler_to_dict
from polyamp._state import Decision, ScalerState, raise_on_fault, warn_of_skips
from polyamp._state import decision as decided

Array = jax.Array


def scaler_state(opt_state: Any) -> ScalerState:
    """The loss scaler's state in an optimizer state of `loss_scaled`, wherever it is in there.

    Raises:
        StateError: there is none, or more than one.
    """
    found = [leaf for leaf in jax.tree.leaves(opt_state, is_leaf=_is_scaler) if _is_scaler(leaf)]
    if len(found) != 1:
        raise StateError(
            f"expected an optimizer state with one loss scaler in it, found {len(found)}: wrap the"
            " optimizer once, amp.loss_scaled(optimizer), and pass the state of its init"
        )
    return ScalerState(*(jax.tree.map(_array, field) for field in found[0]))


def _is_scaler(value: Any) -> bool:
    return isinstance(value, ScalerState)


def _array(value: Any) -> Any:
    """The array in a variable of nnx."""
    return value.get_value() if hasattr(value, "get_value") else value


def scale_of(opt_state: Any) -> Array:
    """The loss scale in an optimizer state: 0-d f32."""
    return jnp.asarray(scaler_state(opt_state).loss_scale, jnp.float32)


def decision(old: Any, new: Any) -> Decision:
    """What happened between two optimizer states one step apart: scale, applied, reason."""
    return decided(scaler_state(old), scaler_state(new))


def check(opt_state: Any) -> None:
    """Warn if the last steps were skipped, and raise faults; waits for the device.

    Raises:
        ScaleFloorError: the rule's limit is reached.
        StateError: no loss scaler in `opt_state`.
    """
    state = scaler_state(opt_state)
    if row := int(state.skipped_in_a_row):
        warn_of_skips(row, float(state.loss_scale), stacklevel=2)
    raise_on_fault(state)


def to_dict(tx: Any, opt_state: Any) -> dict[str, Any]:
    """Rule and state of the loss scaler as a JSON-ready dict; the inner state is not in it.

    Args:
        tx: what `loss_scaled` returned.
        opt_state: of `tx`; its arrays are read.
    """
    return scaler_to_dict(tx.rule, scaler_state(opt_state))


def from_dict(tx: Any, opt_state: Any, data: Any) -> Any:
    """`opt_state` with the loss scaler's state that `to_dict` wrote, in any framework.

    Raises:
        StateError: not such a dict, or of another rule than that of `tx`.
    """
    rule, state = scaler_from_dict(data)
    if rule != tx.rule:
        raise StateError(
            f"saved under the rule {rule!r}, but the optimizer has {tx.rule!r}: make it with"
            " loss_scaled(..., rule=) of the saved one"
        )
    old = scaler_state(opt_state)
    new = jax.tree.map(lambda o, n: jnp.asarray(n, jnp.asarray(o).dtype), old, state)
    return jax.tree.map(
        lambda leaf: new if _is_scaler(leaf) else leaf, opt_state, is_leaf=_is_scaler
    )
