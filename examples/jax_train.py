"""Train in float16 with flax: linen and TrainState, nnx and nnx.Optimizer, nnx and plain pytrees.

    python examples/jax_train.py [STEPS]

A two-layer classifier on scikit-learn's digits, with batch normalisation. Each way skips what
overflows, statistics and step counts included.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

import polyamp.jax as amp

Array = jax.Array


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Array, train: bool = True) -> Array:
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(64)(x)))
        return nn.Dense(10)(x)


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(64, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.last = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.last(nnx.relu(self.norm(self.first(x))))


def digits() -> tuple[Array, Array]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return jnp.asarray(data.data / 16.0, jnp.float32), jnp.asarray(data.target)


def cross_entropy(logits: Array, labels: Array) -> Array:
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def optimizer() -> Any:
    return amp.loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3)))


def train_linen(steps: int, x: Array, labels: Array) -> list[float]:
    model = amp.apply_policy(Linen(), "fp16")
    variables = model.init(jax.random.key(0), x[:2])
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optimizer())

    @jax.jit
    def step(state: TrainState, stats: Any, x: Array, labels: Array) -> Any:
        def loss_of(params: Any) -> Any:
            logits, new = state.apply_fn(
                {"params": params, "batch_stats": stats}, x, mutable=["batch_stats"]
            )
            return cross_entropy(logits, labels), new["batch_stats"]

        grad_of = amp.value_and_grad(loss_of, has_aux=True)
        (loss, new), grads = grad_of(state.opt_state, state.params)
        extra = (state.step, stats), (state.step + 1, new)
        params, opt_state, (count, stats) = amp.step(
            state.tx, grads, state.opt_state, state.params, loss=loss, extra=extra
        )
        return state.replace(step=count, params=params, opt_state=opt_state), stats, loss

    stats, losses = variables["batch_stats"], []
    for batch in batches(steps, x, labels):
        state, stats, loss = step(state, stats, *batch)
        losses.append(float(loss))
    amp.check(state.opt_state)
    return losses


def train_nnx_optimizer(steps: int, x: Array, labels: Array) -> list[float]:
    model = amp.apply_policy(Nnx(nnx.Rngs(0)), "fp16")
    optim = nnx.Optimizer(model, optimizer(), wrt=nnx.Param)

    @nnx.jit
    def step(model: Nnx, optim: nnx.Optimizer, x: Array, labels: Array) -> Array:
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss_of(params: Any) -> Any:
            merged = nnx.merge(graph, params, rest, copy=True)
            return cross_entropy(merged(x), labels), nnx.state(merged, nnx.BatchStat)

        grad_of = amp.value_and_grad(loss_of, has_aux=True)
        (loss, stats), grads = grad_of(optim.opt_state, params)
        optim.update(model, grads, loss=loss)
        good = amp.scaler_state(optim.opt_state).skipped_in_a_row == 0
        kept = jax.tree.map(partial(jnp.where, good), stats, nnx.state(model, nnx.BatchStat))
        nnx.update(model, kept)
        return loss

    losses = [float(step(model, optim, *batch)) for batch in batches(steps, x, labels)]
    amp.check(optim.opt_state)
    return losses


def train_nnx_pytrees(steps: int, x: Array, labels: Array) -> list[float]:
    model = amp.apply_policy(Nnx(nnx.Rngs(0)), "fp16")
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    tx = optimizer()
    opt_state = tx.init(params)

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params: Any, rest: Any, opt_state: Any, x: Array, labels: Array) -> Any:
        def loss_of(params: Any) -> Any:
            merged = nnx.merge(graph, params, rest, copy=True)
            return cross_entropy(merged(x), labels), nnx.state(merged, nnx.Not(nnx.Param))

        (loss, new), grads = amp.value_and_grad(loss_of, has_aux=True)(opt_state, params)
        params, opt_state, kept = amp.step(
            tx, grads, opt_state, params, loss=loss, extra=(rest, new)
        )
        return params, kept, opt_state, loss

    losses = []
    for batch in batches(steps, x, labels):
        params, rest, opt_state, loss = step(params, rest, opt_state, *batch)
        losses.append(float(loss))
    amp.check(opt_state)
    return losses


def batches(steps: int, x: Array, labels: Array) -> Any:
    for i in range(steps):
        part = jax.random.randint(jax.random.key(i), (64,), 0, len(x))
        yield x[part], labels[part]


def main(steps: int = 200) -> None:
    data = digits()
    for train in (train_linen, train_nnx_optimizer, train_nnx_pytrees):
        losses = train(steps, *data)
        print(f"{train.__name__}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
