"""value_and_grad: the loss as it is, gradients times the scale, jit's arguments by name."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax", reason="these tests are about JAX")

import jax
import jax.numpy as jnp
import optax

import polyamp
import polyamp.jax as amp

INF, NAN = float("inf"), float("nan")


@pytest.mark.usefixtures("strict_promotion")
class TestValueAndGrad:
    def state(self, scale, **options):
        return amp.loss_scaled(optax.sgd(1.0), polyamp.Static(scale), **options).init(jnp.ones(()))

    def test_a_float16_loss_stays_what_it_is(self):
        loss, grads = amp.value_and_grad(lambda p: (p * 8.0).astype(jnp.float16))(
            self.state(2.0**15), jnp.ones(())
        )
        assert (float(loss), loss.dtype, float(grads)) == (8.0, jnp.float16, 8.0 * 2.0**15)

    @pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
    @pytest.mark.parametrize("scale", [2.0**17, 3.0 * 2.0**9 + 1.0])
    def test_seeds_that_do_not_fit_the_loss(self, dtype, scale):
        loss, grads = amp.value_and_grad(lambda p: (p * 2.0).astype(dtype))(
            self.state(scale), jnp.ones(())
        )
        assert float(loss) == 2.0
        assert float(grads) == pytest.approx(2.0 * scale, rel=1e-6)

    def test_the_loss_is_finite_where_the_product_is_not(self):
        loss, grads = amp.value_and_grad(lambda p: p * 1e30)(self.state(2.0**40), jnp.ones(()))
        assert float(loss) == pytest.approx(1e30)
        assert not np.isfinite(float(grads))

    def test_aux_argnums_and_keywords(self):
        def fun(a, b, *, c):
            return a * b * c, {"sum": a + b}

        of = amp.value_and_grad(fun, argnums=(0, 1), has_aux=True)
        (loss, aux), (da, db) = of(
            self.state(4.0), jnp.float32(2), jnp.float32(3), c=jnp.float32(5)
        )
        assert (float(loss), float(aux["sum"])) == (30.0, 5.0)
        assert (float(da), float(db)) == (60.0, 40.0)

    def test_jit_counts_its_arguments(self):
        def fun(p, x, mode):
            return p["w"].sum() * x.sum() if mode == "sum" else p["w"].sum()

        params, x = {"w": jnp.ones(4)}, jnp.ones(4)
        state = self.state(2.0)
        of = jax.jit(amp.value_and_grad(fun), static_argnames="mode", donate_argnames="p")
        loss, grads = of(state, params, x, mode="sum")
        assert (float(loss), grads["w"].tolist()) == (16.0, [8.0] * 4)
        assert params["w"].is_deleted()
        assert not x.is_deleted()
        assert not state.scaler.loss_scale.is_deleted()

    def test_live_modules_with_more_than_parameters_are_refused(self):
        from flax import nnx

        rngs = nnx.Rngs(0)
        of = amp.value_and_grad(lambda m: jnp.mean(m(jnp.ones((2, 4)))))
        assert of(self.state(2.0), nnx.Linear(4, 4, rngs=rngs))[0].shape == ()
        for module in (nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)):
            with pytest.raises(TypeError, match=r"graph, params, rest = nnx\.split"):
                of(self.state(2.0), module)

    def test_wrong_losses(self):
        for fun in (lambda p: jnp.ones(2) * p, lambda p: jnp.int32(3)):
            with pytest.raises(TypeError, match="real floating scalar loss"):
                amp.value_and_grad(fun)(self.state(1.0), jnp.ones(()))
