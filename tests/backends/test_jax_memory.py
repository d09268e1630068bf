"""What must not be kept alive: intermediates of an eager autocast, arrays in policies."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402

from polyamp_jax._autocast import autocast  # noqa: E402
from polyamp_jax._modules import apply_policy  # noqa: E402

SHAPE = (7, 11)


def test_autocast_outside_jit_lets_go_of_what_nothing_needs():
    alive = []

    def count(x):
        alive.append(sum(a.shape == SHAPE for a in jax.live_arrays()))

    def chain(x):
        for _ in range(12):
            x = jnp.exp(jnp.sin(x))
            x = x.astype(jnp.float16).astype(jnp.float32)
        jax.debug.callback(count, x, ordered=True)
        return x

    x = jnp.ones(SHAPE)
    before = sum(a.shape == SHAPE for a in jax.live_arrays())
    autocast(chain, "fp16")(x)
    jax.effects_barrier()
    assert len(alive) == 1
    assert alive[0] - before <= 3


def test_a_policy_on_an_equinox_model_keeps_no_arrays():
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    model = apply_policy(eqx.nn.MLP(3, 2, 5, 2, key=jax.random.key(0)), "bf16-true")
    structure = jax.tree.structure(model)
    eqx.filter_jit(lambda m, x: m(x))(model, jnp.ones(3))
    shapes = {leaf.shape for leaf in jax.tree.leaves(model) if eqx.is_array(leaf)}
    assert shapes == {(5, 3), (5,), (5, 5), (2, 5), (2,)}
    held = [layer.polyamp_applied.before for layer in (model, *model.layers)]
    assert held[1:] == [("float32", "float32")] * 3
    del model
    left = [a for a in jax.live_arrays() if a.shape in {(5, 3), (5, 5), (2, 5)}]
    assert left == []
    assert structure.num_leaves > 0
