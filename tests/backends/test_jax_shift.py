"""A power of two of a module's own: exact, and where it stands in every module system."""

from __future__ import annotations

import functools
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="the test is about JAX")
import equinox as eqx  # noqa: E402
import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import polyamp.jax as amp  # noqa: E402
from polyamp import Capabilities, ModuleScales, PolicyError, PolicyMap, Static  # noqa: E402
from polyamp_jax._shift import times  # noqa: E402

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


def test_of_a_function_parameters_are_arguments() -> None:
    def fun(w: Any, x: Any) -> Any:
        seen.append(jax.typeof(w).dtype.name)
        return jnp.tanh(x @ w)

    seen: list[str] = []
    w = jax.random.normal(jax.random.key(0), (4, 4))

    def gradient(policy: str) -> Any:
        return jax.grad(lambda w: amp.apply_policy(fun, policy)(w, X).sum())(w)

    np.testing.assert_array_equal(gradient("float32@2^-40"), gradient("float32"))
    tiny = jax.grad(lambda w: amp.apply_policy(fun, "fp16@2^40")(w, X).sum() * 2.0**-40)(w)
    assert seen[-1] == "float16"
    np.testing.assert_allclose(tiny * 2.0**40, gradient("float32"), rtol=2e-2, atol=5e-3)
    flushed = jax.grad(lambda w: amp.apply_policy(fun, "fp16")(w, X).sum() * 2.0**-40)(w)
    assert not flushed.any()


def test_inside_gradients_are_2_to_the_j_as_large() -> None:
    found: list[float] = []

    @jax.custom_vjp
    def look(x: Any) -> Any:
        return x

    look.defvjp(lambda x: (x, None), lambda _, g: (found.append(float(g[0])), (g,))[1])
    inner = amp.apply_policy(lambda x: look(x) * 1.0, "float32@2^7")
    outer = amp.apply_policy(lambda x: inner(look(x)), "float32@2^-3")
    # Functions know nothing of what encloses them: their powers add up.
    np.testing.assert_array_equal(jax.grad(lambda x: outer(x).sum())(jnp.ones(2)), jnp.ones(2))
    assert found == [2.0**4, 2.0**-3]


@pytest.mark.parametrize("bits", [126, -126, 252, -252, 7])
def test_times_is_exact(bits: int) -> None:
    x = jnp.float32(1.5 * 2.0 ** (-bits // 2))
    for fun in (times, jax.jit(times, static_argnums=1)):
        assert float(fun(x, bits)) == float(np.ldexp(np.float64(x), bits))


class Sigmoids(nn.Module):
    """16 layers, each of which makes gradients about 4 bits smaller."""

    depth: int = 16
    spread: float = 0.05

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for number in range(self.depth):
            small = nn.initializers.normal(self.spread)
            x = nn.sigmoid(nn.Dense(32, kernel_init=small, name=f"l{number}")(x))
        return nn.Dense(1, name="head")(x)


def flushed(rules: PolicyMap, scale: float) -> tuple[float, float]:
    """(share of zeros, share of non-finite entries) of the weights' gradients."""
    x = jax.random.normal(jax.random.key(2), (16, 32))
    params = Sigmoids().init(jax.random.key(0), x)["params"]

    @jax.jit
    def gradients(params: Any) -> Any:
        module = amp.apply_policy(Sigmoids(), rules)
        return jax.grad(lambda p: module.apply({"params": p}, x).mean() * scale)(params)

    weights = [np.asarray(gradients(params)[f"l{number}"]["kernel"]) for number in range(16)]
    flat = np.concatenate([weight.ravel() for weight in weights])
    return float(np.mean(flat == 0)), float(np.mean(~np.isfinite(flat)))


def test_sixteen_sigmoid_layers_need_powers_of_their_own() -> None:
    """Their gradients span more than float16 does: no scale of the loss holds them all."""
    plain = PolicyMap(default="params=f32,compute=f16,output=f32")
    assert flushed(PolicyMap(default="float32"), 1.0) == (0.0, 0.0)
    best = min(sum(flushed(plain, 2.0**k)) for k in (10, 15, 19))
    shifts = {
        f"l{number}": f"params=f32,compute=f16,output=f32@2^{4 * (15 - number)}"
        for number in range(16)
    }
    own = PolicyMap(shifts, default=plain.default)
    zeros, lost = flushed(own, 2.0**10)
    assert best > 0.05
    assert (zeros, lost) == (0.0, 0.0)


def test_module_scales_finds_them() -> None:
    model = Sigmoids(depth=6, spread=0.003)  # 8 bits a layer
    x = jax.random.normal(jax.random.key(2), (16, 32))
    params = model.init(jax.random.key(0), x)["params"]
    tx = amp.loss_scaled(optax.sgd(1e-3), Static(2.0**10))
    adaptive = amp.Adaptive(
        amp.units(model, x), selector=ModuleScales(), capabilities=Capabilities(), every=1
    )

    @functools.partial(jax.jit, static_argnames="plan")
    def step(params: Any, plan: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return amp.apply_policy(model, plan.policy).apply({"params": params}, x).mean()

        fun = amp.value_grad_and_statistics(loss_fn, plan)
        _, grads, statistics = fun(tx.init(params), params)
        flat = jnp.concatenate([grads[f"l{number}"]["kernel"].ravel() for number in range(6)])
        return (flat == 0).mean(), statistics

    shares = []
    for _ in range(2):
        share, statistics = step(params, plan=adaptive.plan)
        shares.append(float(share))
        adaptive.update(statistics)
    assert shares[0] > 0.2
    assert shares[1] == 0.0
    assert adaptive.changes == 1


class Scanned(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        make = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs), in_axes=0)
        self.layers = make(rngs.split(3))

    def __call__(self, x: Any) -> Any:
        return nnx.scan(
            lambda layer, x: jnp.tanh(layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry
        )(self.layers, x)


def test_scanned_layers_of_nnx() -> None:
    graph, params = nnx.split(Scanned(nnx.Rngs(0)))

    def gradients(rules: PolicyMap) -> Any:
        def loss(params: Any) -> Any:
            return (amp.apply_policy(nnx.merge(graph, params), rules)(X) ** 2).mean()

        return jax.jit(jax.grad(loss))(params)

    plain = gradients(PLAIN)
    for rules in ({}, {"layers": "float32@2^5"}):
        shifted = gradients(PolicyMap(rules, default="float32@2^-3"))
        jax.tree.map(np.testing.assert_array_equal, shifted, plain)


class TestRefused:
    def test_low_parameters(self) -> None:
        with pytest.raises(PolicyError, match=r"@2\^3 to float16 parameters.*params=float32"):
            amp.apply_policy(Sigmoids(), "params=f16,compute=f16,output=f16@2^3")

    def test_autocast(self) -> None:
        with pytest.raises(PolicyError, match=r"@2\^3 \(allowed: leave it out\)"):
            amp.autocast(lambda x: x, "fp16@2^3")

    def test_a_live_module_as_argument(self) -> None:
        class Caller(nnx.Module):
            def __call__(self, x: Any, layer: Any) -> Any:
                return layer(x)

        model = amp.apply_policy(Caller(), "fp16@2^3")
        with pytest.raises(PolicyError, match="called with a live Linear"):
            model(X, nnx.Linear(4, 4, rngs=nnx.Rngs(0)))

    def test_a_shared_module_in_two_regions(self) -> None:
        class Part(nnx.Module):
            def __init__(self, layer: Any) -> None:
                self.layer = layer

            def __call__(self, x: Any) -> Any:
                return self.layer(x)

        class Model(nnx.Module):
            def __init__(self) -> None:
                self.a = Part(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
                self.b = Part(self.a.layer)

            def __call__(self, x: Any) -> Any:
                return self.b(self.a(x))

        rules = PolicyMap({"a": "float32@2^3", "*.layer": "float32@2^5"}, default="float32")
        with pytest.raises(PolicyError, match="one shared module inside modules with different"):
            amp.apply_policy(Model(), rules)

    def test_a_write_to_a_parameter_that_would_be_lost(self) -> None:
        class Writer(nnx.Module):
            def __init__(self) -> None:
                self.layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

            def __call__(self, x: Any) -> Any:
                self.layer.bias[...] = jnp.ones(4)
                return self.layer(x)

        with pytest.raises(PolicyError, match="the write would be lost"):
            amp.apply_policy(Writer(), "float32@2^3")(X)
