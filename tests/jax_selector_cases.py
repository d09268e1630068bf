"""Modules of flax and equinox that the selector's tests measure."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

jax = pytest.importorskip("jax", reason="the test is about JAX")
import equinox as eqx  # noqa: E402
import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import polyamp.jax as amp  # noqa: E402
from polyamp import (  # noqa: E402
    Capabilities,
    PolicyMap,
    Static,
    Statistics,
)
from polyamp_jax._adaptive import read_statistics  # noqa: E402

CAN = Capabilities()
X = jax.random.normal(jax.random.key(1), (8, 4))
SCALE = 2.0**10
TX = amp.loss_scaled(optax.sgd(1e-3), Static(SCALE))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.LayerNorm(6, rngs=rngs)
        self.last = nnx.Linear(6, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.norm(jnp.tanh(self.first(x))))


class Linen(nn.Module):
    def setup(self) -> None:
        self.first, self.norm, self.last = nn.Dense(6), nn.LayerNorm(), nn.Dense(2)

    def __call__(self, x: Any) -> Any:
        return self.last(self.norm(jnp.tanh(self.first(x))))


class Eqx(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    last: eqx.nn.Linear

    def __call__(self, x: Any) -> Any:
        return self.last(self.norm(jnp.tanh(self.first(x))))


class Case(NamedTuple):
    units: Any
    params: Any
    loss: Callable[..., Any]
    """(policy, params, x) -> loss"""
    weights: Callable[[Any], list[Any]]
    """Of `first`, in a tree of parameters or gradients."""


def nnx_case() -> Case:
    graph, params = nnx.split(Nnx(nnx.Rngs(0)))

    def loss(policy: Any, params: Any, x: Any) -> Any:
        return (amp.apply_policy(nnx.merge(graph, params), policy)(x) ** 2).mean()

    return Case(
        amp.units(nnx.merge(graph, params)), params, loss, lambda p: jax.tree.leaves(p["first"])
    )


def linen_case() -> Case:
    params = Linen().init(jax.random.key(0), X)["params"]

    def loss(policy: Any, params: Any, x: Any) -> Any:
        return (amp.apply_policy(Linen(), policy).apply({"params": params}, x) ** 2).mean()

    return Case(amp.units(Linen(), X), params, loss, lambda p: jax.tree.leaves(p["first"]))


def eqx_case() -> Case:
    keys = jax.random.split(jax.random.key(0))
    model = Eqx(
        eqx.nn.Linear(4, 6, key=keys[0]), eqx.nn.LayerNorm(6), eqx.nn.Linear(6, 2, key=keys[1])
    )

    def loss(policy: Any, params: Any, x: Any) -> Any:
        return (jax.vmap(amp.apply_policy(params, policy))(x) ** 2).mean()

    return Case(amp.units(model), model, loss, lambda p: jax.tree.leaves(p.first))


CASES = {"nnx": nnx_case, "linen": linen_case, "equinox": eqx_case}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


def expected(*arrays: Any) -> Statistics:
    """The slow way."""
    values = np.abs(np.concatenate([np.asarray(a, np.float64).ravel() for a in arrays]))
    finite = values[np.isfinite(values)]
    nonzero = finite[finite > 0]
    amax = finite.max(initial=0.0)
    shares = [np.mean(nonzero < limit) for limit in (2.0**-14, 2.0**-20, amax * 2.0**-30)]
    return Statistics(
        amax=amax,
        rms=np.sqrt(np.mean(finite**2)),
        size=values.size,
        nonfinite=1 - finite.size / values.size,
        nonzero=nonzero.size / values.size,
        sub=shares[0],
        bad=shares[1],
        far=shares[2],
    )


def close(found: Statistics | None, *arrays: Any) -> None:
    assert found is not None
    np.testing.assert_allclose(found, expected(*arrays), rtol=2e-5)


def sampled(case: Case, policy: str | PolicyMap = "float32") -> tuple[Any, dict[str, Any]]:
    """Gradients and statistics of one step."""
    rules = policy if isinstance(policy, PolicyMap) else PolicyMap(default=policy)
    plan = amp.Plan(rules, True, tuple(case.units))
    step = jax.jit(amp.value_grad_and_statistics(functools.partial(case.loss, plan.policy), plan))
    _, grads, statistics = step(TX.init(case.params), case.params, X)
    return grads, read_statistics(statistics, case.units)
