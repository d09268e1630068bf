"""What a step costs: memory, compilations; and that the check of gradients is exact."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax", reason="these tests are about JAX")

import jax
import jax.numpy as jnp
import optax
from hypothesis import given
from hypothesis import strategies as st
from jax_scaler_cases import PARAMS, START, X, equal, loss_fn, scaled

import polyamp
import polyamp.jax as amp
from polyamp_jax import _bench, _bench_model
from polyamp_jax._inspect import all_finite

INF, NAN = float("inf"), float("nan")
MIB = 2**20


@pytest.mark.parametrize("size", [16, 128])
def test_temporary_memory_is_near_that_of_the_plain_step(size):
    plain = _bench.ways()["plain"].compiled(size)
    ours = _bench.ways()["polyamp"].compiled(size)
    extra = _bench.temporary(ours) - _bench.temporary(plain)
    assert extra <= 1.5
    aliased = ours.memory_analysis().alias_size_in_bytes
    assert aliased >= 3 * 4 * 1_863_690  # parameters and both moments are donated and reused


def test_the_model_of_the_bench():
    assert sum(leaf.size for leaf in jax.tree.leaves(_bench_model.parameters())) == 1_863_690
    x, labels = _bench_model.batch(16)
    loss = _bench_model.loss_of(_bench_model.parameters(), x, labels)
    assert 1.0 < float(loss) < 10.0


class TestOneCompilation:
    def test_with_donation_growth_and_overflow(self):
        rule = polyamp.Dynamic(init_scale=8.0, growth_interval=2)
        tx = amp.loss_scaled(optax.adam(1e-2), rule)
        traces = []

        @jax.jit
        def start():
            return PARAMS, tx.init(PARAMS)

        def train(params, opt_state, bad):
            traces.append(1)
            loss, grads = amp.value_and_grad(loss_fn)(opt_state, params, X, bad)
            return amp.step(tx, grads, opt_state, params, loss=loss)

        train = jax.jit(train, donate_argnums=(0, 1))
        params, opt_state = start()
        scales = []
        for bad in (0.0, 0.0, INF, 0.0, NAN, 0.0, 0.0):
            old = opt_state
            params, opt_state = train(params, opt_state, jnp.float32(bad))
            scales.append(float(opt_state.scaler.loss_scale))
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.inner_state))
        assert scales == [8.0, 16.0, 8.0, 8.0, 4.0, 4.0, 8.0]
        assert (len(traces), train._cache_size()) == (1, 1)

    @pytest.mark.parametrize("name", ["inject", "multi_steps", "schedule_free", "muon"])
    def test_from_the_very_first_state_on(self, name):
        tx = scaled(name)
        train = jax.jit(lambda g, s, p: amp.step(tx, g, s, p))
        params, opt_state = PARAMS, tx.init(PARAMS)
        for _ in range(3):
            params, opt_state = train(PARAMS, opt_state, params)
        assert train._cache_size() == 1

    def test_a_loaded_state_compiles_nothing_new(self):
        tx = scaled("adamw")
        train = jax.jit(lambda g, s, p: amp.step(tx, g, s, p))
        _, opt_state = train(PARAMS, tx.init(PARAMS), PARAMS)
        loaded = amp.from_dict(tx, opt_state, amp.to_dict(tx, opt_state))
        again, _ = train(PARAMS, loaded, PARAMS)
        assert train._cache_size() == 1
        assert equal(again, train(PARAMS, opt_state, PARAMS)[0])

    def test_a_float16_scale_becomes_float32(self):
        tx = amp.loss_scaled(optax.sgd(1.0), START)
        opt_state = optax.tree.set(tx.init(jnp.ones(())), loss_scale=jnp.float16(2.0**15))
        train = jax.jit(lambda *a: amp.step(tx, *a))
        with jax.numpy_dtype_promotion("strict"):
            loss, grads = amp.value_and_grad(lambda p: p * 3.0)(opt_state, jnp.ones(()))
            params, opt_state = train(grads, opt_state, jnp.ones(()))
        assert (grads.dtype, opt_state.scaler.loss_scale.dtype) == (jnp.float32, jnp.float32)
        assert (float(loss), float(params)) == (3.0, -2.0)


class TestCheck:
    numbers = st.sampled_from([0.0, -1.0, 3e38, -3e38, 1e-45, 65504.0])
    look = staticmethod(jax.jit(lambda a, b: all_finite([a, b])))

    @given(
        st.lists(numbers, min_size=24, max_size=24),
        st.lists(st.tuples(st.integers(0, 23), st.sampled_from([NAN, INF, -INF])), max_size=3),
    )
    def test_equals_isfinite_of_every_entry(self, values, faults):
        array = np.array(values, np.float32)
        for place, value in faults:
            array[place] = value
        found = self.look(array[:12].reshape(3, 4), array[12:])
        assert bool(found) is bool(np.isfinite(array).all())

    def test_infinities_that_would_cancel(self):
        assert not self.look(np.array([[INF, -INF, 1.0]], np.float32), np.ones(2, np.float32))

    def test_wide_and_complex(self):
        values = np.full((2, 2), 3e38 + 3e38j, np.complex64)
        assert self.look(values, np.full(3, 3e38, np.float32))
        values[1, 1] = complex(0.0, NAN)
        assert not self.look(values, np.ones(3, np.float32))


def test_narrow_parameters_keep_their_states_dtypes():
    params = {"w": jnp.ones((4, 4), jnp.bfloat16), "b": jnp.zeros(4, jnp.float16)}
    tx = amp.loss_scaled(optax.adam(1e-2), START)
    opt_state = tx.init(params)
    kinds = jax.tree.map(jax.typeof, (params, opt_state))
    grads = jax.tree.map(jnp.ones_like, params)
    for form in (amp.step, lambda tx, g, s, p: (p, tx.update(g, s, p)[1])):
        after = jax.jit(lambda *a, form=form: form(tx, *a))(grads, opt_state, params)
        assert jax.tree.map(jax.typeof, after) == kinds
    params, _ = amp.step(tx, grads, opt_state, params)
    assert bool((params["w"] < 1.0).all())


@pytest.mark.parametrize("grad", [8.0, 8j, np.float64(8.0), np.full((), 8.0), np.float16(8.0)])
def test_gradients_that_are_no_arrays_of_jax_are_unscaled(grad):
    tx = amp.loss_scaled(optax.sgd(1.0), polyamp.Static(8.0))
    updates, _ = tx.update(grad, tx.init(jnp.zeros(())), jnp.zeros(()))
    assert complex(updates) == -complex(grad) / 8.0
    assert jnp.result_type(updates) in (jnp.float32, jnp.complex64)


@pytest.mark.parametrize("state", [None, (), optax.sgd(1.0).init(jnp.zeros(()))])
def test_a_state_of_something_else_is_refused(state):
    tx = amp.loss_scaled(optax.sgd(1.0))
    for use in (tx.update, lambda *args: amp.step(tx, *args)):
        with pytest.raises(polyamp.StateError, match=r"need the state of tx\.init after the grad"):
            use(jnp.ones(()), state, jnp.zeros(()))
