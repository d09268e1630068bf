"""A power of two of a module's own: exact, and where it stands in every module system."""

from __future__ import annotations

from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="the test is about JAX")
import equinox as eqx  # noqa: E402
import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402

import polyamp.jax as amp  # noqa: E402
from polyamp import PolicyError, PolicyMap  # noqa: E402

X = jax.random.normal(jax.random.key(1), (8, 4))
PLAIN = PolicyMap(default="float32")
NESTED = PolicyMap({"outer.inner": "float32@2^-9", "outer": "float32@2^20"}, default="float32@2^3")


class NnxInner(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.w = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))
        self.norm = nnx.LayerNorm(4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.norm(jnp.tanh(x @ self.w[...]))


class NnxOuter(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(4, 4, rngs=rngs)
        self.inner = NnxInner(rngs)
        self.dense = nnx.Linear(4, 4, rngs=rngs)
        self.stack = nnx.List([nnx.Linear(4, 4, rngs=rngs)])

    def __call__(self, x: Any) -> Any:
        x = nnx.remat(lambda module, x: module.inner(module.dense(x)))(self, x)
        x = x @ self.stack[0].kernel[...]  # of a module that is not called
        return self.table.attend(x) + self.inner(x)


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.outer = NnxOuter(rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)
        self.tied = self.outer.table.embedding

    def __call__(self, x: Any) -> Any:
        return self.head(self.outer(x) @ self.tied[...])


class LinenInner(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        w = self.param("w", nn.initializers.normal(), (4, 4))
        return nn.LayerNorm()(jnp.tanh(x @ w))


class LinenOuter(nn.Module):
    def setup(self) -> None:
        self.inner = LinenInner()
        self.dense = nn.remat(nn.Dense)(4)
        self.table = nn.Embed(4, 4)

    def __call__(self, x: Any) -> Any:
        x = self.inner(self.dense(x))
        return self.table.attend(x) + self.inner(x)


class LinenModel(nn.Module):
    def setup(self) -> None:
        self.outer = LinenOuter()
        self.head = nn.Dense(2)

    def __call__(self, x: Any) -> Any:
        return self.head(self.outer(x))


class EqxInner(eqx.Module):
    w: Any
    norm: eqx.nn.LayerNorm

    def __call__(self, x: Any) -> Any:
        return self.norm(jnp.tanh(self.w @ x))


class EqxOuter(eqx.Module):
    inner: EqxInner
    dense: eqx.nn.Linear

    def __call__(self, x: Any) -> Any:
        x = self.inner(self.dense(x))
        return x + self.inner.w @ self.inner(x)


class EqxModel(eqx.Module):
    outer: EqxOuter
    head: eqx.nn.Linear

    def __call__(self, x: Any) -> Any:
        return self.head(self.outer(x))


def nnx_gradients(rules: PolicyMap) -> Any:
    graph, params = nnx.split(NnxModel(nnx.Rngs(0)))

    def loss(params: Any, x: Any) -> Any:
        return (amp.apply_policy(nnx.merge(graph, params), rules)(x) ** 2).mean()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, X)


def linen_gradients(rules: PolicyMap) -> Any:
    variables = LinenModel().init(jax.random.key(0), X)

    def loss(variables: Any, x: Any) -> Any:
        return (amp.apply_policy(LinenModel(), rules).apply(variables, x) ** 2).mean()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(variables, X)


def eqx_gradients(rules: PolicyMap) -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    inner = EqxInner(jax.random.normal(keys[0], (4, 4)), eqx.nn.LayerNorm(4))
    model = EqxModel(
        EqxOuter(inner, eqx.nn.Linear(4, 4, key=keys[1])), eqx.nn.Linear(4, 2, key=keys[2])
    )

    def loss(model: Any, x: Any) -> Any:
        return (jax.vmap(amp.apply_policy(model, rules))(x) ** 2).mean()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(model, X)


SYSTEMS = pytest.mark.parametrize(
    "gradients", [nnx_gradients, linen_gradients, eqx_gradients], ids=["nnx", "linen", "equinox"]
)


def same(one: Any, other: Any) -> None:
    left, right = jax.tree.leaves(one), jax.tree.leaves(other)
    assert len(left) == len(right) > 3
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@SYSTEMS
def test_gradients_in_float32_are_those_without_bit_for_bit(gradients: Any) -> None:
    same(gradients(NESTED), gradients(PLAIN))
