"""loss_scaled and step: exact where finite, nothing moved where not, one compilation."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

pytest.importorskip("jax", reason="these tests are about JAX")

import jax
import jax.numpy as jnp
import optax
import polyamp_toy
from jax_scaler_cases import (
    OPTIMIZERS,
    PARAMS,
    START,
    X,
    close,
    equal,
    loss_fn,
    plain,
    run,
    scaled,
)

import polyamp
import polyamp.jax as amp
from polyamp_jax import inspect

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("stepped", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
class TestEveryOptimizer:
    def test_finite_steps_are_those_of_optax(self, name, stepped):
        params, state, _ = run(scaled(name), [0.0] * 6, stepped)
        want_params, want_state = plain(OPTIMIZERS[name](), 6, whole=stepped)
        assert equal(params, want_params)
        assert equal(state.inner_state, want_state)

    def test_every_power_of_two_gives_the_same_bits(self, name, stepped):
        first, *others = (run(scaled(name), [0.0] * 4, stepped, 2.0**k) for k in (-20, 0, 30))
        for params, state, _ in others:
            assert equal(params, first[0])
            assert equal(state.inner_state, first[1].inner_state)

    def test_an_overflow_is_as_if_the_batch_had_never_been(self, name, stepped):
        clean = run(scaled(name), [0.0] * 4, stepped)
        params, state, history = run(scaled(name), [0.0, INF, 0.0, NAN, 0.0, 0.0], stepped)
        assert equal(history[1].inner_state, history[0].inner_state)
        assert equal(params, clean[0])
        assert equal(state.inner_state, clean[1].inner_state)
        scales = [float(optax.tree.get(s, "loss_scale")) for s in history]
        assert scales == [2.0**13, 2.0**12, 2.0**12, 2.0**11, 2.0**11, 2.0**11]
        assert int(amp.scaler_state(state).skipped) == 2


def test_updates_of_a_skip_are_exact_zeros():
    tx = amp.loss_scaled(optax.adamw(1e-2), START)
    state = tx.init(PARAMS)
    bad = jax.tree.map(lambda p: jnp.full_like(p, INF), PARAMS)
    updates, new = tx.update(bad, state, PARAMS)
    assert equal(updates, jax.tree.map(jnp.zeros_like, PARAMS))
    assert amp.decision(state, new).applied.item() is False
    assert amp.decision(state, new).scale_used.item() == 2.0**13


def test_fifty_bad_steps_apply_none():
    params, state, _ = run(amp.loss_scaled(optax.adam(1e-2), START), [NAN] * 50)
    assert equal(params, PARAMS)
    assert int(amp.scaler_state(state).skipped_in_a_row) == 50
    good, state, _ = run(amp.loss_scaled(optax.adam(1e-2), START), [NAN] * 400 + [0.0])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(good))
    assert float(amp.scaler_state(state).loss_scale) == 2.0**-126


def test_multi_steps_inside_drops_the_bad_micro_batch_and_its_window_goes_on():
    tx = amp.loss_scaled(optax.MultiSteps(optax.sgd(1.0), 2), polyamp.Static(4.0))
    state, seen = tx.init(jnp.zeros(())), []
    for grad in (1.0, INF, 1.0, 1.0, 1.0):
        updates, state = tx.update(jnp.float32(4.0 * grad), state, jnp.zeros(()))
        seen.append(float(updates))
    assert seen == [0.0, 0.0, -1.0, 0.0, -1.0]


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("shape", [(512, 512), (100_003,)])
@pytest.mark.parametrize("mode", ["eager", "jit", "scan"])
def test_one_hidden_nan_is_found(shape, mode):
    grad = np.ones(shape, np.float32)
    grad.flat[70_001] = NAN
    if mode == "scan":
        _, flags = jax.lax.scan(
            lambda c, g: (c, inspect([g], 8.0, amax=True).finite), 0, jnp.asarray(grad)[None]
        )
        assert flags.tolist() == [False]
    else:
        look = jax.jit(inspect, static_argnames="amax") if mode == "jit" else inspect
        assert bool(look([jnp.asarray(grad)], 8.0, amax=True).finite) is False


@pytest.mark.usefixtures("strict_promotion")
def test_growth_is_on_exactly_the_nth_finite_step_and_its_gradient_is_exact():
    tx = amp.loss_scaled(optax.sgd(1.0), polyamp.Dynamic(init_scale=4.0, growth_interval=3))
    state, seen = tx.init(jnp.zeros(())), []
    for _ in range(7):
        _, grads = amp.value_and_grad(lambda p: p * 1.0)(state, jnp.zeros(()))
        updates, state = tx.update(grads, state, jnp.zeros(()))
        seen.append((float(updates), float(amp.scaler_state(state).loss_scale)))
    assert seen == [(-1.0, s) for s in (4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 16.0)]


def test_a_floor_survives_jit():
    rule = polyamp.Dynamic(init_scale=1.0, min_scale=2.0**-10)
    _, state, _ = run(amp.loss_scaled(optax.sgd(1.0), rule), [INF] * 30)
    assert float(amp.scaler_state(state).loss_scale) == 2.0**-10


@pytest.mark.usefixtures("strict_promotion")
def test_the_largest_scales_unscale_exactly():
    tx = amp.loss_scaled(optax.sgd(1.0), polyamp.Static(2.0**127))
    updates, _ = jax.jit(tx.update)(jnp.float32(2.0**100), tx.init(jnp.zeros(())))
    assert float(updates) == -(2.0**-27)


@pytest.mark.usefixtures("strict_promotion")
def test_overflow_is_judged_after_unscaling():
    tx = amp.loss_scaled(optax.sgd(1.0), polyamp.Static(1e-6))
    updates, state = jax.jit(tx.update)(jnp.float32(1e35), tx.init(jnp.zeros(())))
    assert (float(updates), int(state.scaler.skipped)) == (0.0, 1)


@pytest.mark.usefixtures("strict_promotion")
def test_the_loss_is_looked_at():
    tx = amp.loss_scaled(optax.sgd(1.0), START)
    state = tx.init(jnp.ones(()))
    params, state = amp.step(tx, jnp.float32(1.0), state, jnp.ones(()), loss=jnp.float32(NAN))
    assert float(params) == 1.0
    assert int(state.scaler.reason) == polyamp.Reason.LOSS_NOT_FINITE


@pytest.mark.usefixtures("strict_promotion")
def test_extra_is_chosen():
    tx = amp.loss_scaled(optax.sgd(1.0), START)
    state = tx.init(jnp.ones(()))
    extra = ({"mean": jnp.zeros(2), "count": 3}, {"mean": jnp.ones(2), "count": 4})
    *_, kept = jax.jit(lambda g: amp.step(tx, g, state, jnp.ones(()), extra=extra))(jnp.float32(1))
    assert (kept["mean"].tolist(), int(kept["count"])) == ([1.0, 1.0], 4)
    *_, kept = amp.step(tx, jnp.float32(INF), state, jnp.ones(()), extra=extra)
    assert (kept["mean"].tolist(), int(kept["count"])) == ([0.0, 0.0], 3)


@pytest.mark.parametrize("skip", ["cond", "select"])
def test_select_and_vmap(skip):
    tx = amp.loss_scaled(optax.adam(0.1), START, skip=skip)
    params = jnp.ones(3)
    states = jax.vmap(tx.init)(params)
    grads = jnp.array([1.0, INF, 2.0])
    new, states = jax.vmap(lambda g, s, p: amp.step(tx, g, s, p))(grads, states, params)
    assert new[1] == 1.0
    assert bool((new[jnp.array([0, 2])] < 1.0).all())
    assert states.scaler.skipped.tolist() == [0, 1, 0]


@pytest.mark.usefixtures("strict_promotion")
def test_leaves_of_every_kind():
    params = {"r": jnp.ones(2), "c": jnp.ones(2, jnp.complex64), "i": jnp.arange(2), "n": None}
    tx = amp.loss_scaled(optax.identity(), polyamp.Static(8.0))
    grads = {
        "r": jnp.full(2, 8.0, jnp.float16),
        "c": jnp.full(2, 8.0 + 16.0j, jnp.complex64),
        "i": np.zeros(2, jax.dtypes.float0),
        "n": None,
    }
    updates, state = tx.update(grads, tx.init(params), params)
    assert updates["r"].tolist() == [1.0, 1.0]
    assert updates["r"].dtype == jnp.float32
    assert updates["c"].tolist() == [1.0 + 2.0j] * 2
    assert updates["i"].dtype == jax.dtypes.float0
    bad = {**grads, "c": jnp.array([1.0, complex(0.0, INF)], jnp.complex64)}
    assert int(tx.update(bad, state, params)[1].scaler.skipped) == 1


def test_keywords_reach_the_inner_transformation():
    tx = amp.loss_scaled(optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau()), START)
    state = tx.init(PARAMS)
    loss, grads = amp.value_and_grad(loss_fn)(state, PARAMS, X)
    _, state = tx.update(grads, state, PARAMS, value=loss)
    assert float(optax.tree.get(state, "best_value")) == pytest.approx(float(loss))


class TestUnderTransformations:
    def test_scan_shapes_and_ahead_of_time(self):
        tx = amp.loss_scaled(optax.adamw(1e-2), START)

        def body(carry, bad):
            params, state = carry
            loss, grads = amp.value_and_grad(loss_fn)(state, params, X, bad)
            return amp.step(tx, grads, state, params), loss

        bads = jnp.array([0.0, INF, 0.0], jnp.float32)
        (params, state), _ = jax.lax.scan(body, (PARAMS, tx.init(PARAMS)), bads)
        want = run(tx, [0.0, INF, 0.0])
        assert equal(params, want[0])
        assert equal(state, want[1])
        shapes = jax.eval_shape(tx.init, PARAMS)
        assert jax.tree.structure(shapes) == jax.tree.structure(tx.init(PARAMS))
        compiled = jax.jit(tx.update).lower(PARAMS, shapes, PARAMS).compile()
        updates, after = compiled(PARAMS, tx.init(PARAMS), PARAMS)
        assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, tx.init(PARAMS))
        assert updates["w"].shape == (4, 4)

    def test_key_paths(self):
        state = amp.loss_scaled(optax.adam(1e-2)).init(PARAMS)
        paths = [
            jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)
        ]
        assert ".scaler.loss_scale" in paths
        assert any(path.startswith(".inner_state[0].mu") for path in paths)

    @pytest.mark.usefixtures("strict_promotion")
    @pytest.mark.parametrize("seed", range(3))
    def test_ten_thousand_steps_equal_the_hosts_and_numpys(self, seed):
        dice = random.Random(seed)
        rate = dice.uniform(0.05, 0.3)
        flags = [dice.random() > rate for _ in range(10_000)]
        name = ["torch", "megatron", "fairseq"][seed]
        rule = polyamp.Dynamic.like(name, growth_interval=7, init_scale=2.0**16)
        want = self.states_of(rule, polyamp.host, flags)
        assert self.states_of(rule, polyamp_toy.xp, flags) == want
        tx = amp.loss_scaled(optax.sgd(1.0), rule)

        def body(carry, flag):
            grads = jnp.where(flag, 1.0, jnp.inf).astype(jnp.float32)
            params, state = amp.step(tx, grads, carry[1], carry[0])
            return (params, state), state.scaler

        start, array = (jnp.zeros(()), tx.init(jnp.zeros(()))), jnp.array(flags)
        _, scanned = jax.jit(lambda f: jax.lax.scan(body, start, f))(array)
        columns = [leaf.tolist() for leaf in jax.tree.leaves(scanned)]
        assert [tuple(row) for row in zip(*columns, strict=True)] == want
        jitted, carry, rows = jax.jit(body), start, []
        for flag in np.array(flags):
            carry, scaler = jitted(carry, flag)
            rows.append(tuple(leaf.item() for leaf in jax.tree.leaves(scaler)))
        assert rows == want
        assert jitted._cache_size() == 1

    @staticmethod
    def states_of(rule, xp, flags):
        """All numbers of the state after each step, as the rule alone makes them."""
        step, state, rows = polyamp.bind(rule, xp), rule.init(xp), []
        for flag in flags:
            state = step(state, polyamp.Signal(flag if xp is polyamp.host else np.bool_(flag)))
            rows.append((float(state.loss_scale), *map(int, (*state[1:-1], *state.memory))))
        return rows


class TestSaving:
    def test_portable_state(self):
        rule = polyamp.Dynamic.like("megatron", init_scale=2.0**10)
        tx = amp.loss_scaled(optax.adam(1e-2), rule)
        _, state, _ = run(tx, [0.0, INF, 0.0])
        data = json.loads(json.dumps(amp.to_dict(tx, state)))
        back = amp.from_dict(tx, tx.init(PARAMS), data)
        assert equal(back.scaler, state.scaler)
        assert equal(back.inner_state, tx.init(PARAMS).inner_state)
        other = amp.loss_scaled(optax.adam(1e-2), "torch")
        with pytest.raises(polyamp.StateError, match=r"hysteresis=2 \(here 1\)"):
            amp.from_dict(other, other.init(PARAMS), data)

    def test_resume_equals_uninterrupted(self):
        tx = amp.loss_scaled(optax.adam(1e-2), START)
        bads = [0.0, INF, 0.0, 0.0, NAN, 0.0]
        want = run(tx, bads)
        params, state, _ = run(tx, bads[:3])
        saved = amp.to_dict(tx, state)
        restored = amp.from_dict(tx, tx.init(PARAMS)._replace(inner_state=state.inner_state), saved)
        for bad in bads[3:]:
            _, grads = amp.value_and_grad(loss_fn)(restored, params, X, jnp.float32(bad))
            params, restored = jax.jit(lambda *a: amp.step(tx, *a))(grads, restored, params)
        assert equal(restored.scaler, want[1].scaler)
        assert close(params, want[0], 1e-6)

    def test_a_torch_scaler_goes_on_here_and_another_start_is_no_other_rule(self):
        rule = polyamp.Dynamic.like("torch", init_scale=2.0**12, growth_interval=5)
        data = polyamp.scaler_to_dict(rule, rule.init()._replace(loss_scale=2.0**9, clean=3))
        tx = amp.loss_scaled(optax.sgd(1.0), polyamp.Dynamic.like("torch", growth_interval=5))
        state = amp.from_dict(tx, tx.init(PARAMS), data)
        assert (float(state.scaler.loss_scale), int(state.scaler.clean)) == (2.0**9, 3)
        with pytest.raises(polyamp.StateError, match="one loss scaler in it, found 0"):
            amp.from_dict(tx, optax.sgd(1.0).init(PARAMS), data)
        with pytest.raises(polyamp.StateError, match=r"what amp\.loss_scaled returns, got"):
            amp.to_dict(optax.sgd(1.0), state)

    def test_into_an_optimizer_of_nnx(self):
        from flax import nnx

        tx = amp.loss_scaled(optax.adam(1e-2), polyamp.Dynamic(init_scale=4.0))
        model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
        optim = nnx.Optimizer(model, tx, wrt=nnx.Param)
        saved = amp.to_dict(tx, optim.opt_state)
        saved["state"]["loss_scale"] = 8.0
        optim.opt_state = amp.from_dict(tx, optim.opt_state, saved)
        graph, params = nnx.split(model)
        of = amp.value_and_grad(lambda p: jnp.mean(nnx.merge(graph, p)(jnp.ones((1, 2)))))
        optim.update(model, of(optim.opt_state, params)[1])
        assert float(amp.scaler_state(optim.opt_state).loss_scale) == 8.0
        assert int(amp.scaler_state(optim.opt_state).step) == 1


class TestErrors:
    def test_check_warns_of_what_is_new_and_raises(self):
        rule = polyamp.Dynamic(init_scale=4.0, max_skips_in_a_row=3)
        tx = amp.loss_scaled(optax.sgd(1.0), rule)
        _, _, history = run(tx, [INF, 0.0, INF, INF, 0.0, INF, INF, INF])
        with pytest.warns(polyamp.SkippedStepWarning, match="a step was skipped"):
            assert amp.check(history[0]) == 1
        assert amp.check(history[1], told=1) == 1
        with pytest.warns(polyamp.SkippedStepWarning, match="2 steps were skipped since"):
            assert amp.check(history[4], told=1) == 3
        with pytest.raises(polyamp.ScaleFloorError, match="3 steps skipped in a row"):
            amp.check(history[-1], told=3)
        acted_on = optax.tree.set(history[-1], fault=jnp.int32(0))
        with pytest.warns(polyamp.SkippedStepWarning, match="3 steps"):
            assert amp.check(acted_on, told=3) == 6

    def test_wrong_use_is_named(self):
        inner = optax.adam(1e-2)
        with pytest.raises(polyamp.BackendError, match=r"what amp\.loss_scaled returns"):
            amp.step(inner, PARAMS, inner.init(PARAMS), PARAMS)
        with pytest.raises(polyamp.StateError, match="one loss scaler in it, found 0"):
            amp.value_and_grad(loss_fn)(inner.init(PARAMS), PARAMS, X)
        with pytest.raises(TypeError, match="loss_scaled already; once is enough"):
            amp.loss_scaled(amp.loss_scaled(inner))
        twice = optax.chain(amp.loss_scaled(inner), amp.loss_scaled(inner))
        with pytest.raises(polyamp.StateError, match="found 2"):
            amp.scaler_state(twice.init(PARAMS))
        with pytest.raises(polyamp.RuleError, match='skip must be "cond" or "select"'):
            amp.loss_scaled(inner, skip="where")
        with pytest.raises(polyamp.RuleError, match="did you mean 'torch'"):
            amp.loss_scaled(inner, "torhc")
        with pytest.raises(TypeError, match="needs an optax transformation"):
            amp.loss_scaled(0.1)
