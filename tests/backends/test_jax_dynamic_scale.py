"""DynamicScale beside flax's own: the same results, and what flax gets wrong."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("jax", reason="these tests are about JAX")

import jax
import jax.numpy as jnp
import optax
from flax import serialization
from flax.training import dynamic_scale as theirs
from flax.training.train_state import TrainState
from jax_scaler_cases import PARAMS, X, close, loss_fn

import polyamp
import polyamp.jax as amp

INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


def trace(scale, flags):
    """(scale, finite steps, finite, gradient) after each step; a bad flag overflows."""

    @jax.jit
    def one(scale, factor):
        return scale.value_and_grad(lambda p: p * factor)(jnp.float32(2.0))

    rows = []
    for good in flags:
        scale, finite, loss, grad = one(scale, jnp.float32(3.0 if good else INF))
        assert float(loss) == (6.0 if good else INF)
        rows.append((float(scale.scale), int(scale.fin_steps), bool(finite), float(grad)))
    return rows


OPTIONS = [
    {},
    {"growth_interval": 3},
    {"growth_interval": 2, "growth_factor": 4.0, "backoff_factor": 0.25, "scale": 1024.0},
    {"growth_interval": 5, "minimum_scale": 64.0, "scale": 256.0},
    {"growth_interval": 1, "minimum_scale": None, "scale": 2.0**120},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_flax_and_this_one_agree_step_by_step(options):
    dice = random.Random(len(options))
    flags = [dice.random() < 0.8 for _ in range(120)]
    flags[0] = True
    ours, flax = trace(amp.DynamicScale(**options), flags), None
    with jax.numpy_dtype_promotion("standard"):
        flax = trace(theirs.DynamicScale(**options), flags)
    assert ours == flax


def test_fields_and_result_are_those_of_flax():
    ours, flax = amp.DynamicScale(), theirs.DynamicScale()
    for name in ("growth_factor", "backoff_factor", "growth_interval", "minimum_scale"):
        assert getattr(ours, name) == getattr(flax, name)
    assert (float(ours.scale), int(ours.fin_steps)) == (flax.scale, flax.fin_steps)
    found = ours.value_and_grad(lambda p: (p * 3.0, {"aux": p}), has_aux=True)(jnp.float32(2.0))
    assert found._fields == theirs.DynamicScaleResult._fields
    (loss, aux), grad = found.aux, found.grad
    assert (float(loss), float(aux["aux"]), float(grad)) == (6.0, 2.0, 3.0)
    by_position = amp.DynamicScale(2.0, 0.5, 7, 3, 128.0)
    assert (by_position.growth_interval, int(by_position.fin_steps)) == (7, 3)
    assert float(by_position.replace(scale=4.0).scale) == 4.0


def test_a_float16_loss_is_right_from_the_first_step_on():
    def loss_fn(p):
        return (p * 8.0).astype(jnp.float16)

    scale, finite, loss, grad = amp.DynamicScale().value_and_grad(loss_fn)(jnp.ones(()))
    assert (bool(finite), float(loss), float(grad)) == (True, 8.0, 8.0)
    assert (scale.scale.dtype, float(scale.scale)) == (jnp.float32, 65536.0)
    narrow = amp.DynamicScale(scale=jnp.float16(2.0**15))
    assert narrow.scale.dtype == jnp.float32


def test_float16_parameters_and_several_arguments():
    def fun(a, b, c):
        return (a * b).astype(jnp.float32).sum() * c

    found = amp.DynamicScale(scale=2.0**14).value_and_grad(fun, argnums=(0, 1))(
        jnp.full(2, 1e-4, jnp.float16), jnp.full(2, 1.0, jnp.float16), jnp.float32(1e-4)
    )
    first, second = found.grad
    assert first.dtype == second.dtype == jnp.float32
    assert first.tolist() == pytest.approx([1e-4] * 2, rel=1e-3)
    assert second.tolist() == pytest.approx([1e-8] * 2, rel=1e-3)


def test_one_compilation_and_a_carry_of_scan():
    for options in ({"growth_interval": 2}, {"rule": "megatron"}):
        start = amp.DynamicScale(**options)
        one = jax.jit(lambda s, f: s.value_and_grad(lambda p: p * f)(jnp.ones(()))[:2])
        scale, flags = start, []
        factors = [1.0, INF, 1.0, 1.0, 1.0]
        for factor in factors:
            scale, finite = one(scale, jnp.float32(factor))
            flags.append(bool(finite))
        assert one._cache_size() == 1
        last, scanned = jax.lax.scan(one, start, jnp.array(factors, jnp.float32))
        assert scanned.tolist() == flags == [True, False, True, True, True]
        assert float(last.scale) == float(scale.scale)


def test_another_rule_decides():
    rule = polyamp.Dynamic(init_scale=16.0, growth_interval=2, hysteresis=2)
    flags = [True, True, False, False, True, True, True, True]
    rows = trace(amp.DynamicScale(rule=rule), flags)
    state, want = rule.init(), []
    for flag in flags:
        state = polyamp.transition(rule, state, polyamp.Signal(flag))
        want.append((state.loss_scale, state.clean, flag))
    assert [row[:3] for row in rows] == want
    with pytest.raises(polyamp.RuleError, match="unknown rule"):
        amp.DynamicScale(rule="flaxx")


def test_checkpoints_of_flax_are_read_and_written():
    flax = theirs.DynamicScale(scale=jnp.float32(512.0), fin_steps=jnp.int32(5))
    saved = serialization.to_bytes(flax)
    ours = serialization.from_bytes(amp.DynamicScale(), saved)
    assert (float(ours.scale), int(ours.fin_steps)) == (512.0, 5)
    back = serialization.from_bytes(theirs.DynamicScale(), serialization.to_bytes(ours))
    assert (float(back.scale), int(back.fin_steps)) == (512.0, 5)
    ruled = amp.DynamicScale(rule="megatron").replace(scale=8.0)
    again = serialization.from_bytes(
        amp.DynamicScale(rule="megatron"), serialization.to_bytes(ruled)
    )
    assert float(again.scale) == 8.0
    assert int(again.state.left) == 2
    with pytest.raises(polyamp.StateError, match="expected the keys"):
        serialization.from_bytes(amp.DynamicScale(), serialization.to_bytes(ruled))


def test_flaxs_documented_training_loop():
    """The loop of flax's examples: update always, select afterwards."""

    @jax.jit
    def train(state, scale, bad):
        grad_fn = scale.value_and_grad(lambda p: loss_fn(p, X, bad))
        scale, finite, _, grads = grad_fn(state.params)
        new = state.apply_gradients(grads=grads)
        keep = lambda a, b: jax.tree.map(lambda x, y: jnp.where(finite, x, y), a, b)  # noqa: E731
        return (
            new.replace(
                params=keep(new.params, state.params),
                opt_state=keep(new.opt_state, state.opt_state),
            ),
            scale,
        )

    with jax.numpy_dtype_promotion("standard"):
        ends = []
        for make in (amp.DynamicScale, theirs.DynamicScale):
            state = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(1e-2))
            scale = make(growth_interval=2, scale=jnp.float32(1024.0))
            for bad in (0.0, NAN, 0.0, 0.0, 0.0):
                state, scale = train(state, scale, jnp.float32(bad))
            ends.append((state.params, float(scale.scale)))
    assert close(ends[0][0], ends[1][0], 1e-6)
    assert ends[0][1] == ends[1][1] == 1024.0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(ends[0][0]))


def test_shapes_and_other_leaves_pass_through():
    scale = amp.DynamicScale()
    shapes = jax.eval_shape(lambda: amp.DynamicScale())
    assert (shapes.scale.dtype, shapes.scale.shape) == (jnp.float32, ())
    assert jax.tree.map(lambda _: 0, scale).scale == 0
    assert jax.jit(lambda d: d.scale).lower(scale).compile()(scale) == 65536.0
