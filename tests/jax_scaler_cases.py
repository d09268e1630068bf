"""A small problem in JAX, optimizers to wrap, and exact comparison of trees."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import polyamp
import polyamp.jax as amp

PARAMS = {"w": jnp.ones((4, 4)), "b": jnp.zeros(4)}
X = jnp.arange(8.0, dtype=jnp.float32).reshape(2, 4) / 7

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    "masked": lambda: optax.masked(optax.adam(1e-2), {"w": True, "b": False}),
    "partition": lambda: optax.partition(
        {"a": optax.adam(1e-2), "z": optax.set_to_zero()}, {"w": "a", "b": "z"}
    ),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "muon": lambda: optax.contrib.muon(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "schedule": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 10), momentum=0.9),
}


def loss_fn(params, x, bad=0.0):
    """Squared error of a linear map of `x + bad`.

    The gradients come out of products and sums, as a model's do: what is computed last is not
    contracted into the optimizer's arithmetic, where it would round otherwise.
    """
    return jnp.mean(((x + bad) @ params["w"] + params["b"] - 3.0) ** 2)


START = polyamp.Dynamic(init_scale=2.0**13)


@functools.cache
def scaled(name):
    """`loss_scaled` of one of `OPTIMIZERS` under `START`."""
    return amp.loss_scaled(OPTIMIZERS[name](), START)


@functools.cache
def stepper(tx, stepped):
    """(params, opt_state, bad) -> the next ones and the loss, jitted."""

    @jax.jit
    def one(params, opt_state, bad):
        loss, grads = amp.value_and_grad(loss_fn)(opt_state, params, X, bad)
        if stepped:
            return *amp.step(tx, grads, opt_state, params), loss
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return one


def run(tx, bads, stepped=True, scale=None):
    """(params, opt_state, states after each step), `bads` added to the batch."""
    one, params, opt_state, history = stepper(tx, stepped), PARAMS, tx.init(PARAMS), []
    if scale is not None:
        opt_state = optax.tree.set(opt_state, loss_scale=jnp.float32(scale))
    for bad in bads:
        params, opt_state, _ = one(params, opt_state, jnp.float32(bad))
        history.append(opt_state)
    assert one._cache_size() == 1
    return params, opt_state, history


def plain(inner, steps, whole=True):
    """(params, opt_state) without loss scaling.

    With `whole` False updates leave a conditional before they are added, as they leave `update`
    of `loss_scaled`: XLA contracts an addition to the product before it, and does not there.
    """

    def one(params, opt_state, bad):
        _, grads = jax.value_and_grad(loss_fn)(params, X, bad)
        if whole:
            updates, opt_state = inner.update(grads, opt_state, params)
        else:
            updates, opt_state = jax.lax.cond(
                bad == 0.0,
                lambda: inner.update(grads, opt_state, params),
                lambda: (jax.tree.map(jnp.zeros_like, params), opt_state),
            )
        return optax.apply_updates(params, updates), opt_state

    one = jax.jit(one)
    params, opt_state = PARAMS, inner.init(PARAMS)
    for _ in range(steps):
        params, opt_state = one(params, opt_state, jnp.float32(0.0))
    return params, opt_state


def equal(a, b):
    """Whether two trees have the same structure and the same bits."""
    first, second = jax.tree.leaves(a), jax.tree.leaves(b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.asarray(x).dtype == np.asarray(y).dtype
        and np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True)
        for x, y in zip(first, second, strict=True)
    )


def close(a, b, tolerance):
    """Whether all leaves agree within `tolerance`."""
    return all(
        np.allclose(x, y, rtol=tolerance, atol=tolerance)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
