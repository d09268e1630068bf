"""A rule's transition over whole sequences of signals, for the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp._scaling import Rule, bind
from polyamp._state import ScalerState, Signal
from polyamp_jax._ops import devices_by_name, xp

if TYPE_CHECKING:
    from polyamp.testing import Signals


def modes(kind: str) -> list[str]:
    """The ways in which `replay` ("transition") and `toy_train` ("training") run here."""
    return ["eager", "jit", "scan"]


def replay(rule: Rule, sequences: Sequence[Signals], mode: str, device: str) -> list[ScalerState]:
    """See `polyamp.Backend.replay`. "scan" is one `lax.scan` over a whole sequence."""
    with jax.default_device(devices_by_name()[device]):
        step = bind(rule, xp)

        def advance(state: ScalerState, signal: Any) -> tuple[ScalerState, ScalerState]:
            new = step(state, Signal(*signal))
            return new, new

        over = looped(advance, mode)
        found = [over(rule.init(xp), _columns(signals)) for signals in sequences]
        return [jax.tree.map(np.asarray, states) for states in found]


def looped(advance: Any, mode: str) -> Callable[[Any, Any], Any]:
    """`advance(carry, x) -> (carry, y)` over the leading axis of a pytree: the ys, stacked."""
    if mode == "scan":
        return jax.jit(lambda carry, xs: jax.lax.scan(advance, carry, xs)[1])
    one = jax.jit(advance) if mode == "jit" else advance

    def over(carry: Any, xs: Any) -> Any:
        leaves, treedef = jax.tree.flatten(xs)
        rows = []
        for row in zip(*(list(leaf) for leaf in leaves), strict=True):
            carry, y = one(carry, jax.tree.unflatten(treedef, row))
            rows.append(y)
        return jax.tree.map(lambda *ys: np.stack(ys), *jax.device_get(rows))

    return over


def _columns(signals: Signals) -> list[Any]:
    columns = [jnp.asarray(signals.finite, bool), jnp.asarray(signals.loss_finite, bool)]
    for values in (signals.amax, signals.sub):
        if values is not None:
            columns.append(jnp.asarray(values, jnp.float32))
    return columns
