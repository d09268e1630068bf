"""The tree of policies, and rules that never did anything."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
pytest.importorskip("flax", reason="flax is not installed")

import flax.linen as nn  # noqa: E402
import flax.nnx as nnx  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import polyamp  # noqa: E402
from polyamp_jax._describe import describe, idle_rules, policy_tree  # noqa: E402
from polyamp_jax._modules import apply_policy  # noqa: E402

RULES = polyamp.PolicyMap({"head": "float32"}, default="fp16")


class Linen(nn.Module):
    call_head: bool = True

    def setup(self):
        self.norm, self.head = nn.LayerNorm(), nn.Dense(2)
        self.body = [nn.Dense(4)]

    def __call__(self, x):
        x = self.norm(self.body[0](x))
        if self.call_head or self.is_initializing():
            return self.head(x)
        return x @ self.head.variables["params"]["kernel"].astype(x.dtype)


class Nnx(nnx.Module):
    def __init__(self, rngs, call_head=True):
        self.body = nnx.List([nnx.Linear(4, 4, rngs=rngs)])
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)
        self.call_head = call_head

    def __call__(self, x):
        x = self.norm(self.body[0](x))
        return self.head(x) if self.call_head else x @ self.head.kernel


def equinox_model():
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")

    class Equinox(eqx.Module):
        body: list
        norm: eqx.nn.LayerNorm
        head: eqx.nn.Linear

        def __call__(self, x):
            return self.head(self.norm(self.body[0](x)))

    key = jax.random.key(0)
    return Equinox(
        [eqx.nn.Linear(4, 4, key=key)], eqx.nn.LayerNorm(4), eqx.nn.Linear(4, 2, key=key)
    )


def words(tree):
    return [" ".join(line.split()) for line in tree.splitlines()]


def test_linen():
    model = apply_policy(Linen(), RULES)
    assert words(policy_tree(model)) == ["(model): Linen no policy"]
    model.init(jax.random.key(0), jnp.ones((1, 4)))
    assert words(policy_tree(model)) == [
        "(model): Linen float32 -> float16 -> float32 default",
        "body_0: Dense 20 float32",
        "head: Dense float32 10 float32 rule 'head'",
        "norm: LayerNorm 8 float32 kept in float32",
    ]
    assert idle_rules(model) == []


def test_nnx(capsys):
    model = apply_policy(Nnx(nnx.Rngs(0)), RULES)
    model(jnp.ones((1, 4)))
    expected = [
        "(model): Nnx float32 -> float16 -> float32 default",
        "body: List",
        "0: Linear 20 float32",
        "head: Linear float32 10 float32 rule 'head'",
        "norm: LayerNorm 8 float32 kept in float32",
    ]
    assert words(policy_tree(model)) == expected
    describe(model)
    assert words(capsys.readouterr().out) == expected


def test_equinox():
    model = apply_policy(equinox_model(), RULES)
    model(jnp.ones(4))
    assert words(policy_tree(model)) == [
        "(model): Equinox float32 -> float16 -> float32 default",
        "body: list",
        "0: Linear 20 float32",
        "norm: LayerNorm 8 float32 kept in float32",
        "head: Linear float32 10 float32 rule 'head'",
    ]
    assert idle_rules(model) == []


def test_a_rule_at_an_enclosing_module():
    rules = polyamp.PolicyMap({"body": "bf16"}, default="fp16")
    lines = words(policy_tree(apply_policy(Nnx(nnx.Rngs(0)), rules)))
    assert lines[2] == "0: Linear float32 -> bfloat16 -> float32 20 float32 rule 'body' at 'body'"


def test_functions():
    assert words(policy_tree(apply_policy(jnp.tanh, "bf16-true"))) == [
        "(model): tanh bfloat16 default"
    ]


def test_without_a_policy():
    assert words(policy_tree(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))) == [
        "(model): Linear 10 float32 no policy"
    ]
    with pytest.raises(polyamp.PolicyError, match="expected a function that apply_policy returned"):
        policy_tree(3)


class TestIdle:
    def test_nnx(self):
        model = apply_policy(Nnx(nnx.Rngs(0), call_head=False), RULES)
        assert idle_rules(model) == ["", "head"]
        nnx.jit(lambda m, x: m(x))(model, jnp.ones((1, 4)))
        assert idle_rules(model) == ["head"]
        assert "head: Linear float32 10 float32 rule 'head'; NEVER CALLED, so without effect" in (
            words(policy_tree(model))
        )

    def test_linen(self):
        variables = Linen().init(jax.random.key(0), jnp.ones((1, 4)))
        model = apply_policy(Linen(call_head=False), RULES)
        model.apply(variables, jnp.ones((1, 4)))
        assert idle_rules(model) == ["head"]
