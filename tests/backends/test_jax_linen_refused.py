"""Policies on linen modules: what is refused, and when; a dtype= given to a layer."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
nn = pytest.importorskip("flax.linen", reason="flax is not installed")

import jax.numpy as jnp  # noqa: E402
from jax_linen_cases import F16, F32, SEEN, Model, Tied, batch, note, variables  # noqa: E402

import polyamp  # noqa: E402
from polyamp_jax._modules import apply_policy  # noqa: E402


class TestRefused:
    def test_a_rule_without_a_module(self):
        model = apply_policy(Model(), polyamp.PolicyMap({"heat": "float32"}, default="fp16"))
        with pytest.raises(polyamp.PolicyError, match=r"no module matches 'heat' .*'head'"):
            variables(model)
        state = variables(Model())
        out = jax.eval_shape(lambda: model.apply(state, batch(), train=False))
        assert out.dtype == F32, "apply may leave out what only training calls: it refuses nothing"

    def test_a_module_met_only_in_training(self):
        rules = polyamp.PolicyMap({"Dropout_0": "float32"}, default="fp16")
        model = apply_policy(Model(), rules)
        state = variables(model)
        assert jax.eval_shape(lambda: model.apply(state, batch(), train=False)).dtype == F32

    def test_bound_or_part_of_another(self):
        model = apply_policy(Tied(), "fp16")
        ids = jnp.arange(3)
        state = model.init(jax.random.key(0), ids)
        with pytest.raises(polyamp.PolicyError, match="only its own init and apply follow"):
            model.bind(state)
        with pytest.raises(polyamp.PolicyError, match="only its own init and apply follow"):
            nn.Sequential([model]).init(jax.random.key(0), ids)
        with pytest.raises(polyamp.PolicyError, match="is bound to variables"):
            apply_policy(Tied().bind(state), "fp16")

    def test_another_family(self):
        with pytest.raises(polyamp.PolicyError, match="op:exp"):
            apply_policy(Tied(), polyamp.PolicyMap({"op:exp": "fp16"}, default="fp16"))

    def test_a_given_dtype_wins_with_a_warning(self):
        class Given(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.Dense(8, dtype=F32, name="stubborn")(x)
                note("stubborn", x)
                return nn.LayerNorm(dtype=F32)(x)

        model = apply_policy(Given(), "mixed_float16")
        with pytest.warns(UserWarning, match=r"stubborn \(float32, not float16\)\. Leave"):
            state = model.init(jax.random.key(0), batch())
        with pytest.warns(UserWarning, match="wins over the policy"):
            out = model.apply(state, batch())
        assert SEEN["stubborn"] == ("float32",)
        assert out.dtype == F16

    def test_an_error_inside_leaves_nothing_behind(self):
        class Broken(nn.Module):
            @nn.compact
            def __call__(self, x):
                raise RuntimeError("broken")

        with pytest.raises(RuntimeError, match="broken"):
            apply_policy(Broken(), "fp16").init(jax.random.key(0), batch())
        out = nn.Dense(2).init_with_output(jax.random.key(0), batch())[0]
        assert out.dtype == F32
