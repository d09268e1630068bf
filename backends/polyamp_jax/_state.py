"""Reading a loss scaler's state out of an optimizer state, saving it, acting on it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyamp._errors import StateError
from polyamp._interchange import rule_to_dict, scaler_from_dict, scaler_to_dict
from polyamp._scaling import Rule, Static
from polyamp._state import Decision, ScalerState, raise_on_fault, warn_of_skips, warn_on_skip
from polyamp._state import decision as decided
from polyamp._xp import F32_MAX

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
    return value.get_value() if _is_variable(value) else value


def scale_of(opt_state: Any) -> Array:
    """The loss scale in an optimizer state: 0-d f32."""
    return jnp.asarray(scaler_state(opt_state).loss_scale, jnp.float32)


def decision(old: Any, new: Any) -> Decision:
    """What happened between two optimizer states one step apart: scale, applied, reason."""
    return decided(scaler_state(old), scaler_state(new))


def check(opt_state: Any, told: int = 0) -> int:
    """Report what happened since the last look: warn of skips, raise faults; waits for the device.

        told = 0
        for number, batch in enumerate(batches):
            params, opt_state = train_step(params, opt_state, batch)
            if number % 100 == 0:
                told = amp.check(opt_state, told)

    A fault stays in the state until it is cleared:
    `optax.tree.set(opt_state, fault=jnp.int32(0))`.

    Args:
        opt_state: of `loss_scaled`.
        told: steps known to be skipped, as the last call returned them; after a resume give
            `int(amp.scaler_state(opt_state).skipped)`.

    Returns:
        The number of steps skipped so far.

    Raises:
        ScaleFloorError: the rule gave up.
        StateError: no loss scaler in `opt_state`, or one whose scale is 0, negative, infinite or
            NaN, as no rule leaves it: the checkpoint it came from was bad (`restored`).
    """
    state = _on_host(opt_state, "check")
    skipped, scale = int(state.skipped), float(state.loss_scale)
    if not 0 < scale <= F32_MAX:
        raise StateError(
            f"loss_scale must be a positive finite number, got {scale!r}: no step leaves such a"
            " scale, so it was restored. Restore with opt_state = amp.restored(tx, opt_state),"
            " which lifts a scale of 0, or start the scaler anew with tx.init"
        )
    raise_on_fault(state)
    if skipped - told > 1:
        warn_of_skips(skipped - told, scale)
    elif skipped > told:
        warn_on_skip(max(int(state.skipped_in_a_row), 1), scale)
    return skipped


def _on_host(opt_state: Any, name: str) -> ScalerState:
    """The scaler's state in numbers of numpy; waits for the device."""
    state: ScalerState = jax.device_get(scaler_state(opt_state))
    if getattr(state.skipped, "ndim", 0):
        raise StateError(
            f"{name} needs the state of one scaler, got a stack of them (vmap, pmap): give it one,"
            " jax.tree.map(lambda leaf: leaf[0], opt_state)"
        )
    return state


def to_dict(tx: Any, opt_state: Any) -> dict[str, Any]:
    """Rule and state of the loss scaler as a JSON-ready dict; the inner state is not in it.

    Args:
        tx: what `loss_scaled` returned.
        opt_state: of `tx`; its arrays are read.
    """
    return scaler_to_dict(rule_of(tx), _on_host(opt_state, "to_dict"))


def restored(tx: Any, opt_state: Any) -> Any:
    """`opt_state` as a checkpoint library gave it back, its loss scaler checked.

        opt_state = amp.restored(tx, checkpointer.restore(path, shapes))

    orbax, flax.serialization and pickle put back whatever was saved. What `from_dict` would not
    take is refused, and a scale below the floor of the rule, as a collapsed run saves it, is lifted
    to it with a warning.

    Raises:
        StateError: the scale is negative, infinite or NaN, another number is out of range, or
            there is not one loss scaler in `opt_state`.
    """
    return from_dict(tx, opt_state, to_dict(tx, opt_state))


def from_dict(tx: Any, opt_state: Any, data: Any) -> Any:
    """`opt_state` with the loss scaler's state that `to_dict` wrote, in any framework.

    Raises:
        StateError: not such a dict, or of another rule than that of `tx` (its initial scale aside).
    """
    rule, state = scaler_from_dict(data)
    scaler_state(opt_state)
    saved, mine = rule_to_dict(rule), rule_to_dict(rule_of(tx))
    keys = [k for k in (*saved, *mine) if saved.get(k) != mine.get(k) and k != "init_scale"]
    if keys:
        shown = ", ".join(
            f"{k}={saved.get(k)!r} (here {mine.get(k)!r})" for k in dict.fromkeys(keys)
        )
        raise StateError(
            f"saved under another rule: {shown}. Make the optimizer with the saved one:"
            ' loss_scaled(..., rule=polyamp.rule_from_dict(data["rule"]))'
        )
    if not isinstance(rule, Static):
        state = state._replace(loss_scale=min(state.loss_scale, rule.max_scale))
    new = typed(state)
    return jax.tree.map(
        lambda leaf: (
            jax.tree.map(_put, leaf, new, is_leaf=_is_variable) if _is_scaler(leaf) else leaf
        ),
        opt_state,
        is_leaf=_is_scaler,
    )


def rule_of(tx: Any) -> Rule:
    """The rule of what `loss_scaled` returned.

    Raises:
        StateError: `tx` is something else.
    """
    rule = getattr(tx, "rule", None)
    if not isinstance(rule, Rule):
        raise StateError(f"expected what amp.loss_scaled returns, got {type(tx).__name__}")
    return rule


def _is_variable(value: Any) -> bool:
    return hasattr(value, "get_value")


def _put(old: Any, new: Any) -> Any:
    return old.replace(new) if _is_variable(old) else new


def typed(state: ScalerState) -> ScalerState:
    """`state`, in numbers of any type, as 0-d f32 and i32 arrays."""
    counts = ScalerState._fields[1:-1]
    head = {name: jnp.asarray(getattr(state, name), jnp.int32) for name in counts}
    memory = tuple(jnp.asarray(value, jnp.int32) for value in state.memory)
    return ScalerState(jnp.asarray(state.loss_scale, jnp.float32), **head, memory=memory)
