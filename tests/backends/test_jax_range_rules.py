"""loss_scaled under rules that follow the gradients' range."""

from __future__ import annotations

import math

import pytest

jax = pytest.importorskip("jax", reason="the test is about JAX")
optax = pytest.importorskip("optax", reason="the test is about optax")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import polyamp  # noqa: E402
import polyamp.jax as amp  # noqa: E402
from polyamp import DelayedScaling, LogMax, Predictive, Signal, TwoPhase  # noqa: E402

INF, NAN = math.inf, math.nan
SLOPES = [1.0, 3.5, 0.0, 2.0**-20, INF, NAN, 1e6, 0.25, INF, INF, 7.0, 7.0]
RULES = {
    "predictive": Predictive(),
    "logmax": LogMax(),
    "delayed": DelayedScaling(history=20),
    "two-phase": TwoPhase(explore_steps=5, history=10),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_states_are_the_cores_own(rule):
    tx = amp.loss_scaled(optax.sgd(2.0**-20), rule)
    params = jnp.zeros(3)
    state, want = tx.init(params), rule.init()
    jitted = jax.jit(lambda *args: amp.step(tx, *args))
    for slope in SLOPES:
        finite, used = math.isfinite(slope), want.loss_scale
        scaled = polyamp.host.c(slope * used, "f32") if finite else slope
        grads = jnp.array([0.0, 0.5, 1.0]) * (scaled if finite else 1.0)
        grads = grads if finite else grads.at[1].set(slope)
        params, state = jitted(grads, state, params)
        want = polyamp.transition(rule, want, Signal(finite, True, scaled if finite else INF))
        found = polyamp.state_to_dict(state.scaler)
        assert found == polyamp.state_to_dict(want)
    assert jitted._cache_size() == 1


def test_one_nan_among_many_is_found_beside_amax():
    tx = amp.loss_scaled(optax.sgd(1.0), "auto")
    params = jnp.zeros((512, 512))
    step = jax.jit(lambda *args: amp.step(tx, *args))
    noise = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
    for place in ((0, 0), (255, 17), (511, 511)):
        noise_with = noise.copy()
        noise_with[place] = NAN
        after, state = step(jnp.asarray(noise_with), tx.init(params), params)
        assert (int(state.scaler.skipped), float(jnp.abs(after).max())) == (1, 0.0)


def test_an_overflow_of_the_unscaled_value_alone_is_one():
    rule = Predictive(init_scale=2.0**-20)
    tx, params = amp.loss_scaled(optax.sgd(1.0), rule), jnp.zeros(2)
    after, state = amp.step(tx, jnp.array([1e35, 0.0]), tx.init(params), params)
    assert (int(state.scaler.skipped), after.tolist()) == (1, [0.0, 0.0])


def test_underflow_is_measured_on_the_steps_asked_for():
    rule = Predictive(sub_interval=2)
    tx, params = amp.loss_scaled(optax.sgd(0.0), rule), jnp.zeros(4)
    state, want = tx.init(params), rule.init()
    jitted = jax.jit(lambda *args: amp.step(tx, *args))
    for number in range(6):
        scale = want.loss_scale
        grads = jnp.array([1.0, 0.0, 2.0**-30, 2.0**-30]) * scale
        params, state = jitted(grads, state, params)
        share = polyamp.host.c(2 / 3, "f32") if number % 2 == 0 else -1.0
        want = polyamp.transition(rule, want, Signal(True, True, scale, share))
        assert polyamp.state_to_dict(state.scaler) == polyamp.state_to_dict(want)
    assert want.memory[1] == 2 * 65536 - 2 * (2 * 8 * 164)


def test_devices_of_an_axis_agree_on_the_largest():
    tx = amp.loss_scaled(optax.sgd(1.0), Predictive(sub_interval=1), axis_name="batch")
    params = jnp.zeros(2)
    state = tx.init(params)
    grads = jnp.array([[1.0, 0.0], [64.0, 0.0]]) * 4096.0
    after, new = jax.vmap(lambda g: amp.step(tx, g, state, params), axis_name="batch")(grads)
    want = polyamp.transition(tx.rule, tx.rule.init(), Signal(True, True, 64.0 * 4096.0, 0.0))
    one = jax.tree.map(lambda leaf: leaf[0], new.scaler)
    assert polyamp.state_to_dict(one) == polyamp.state_to_dict(want)
    assert after.tolist() == [[-32.5, 0.0]] * 2


def test_parts_of_a_gradient_agree_on_the_largest_without_being_averaged():
    tx = amp.loss_scaled(optax.sgd(1.0), Predictive(), agree_axis_name="model")
    params = jnp.zeros(1)
    state = tx.init(params)
    grads = jnp.array([[1.0], [64.0]]) * 4096.0
    after, new = jax.vmap(lambda g: amp.step(tx, g, state, params), axis_name="model")(grads)
    want = polyamp.transition(tx.rule, tx.rule.init(), Signal(True, True, 64.0 * 4096.0))
    one = jax.tree.map(lambda leaf: leaf[0], new.scaler)
    assert polyamp.state_to_dict(one) == polyamp.state_to_dict(want)
    assert after.tolist() == [[-1.0], [-64.0]]
