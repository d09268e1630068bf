"""What only JAX has: jitted stateless loops, sharded batches."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

if keras.config.backend() != "jax":
    pytest.skip("JAX's own checks", allow_module_level=True)

import jax
import jax.numpy as jnp
import keras_cases as kc

import polyamp
import polyamp.keras as amp
from polyamp_keras._inspect import inspect

pytestmark = [
    pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def jitted(opt: amp.LossScaleOptimizer, **options: Any) -> Any:
    """A jitted step with 1 as the true gradient, times `factor`."""

    def step(weights: Any, state: Any, factor: Any) -> Any:
        def loss(weights: Any) -> Any:
            return opt.stateless_scale_loss(state, jnp.sum(weights[0]))

        grads = [g * factor for g in jax.grad(loss)(weights)]
        return opt.stateless_apply(state, grads, weights)

    return jax.jit(step, **options)


def test_a_jitted_loop_scales_with_the_live_scale() -> None:
    opt = kc.optimizer(rule=polyamp.Dynamic(init_scale=4.0, growth_interval=1))
    var = keras.Variable([10.0])
    opt.build([var])
    step = jitted(opt, donate_argnums=(0, 1))
    weights, state, seen = [jnp.array([10.0])], [jnp.array(v.value) for v in opt.variables], []
    for factor in (1.0, 1.0, 1.0, kc.INF, 1.0):
        weights, state = step(weights, state, factor)
        seen.append(float(weights[0][0]))
    assert seen == [9.0, 8.0, 7.0, 7.0, 6.0]
    for variable, value in zip(opt.variables, state, strict=True):
        variable.assign(value)
    assert opt.state == polyamp.ScalerState(32.0, 0, 1, 5, 1, 0, 1, 0)


def test_a_scale_that_would_be_compiled_in_is_refused() -> None:
    opt = kc.optimizer()
    with pytest.raises(polyamp.BackendError, match="stateless_scale_loss"):
        jax.jit(opt.scale_loss)(1.0)
    assert float(jax.grad(opt.scale_loss)(1.0)) == 2.0**15
    fixed = kc.optimizer(rule=polyamp.Static(8.0))
    assert float(jax.jit(fixed.scale_loss)(1.0)) == 8.0


def test_stateful_apply_under_jit_is_refused() -> None:
    opt, var = kc.optimizer(), keras.Variable([1.0])
    opt.build([var])
    assert float(opt.scale_loss(1.0)) == 2.0**15
    with pytest.raises(polyamp.BackendError, match=r"stateless_apply\(\)"):
        jax.jit(lambda g: opt.apply([g]))(jnp.ones(1))
    assert opt.state.step == 0


def test_the_rejecting_branch_comes_first() -> None:
    opt, var = kc.optimizer(keras.optimizers.Adam(0.1)), keras.Variable([1.0] * 100)
    opt.build([var])
    state = [v.value for v in opt.variables]
    (call,) = jax.make_jaxpr(jitted(opt))([var.value], state, 1.0).jaxpr.eqns
    conds = [e for e in call.params["jaxpr"].jaxpr.eqns if e.primitive.name == "cond"]
    reject, update = max(conds, key=lambda e: len(e.outvars)).params["branches"]
    assert len(reject.jaxpr.eqns) == 0
    assert len(update.jaxpr.eqns) > 0


def test_a_shard_with_an_infinity_skips_all() -> None:
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices: XLA_FLAGS=--xla_force_host_platform_device_count=2")
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        nets = []
        for xy in (kc.data(".x."), kc.clean_part(".x.")):
            net = kc.model(keras.layers.BatchNormalization())
            amp.compile(net, keras.optimizers.Adam(0.01), "mse", rule=polyamp.Static(2.0**8))
            kc.fit(net, xy)
            nets.append(net)
        assert nets[0].optimizer.state.skipped == 1
        assert kc.equal(kc.values(nets[0].variables), kc.values(nets[1].variables))
    finally:
        keras.distribution.set_distribution(None)


@pytest.mark.parametrize("rows", [2, 32])
def test_an_infinite_sum_is_found_though_its_terms_cancel_in_another_order(rows: int) -> None:
    terms = np.zeros((rows, 16), np.float32)
    terms[:2, 0], terms[0, 1] = 3e38, -3e38

    @jax.jit
    def bias_gradient(terms: Any) -> tuple[Any, Any]:
        grad = terms.sum(axis=0)
        return grad, inspect([grad], 2.0).finite

    grad, finite = bias_gradient(terms)
    assert np.isposinf(grad[0])
    assert not finite
