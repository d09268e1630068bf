"""One real training step through the public API, for the backend contract."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from polyamp._interchange import scaler_from_dict, scaler_to_dict
from polyamp._scaling import Rule
from polyamp._state import ScalerState
from polyamp_jax._gradients import value_and_grad
from polyamp_jax._scaler import loss_scaled, step
from polyamp_jax._state import from_dict, to_dict


def toy_step(
    weights: Any, batch: Any, rule: Rule, state: ScalerState | None = None
) -> tuple[Any, ScalerState]:
    """See `polyamp.Backend.toy_step`: loss = sum(weights * batch), SGD, learning rate 1."""
    params = jnp.asarray(weights, jnp.float32)
    tx = loss_scaled(optax.sgd(1.0), rule)
    opt_state = tx.init(params)
    if state is not None:
        opt_state = from_dict(tx, opt_state, scaler_to_dict(rule, state))
    loss, grads = value_and_grad(lambda w: jnp.sum(w * jnp.asarray(batch, jnp.float32)))(
        opt_state, params
    )
    del loss  # where the batch is infinite, so is the loss: the rule is to see the gradient
    params, opt_state = step(tx, grads, opt_state, params)
    return np.asarray(params), scaler_from_dict(to_dict(tx, opt_state))[1]
