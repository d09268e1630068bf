"""Real training steps through the public API, for the contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from polyamp._interchange import scaler_from_dict, scaler_to_dict
from polyamp._state import ScalerState
from polyamp_jax._cast import cast
from polyamp_jax._gradients import value_and_grad
from polyamp_jax._ops import devices_by_name
from polyamp_jax._replay import looped
from polyamp_jax._scaler import LossScaled, loss_scaled, step
from polyamp_jax._state import from_dict, to_dict

if TYPE_CHECKING:
    from polyamp.testing import Training


def toy_train(training: Training) -> list[tuple[list[Any], ScalerState]]:
    """See `polyamp.Backend.toy_train`. "scan" is one `lax.scan` over all the steps."""
    rule = training.rule
    device = devices_by_name()[training.device]
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        tx = loss_scaled(_optimizer(training), rule)
        params = [jnp.asarray(w, jnp.float32) for w in training.weights]
        opt_state = tx.init(params)
        if training.state is not None:
            opt_state = from_dict(tx, opt_state, scaler_to_dict(rule, training.state))

        def advance(carry: Any, batch: Any) -> Any:
            params, opt_state = carry
            loss, grads = value_and_grad(_loss)(opt_state, params, batch, training.dtype)
            carry = step(tx, grads, opt_state, params, loss=loss)
            return carry, carry

        batches = [jnp.stack(parts) for parts in zip(*training.batches, strict=True)]
        rows = looped(advance, training.mode)((params, opt_state), batches)
    return [_row(tx, jax.tree.map(lambda a, i=i: a[i], rows)) for i in range(len(batches[0]))]


def _row(tx: LossScaled, carry: Any) -> tuple[list[Any], ScalerState]:
    params, opt_state = carry
    return [np.asarray(p) for p in params], scaler_from_dict(to_dict(tx, opt_state))[1]


def _optimizer(training: Training) -> Any:
    if training.optimizer == "adam":
        return optax.adam(training.learning_rate)
    from polyamp.testing import MOMENTUM

    momentum = MOMENTUM if training.optimizer == "momentum" else None
    return optax.sgd(training.learning_rate, momentum)


def _loss(weights: Sequence[Any], batch: Sequence[Any], dtype: str) -> Any:
    x, target, root, shift = batch
    if len(weights) == 1:
        out = cast(weights[0], dtype)
    else:
        x, first, second = cast([x, *weights], dtype)
        out = jax.nn.relu(x @ first) @ second
    wide = out.astype(jnp.float32)
    return jnp.sum(wide * target) + jnp.sum(jnp.sqrt(wide * root + shift))
