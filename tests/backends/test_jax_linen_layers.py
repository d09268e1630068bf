"""Policies on flax.linen modules: init and apply alike, and subclasses of flax's layers."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
nn = pytest.importorskip("flax.linen", reason="flax is not installed")

import jax.numpy as jnp  # noqa: E402

import polyamp  # noqa: E402
from polyamp_jax._modules import apply_policy  # noqa: E402

F16, F32 = jnp.float16, jnp.float32
X = jnp.ones((2, 4))


class Gate(nn.Module):
    """Parameters of its own, and an input that a float32 module made."""

    @nn.compact
    def __call__(self, x):
        seen.append(x.dtype)
        cache = self.variable("cache", "last", jnp.zeros, x.shape, x.dtype)
        cache.value = x
        return x * self.param("w", nn.initializers.ones, (4,))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Gate(name="gate")(nn.Dense(4, name="wide")(x).astype(F32))


seen: list = []


def test_init_casts_what_apply_casts():
    seen.clear()
    rules = polyamp.PolicyMap({"wide": "float32"}, default="mixed_float16")
    model = apply_policy(Model(), rules)
    variables = model.init(jax.random.key(0), X)
    out, new = model.apply(variables, X, mutable=["cache"])
    assert seen == [F32, F16, F16]
    assert out.dtype == F16
    before, after = variables["cache"]["gate"]["last"], new["cache"]["gate"]["last"]
    assert before.dtype == after.dtype == F16
    assert variables["params"]["gate"]["w"].dtype == F32


def test_init_runs_once_where_nothing_was_missed():
    seen.clear()
    model = apply_policy(Model(), polyamp.PolicyMap({"gate": "bf16"}, default="fp16"))
    model.init(jax.random.key(0), X)
    assert seen == [jnp.bfloat16]


class Scaled(nn.Dense):
    """A layer of flax with a parameter of its own, which flax knows nothing of."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.constant(1 + 2.0**-12), (self.features,))
        seen.append(scale.dtype)
        return nn.Dense.__call__(self, x) * scale


class Holder(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Scaled(4, name="inner")(x)


@pytest.mark.parametrize("make", [lambda: Scaled(4), Holder])
def test_parameters_of_a_subclass_do_not_widen(make):
    seen.clear()
    model = apply_policy(make(), "mixed_float16")
    variables = model.init(jax.random.key(0), X)
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(F32)}
    out = model.apply(variables, X)
    assert out.dtype == F16
    assert set(seen) == {jnp.dtype(F16)}
    params = variables["params"].get("inner", variables["params"])
    alone = {"params": {name: params[name] for name in ("kernel", "bias")}}
    assert (out == nn.Dense(4, dtype=F16).apply(alone, X)).all()
