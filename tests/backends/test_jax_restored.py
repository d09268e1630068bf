"""States that a checkpoint library put back: what is refused, what is lifted."""

from __future__ import annotations

import pytest

pytest.importorskip("jax", reason="these tests are about JAX")

import jax
import jax.numpy as jnp
import optax

import polyamp
import polyamp.jax as amp

RULE = polyamp.Dynamic(init_scale=8.0, min_scale=2.0)
TX = amp.loss_scaled(optax.adam(1e-2), RULE)
PARAMS = jnp.ones(3)


def with_scale(scale):
    return optax.tree.set(TX.init(PARAMS), loss_scale=jnp.float32(scale))


def equal(left, right):
    return jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), left, right))


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -8.0])
def test_no_such_scale_is_taken(scale):
    state = with_scale(scale)
    for look in (amp.check, lambda state: amp.restored(TX, state)):
        with pytest.raises(polyamp.StateError, match="must be a positive finite number, got"):
            look(state)


@pytest.mark.parametrize("scale", [0.0, 0.5])
def test_a_collapsed_scale_is_lifted_to_the_floor(scale):
    state = with_scale(scale)
    with pytest.warns(UserWarning, match="is below the floor; lifted to 2"):
        found = amp.restored(TX, state)
    assert float(amp.scaler_state(found).loss_scale) == 2.0
    assert equal(found.inner_state, state.inner_state)
    assert amp.check(found) == 0


def test_a_scale_of_zero_is_pointed_out():
    with pytest.raises(polyamp.StateError, match=r"got 0\.0: .* amp\.restored\(tx, opt_state\)"):
        amp.check(with_scale(0.0))


def test_a_good_state_stays():
    state = with_scale(4.0)
    found = amp.restored(TX, state)
    assert equal(found, state)
    assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, state)


def test_a_stack_of_states_is_refused():
    states = jax.vmap(TX.init)(jnp.ones((2, 3)))
    for look in (amp.check, lambda states: amp.to_dict(TX, states)):
        with pytest.raises(polyamp.StateError, match="got a stack of them"):
            look(states)
