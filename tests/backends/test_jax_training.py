"""loss_scaled inside flax's training states and nnx's optimizer, saved by orbax; select."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

pytest.importorskip("jax", reason="these tests are about JAX")

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax_scaler_cases import OPTIMIZERS, PARAMS, START, X, equal, loss_fn, run, scaled

import polyamp
import polyamp.jax as amp

INF, NAN = float("inf"), float("nan")


def test_train_state_of_flax():
    tx = scaled("adamw")
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)

    @jax.jit
    def train(state, bad):
        loss, grads = amp.value_and_grad(loss_fn)(state, state.params, X, bad)
        params, opt_state, step = amp.step(
            tx, grads, state.opt_state, state.params, loss=loss, extra=(state.step, state.step + 1)
        )
        return state.replace(params=params, opt_state=opt_state, step=step)

    states = [state]
    for bad in (0.0, INF, 0.0):
        states.append(train(states[-1], jnp.float32(bad)))
    assert [int(s.step) for s in states] == [0, 1, 1, 2]
    assert equal(states[2].params, states[1].params)
    assert equal(states[3].params, run(tx, [0.0, 0.0])[0])
    assert bool(amp.decision(states[1], states[2]).applied) is False
    assert float(optax.tree.get(states[3], "loss_scale")) == 2.0**12
    plain = jax.jit(lambda s, g: s.apply_gradients(grads=g))
    scaled_grads = amp.value_and_grad(loss_fn)(state, PARAMS, X)[1]
    assert int(plain(state, scaled_grads).step) == 1


def test_optimizer_of_nnx():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(4, 4, rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(x))

    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, amp.loss_scaled(optax.adam(1e-2), START), wrt=nnx.Param)

    @nnx.jit
    def train(model, optimizer, bad):
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def of(params, rest):
            whole = nnx.merge(graph, params, rest, copy=True)
            loss = ((whole(X + bad) - 1.0) ** 2).mean()
            return loss, nnx.state(whole, nnx.Not(nnx.Param))

        (_, rest), grads = amp.value_and_grad(of, has_aux=True)(optimizer.opt_state, params, rest)
        optimizer.update(model, grads)

    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))
    train(model, optimizer, jnp.float32(INF))
    assert equal(nnx.state(model, nnx.Param), before)
    assert float(amp.scaler_state(optimizer.opt_state).loss_scale) == 2.0**12
    train(model, optimizer, jnp.float32(0.0))
    assert not equal(nnx.state(model, nnx.Param), before)
    assert int(amp.scaler_state(optimizer.opt_state).skipped) == 1


def test_random_keys_and_averages_are_kept_on_a_skip():
    tx = scaled("adamw")
    key, other = jax.random.key(1), jax.random.key(2)
    old, new = {"rng": key, "ema": jnp.zeros(3)}, {"rng": other, "ema": jnp.full(3, NAN)}

    @jax.jit
    def train(bad):
        grads = jax.tree.map(lambda p: p + bad, PARAMS)
        return amp.step(tx, grads, tx.init(PARAMS), PARAMS, extra=(old, new))[2]

    kept, taken = train(jnp.float32(INF)), train(jnp.float32(0.0))
    assert (kept["rng"], kept["ema"].tolist()) == (key, [0.0] * 3)
    assert taken["rng"] == other


@pytest.mark.parametrize("name", ["adamw", "multi_steps", "schedule"])
def test_select_gives_what_cond_gives(name):
    bads = [0.0, INF, 0.0, NAN, 0.0]
    tx = amp.loss_scaled(OPTIMIZERS[name](), START, skip="select")
    want, found = run(scaled(name), bads), run(tx, bads)
    assert equal(found[1].scaler, want[1].scaler)
    close = jax.tree.map(lambda a, b: float(abs(a - b).max()) <= 1e-6, found[0], want[0])
    assert all(jax.tree.leaves(close))
    assert equal(found[2][1].inner_state, found[2][0].inner_state)


def test_orbax_saves_and_restores(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint", reason="saves with orbax")
    tx = amp.loss_scaled(optax.adam(1e-2), polyamp.Dynamic.like("fairseq", init_scale=2.0**13))
    params, opt_state, _ = run(tx, [0.0, INF, 0.0])
    with checkpoint.StandardCheckpointer() as saver:
        saver.save(tmp_path / "at", {"params": params, "opt_state": opt_state})
        saver.wait_until_finished()
        empty = jax.eval_shape(lambda: {"params": PARAMS, "opt_state": tx.init(PARAMS)})
        found = saver.restore(tmp_path / "at", empty)
    assert equal(found["opt_state"], opt_state)
    assert equal(found["params"], params)
    assert int(found["opt_state"].scaler.skipped) == 1


def test_clipping_sees_unscaled_gradients():
    tx = amp.loss_scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), START)
    updates, state = tx.update(
        {"w": jnp.full((4, 4), 2.0**13), "b": jnp.full(4, -(2.0**13))}, tx.init(PARAMS), PARAMS
    )
    norm = float(jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(updates))))
    assert norm == pytest.approx(1.0, abs=1e-6)  # the unscaled gradients are clipped
    assert int(state.scaler.clean) == 1


@dataclass(frozen=True)
class Watching(polyamp.Static):
    """Keeps the bits of the largest gradient it was shown."""

    wants_amax = True

    def init(self, xp=polyamp.host):
        return super().init(xp)._replace(memory=(xp.c(0, "i32"),))

    def bind_change(self, xp):
        change = super().bind_change(xp)
        return lambda state, good, signal: change(state, good, signal)._replace(
            memory=(xp.bits(signal.amax),)
        )


def test_rules_that_ask_see_the_largest_scaled_gradient():
    tx = amp.loss_scaled(optax.sgd(1.0), Watching(8.0))
    grads = {"w": jnp.array([2.0, -24.0], jnp.float16), "b": jnp.ones(1)}
    params = {"w": jnp.zeros(2), "b": jnp.zeros(1)}
    params, state = jax.jit(lambda *a: amp.step(tx, *a))(grads, tx.init(params), params)
    assert int(state.scaler.memory[0]) == polyamp.host.bits(24.0)
    assert params["w"].tolist() == [-0.25, 3.0]
    scale = amp.DynamicScale(rule=Watching(8.0))
    scale, *_ = jax.jit(lambda s: s.value_and_grad(lambda p: p * -3.0)(jnp.ones(())))(scale)
    assert int(scale.state.memory[0]) == polyamp.host.bits(24.0)


def test_an_infinite_sum_is_found_though_its_terms_cancel_in_another_order():
    terms = jnp.array([[3e38, -3e38], [3e38, -3e38]])
    tx, params = amp.loss_scaled(optax.sgd(1.0), polyamp.Static(1.0)), jnp.zeros(2)

    @jax.jit
    def first_step(terms, params):
        return amp.step(tx, terms.sum(axis=0), tx.init(params), params)

    after, state = first_step(terms, params)
    assert (after.tolist(), int(state.scaler.skipped)) == ([0.0, 0.0], 1)
