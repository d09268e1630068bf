"""Policies on flax.nnx modules: parameters that a call writes, and subclasses of flax's layers."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

import jax.numpy as jnp  # noqa: E402

import polyamp  # noqa: E402
from polyamp_jax._modules import apply_policy  # noqa: E402

F16, F32 = jnp.float16, jnp.float32
X = jnp.ones((2, 4))


class Writes(nnx.Module):
    """Halves a parameter in each call, one way or another."""

    def __init__(self, how):
        self.w = nnx.Param(jnp.ones(4))
        self.more = nnx.List([nnx.Param(jnp.ones(4))])
        self.how = how

    def __call__(self, x):
        half = self.w[...] / 2
        if self.how == "item":
            self.w[...] = half
        elif self.how == "part":
            self.w[0] = half[0]
        elif self.how == "value":
            self.w.set_value(half)
        elif self.how == "new":
            self.w = nnx.Param(half)
        elif self.how == "list":
            self.more[0][...] = half
        return x * self.w[...]


class TestWritten:
    @pytest.mark.parametrize("jit", [False, True])
    @pytest.mark.parametrize("how", ["item", "part", "value", "new", "list"])
    def test_a_write_that_would_be_lost_is_refused(self, how, jit):
        model = apply_policy(Writes(how), "fp16")
        run = nnx.jit(lambda m, x: m(x)) if jit else lambda m, x: m(x)
        with pytest.raises(polyamp.PolicyError, match=r"Writes\.__call__ writes a parameter"):
            run(model, X)
        assert model.w[...].tolist() == [1.0] * 4
        assert model.w.dtype == F32
        model.how = "not at all"
        assert run(model, X).dtype == F32
        model.w[...] = jnp.zeros(4)
        assert model.w[...].tolist() == [0.0] * 4

    @pytest.mark.parametrize("policy", ["float32", "16-true"])
    @pytest.mark.parametrize("how", ["item", "value", "new"])
    def test_a_parameter_in_its_own_dtype_is_written(self, how, policy):
        model = apply_policy(Writes(how), policy)
        nnx.jit(lambda m, x: m(x))(model, X)
        assert model.w[...].tolist() == [0.5] * 4


class Scaled(nnx.Linear):
    """A layer of flax with a parameter of its own, which flax knows nothing of."""

    def __init__(self, *sizes, rngs):
        super().__init__(*sizes, rngs=rngs)
        self.scale = nnx.Param(jnp.full(4, 1 + 2.0**-12))
        self.seen = nnx.data({})

    def __call__(self, x):
        self.seen["scale"], self.seen["x"] = self.scale.dtype, x.dtype
        return super().__call__(x) * self.scale


class TestSubclassesOfLayers:
    def test_parameters_of_their_own_do_not_widen(self):
        model = apply_policy(Scaled(4, 4, rngs=nnx.Rngs(0)), "mixed_float16")
        out = model(X)
        assert model.seen == {"scale": F16, "x": F16}
        assert out.dtype == F16
        plain = nnx.Linear(4, 4, dtype=F16, rngs=nnx.Rngs(0))
        assert (out == plain(X)).all()
        assert {model.scale.dtype, model.kernel.dtype} == {jnp.dtype(F32)}

    def test_a_given_dtype_wins(self):
        layer = Scaled(4, 4, rngs=nnx.Rngs(0))
        layer.dtype = F32
        with pytest.warns(UserWarning, match="wins over the policy"):
            model = apply_policy(layer, "mixed_float16")
        model(X)
        assert model.seen["scale"] == F32

    def test_gradients_are_those_of_the_parameters(self):
        model = apply_policy(Scaled(4, 4, rngs=nnx.Rngs(0)), "fp16")
        grads = nnx.grad(lambda m: m(X).sum())(model)
        assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(F32)}
