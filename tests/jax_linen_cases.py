"""Models of linen that note the dtypes they meet, and what is compared of them."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import polyamp

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
HEAD32 = polyamp.PolicyMap({"head": "float32"}, default="fp16")
SEEN: dict[str, Any] = {}


def note(name, *arrays):
    SEEN[name] = tuple(a.dtype.name for a in arrays)


class Block(nn.Module):
    """Attention and a gate of its own; `dtype` and `cast` are for the hand-written version."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x, carry=None):
        low = self.dtype or x.dtype
        y = nn.LayerNorm(dtype=None)(x.astype(F32) if self.dtype else x).astype(low)
        y = nn.MultiHeadDotProductAttention(
            2, dtype=self.dtype, force_fp32_for_softmax=bool(self.dtype)
        )(y)
        gate = self.param("gate", nn.initializers.normal(), (8,))
        note("gate", gate, y)
        x = x + y * (gate.astype(low) if self.dtype else gate)
        return x if carry is None else (x, None)


class Model(nn.Module):
    dtype: Any = None
    wrap: str = "plain"

    @nn.compact
    def __call__(self, x, train=True):
        d = self.dtype
        x = x.astype(d or x.dtype)
        x = nn.Dense(8, dtype=d)(x)
        x = nn.BatchNorm(not train)(x.astype(F32) if d else x).astype(x.dtype)
        note("norm", x)
        if self.wrap == "scan":
            layers = nn.scan(
                Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
            x, _ = layers(d, name="blocks")(x, ())
        elif self.wrap == "remat":
            x = nn.remat(Block)(d, name="blocks")(x)
        else:
            x = Block(d, name="blocks")(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        note("dropped", x)
        x = nn.Dense(4, name="head")(x.astype(F32) if d else x)
        note("head", x)
        return x


def batch():
    return jax.random.normal(jax.random.key(5), (4, 3, 8))


def variables(model):
    return jax.jit(model.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, batch())


def shapes(model, *args):
    """Variables and output of a model, their values left out."""
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    state = jax.eval_shape(model.init, rngs, *args)
    return state, jax.eval_shape(lambda v: model.apply(v, *args, rngs=rngs, mutable=True)[0], state)


def gradients(model, state, **how):
    def loss(params, x):
        out, new = model.apply(
            {**state, "params": params},
            x,
            rngs={"dropout": jax.random.key(2)},
            mutable=["batch_stats"],
            **how,
        )
        return (out.astype(F32) ** 2).sum(), (out, new)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(state["params"], batch())


def same(left, right):
    def equal(a, b):
        return a.dtype == b.dtype and bool((a == b).all())

    return jax.tree.structure(left) == jax.tree.structure(right) and jax.tree.all(
        jax.tree.map(equal, left, right)
    )


def dtypes(tree):
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


class Tied(nn.Module):
    dtype: Any = None

    def setup(self):
        self.embed = nn.Embed(10, 8, dtype=self.dtype)
        self.layers = [nn.Dense(8, dtype=self.dtype) for _ in range(2)]

    def __call__(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        note("tied", x)
        return self.embed.attend(x)
