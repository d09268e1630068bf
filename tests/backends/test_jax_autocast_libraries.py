"""autocast around functions of optax, flax and equinox, and the table of primitives."""

from __future__ import annotations

import functools
import gc

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.extend.core import Primitive
from jax_autocast_cases import close, equal, matmuls, named, normal, traced

from polyamp._policy_pattern import OP_FAMILIES
from polyamp_jax import _primitives, _regions
from polyamp_jax._autocast import autocast

LOW = "float16 float16 -> float16"
OLDER_NAMES = {"pjit", "checkpoint"}


def test_every_primitive_of_the_table_exists():
    listed = _primitives.MATMUL | _primitives.WIDENED | _primitives.ARITHMETIC
    listed |= _primitives.EXACT | _primitives.INDEPENDENT | _primitives.CONSTANT
    listed |= set(_regions.REGIONS)
    known = {thing.name for thing in gc.get_objects() if issubclass(type(thing), Primitive)}
    assert sorted(listed - known) == sorted(OLDER_NAMES - known)


def test_no_primitive_is_on_two_lists():
    lists = [_primitives.MATMUL, *_primitives.FLOAT32.values(), _primitives.ARITHMETIC]
    lists += [_primitives.EXACT, _primitives.INDEPENDENT, frozenset(_regions.REGIONS)]
    assert sum(map(len, lists)) == len(frozenset().union(*lists))


def test_families_have_the_names_of_op_rules():
    assert {*_primitives.FLOAT32, *_primitives.FUNCTIONS} <= set(OP_FAMILIES)


def logits(x, w):
    return x @ w


LOSSES = {
    "squared": lambda h: optax.squared_error(h, jnp.ones_like(h)).mean(),
    "l2": lambda h: optax.l2_loss(h).mean(),
    "huber": lambda h: optax.huber_loss(h, delta=0.5).mean(),
    "log_cosh": lambda h: optax.log_cosh(h).mean(),
    "cosine": lambda h: optax.cosine_similarity(h, jnp.ones_like(h), epsilon=1e-6).mean(),
    "sigmoid": lambda h: optax.sigmoid_binary_cross_entropy(h, jnp.ones_like(h)).mean(),
    "softmax": lambda h: optax.softmax_cross_entropy(h, jax.nn.one_hot(jnp.arange(4), 4)).mean(),
    "labels": lambda h: optax.softmax_cross_entropy_with_integer_labels(h, jnp.arange(4)).mean(),
    "kl": lambda h: optax.kl_divergence(jax.nn.log_softmax(h), jax.nn.softmax(-h)).mean(),
    "focal": lambda h: optax.sigmoid_focal_loss(h, jnp.ones_like(h)).mean(),
    "ctc": lambda h: optax.ctc_loss(
        h[None], jnp.zeros((1, 4)), jnp.array([[1, 2]]), jnp.zeros((1, 2))
    ).mean(),
    "tree norm": lambda h: optax.tree.norm({"h": h}),
    "projection": lambda h: optax.projections.projection_simplex(h.reshape(-1)).max(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_optax_on_low_logits_are_those_in_float32(name):
    x, w = normal(4, 4), normal(4, 4, seed=1)
    loss = LOSSES[name]

    def by_hand(x, w):
        return loss((x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32))

    f = autocast(lambda x, w: loss(logits(x, w)), "fp16")
    assert matmuls(f, x, w)[0] == LOW
    got, want = (jax.jit(jax.value_and_grad(g, (0, 1)))(x, w) for g in (f, by_hand))
    close(got, want, 2e-3)


class Block(nn.Module):
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x, train=False):
        h = nn.LayerNorm(dtype=jnp.float32)(x)
        h = nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False, dtype=self.dtype)(h, h)
        h = nn.LayerNorm(dtype=jnp.float32)(x + h)
        h = nn.Dropout(0.5, deterministic=not train)(nn.gelu(nn.Dense(16, dtype=self.dtype)(h)))
        return x + nn.Dense(8, dtype=self.dtype)(h)


def test_a_linen_transformer_block():
    x = normal(2, 5, 8)
    params = Block().init(jax.random.key(0), x)
    loss = lambda model: lambda p: jnp.mean(model.apply(p, x).astype(jnp.float32) ** 2)  # noqa: E731
    f = autocast(loss(Block()), "fp16")
    assert matmuls(f, params) == [LOW] * 8
    got, want = (jax.jit(jax.value_and_grad(g))(params) for g in (f, loss(Block())))
    close(got, want, 0.01)
    close(got[0], jax.jit(loss(Block(jnp.float16)))(params), 1e-3)
    apply = autocast(Block().apply, "fp16")
    rngs = {"dropout": jax.random.key(1)}
    got, want = (
        jax.jit(functools.partial(g, train=True))(params, x, rngs=rngs)
        for g in (apply, Block().apply)
    )
    close(got, want, 0.01)


def test_the_jaxpr_of_a_transformer_block_grows_by_casts_only():
    x = normal(2, 5, 8)
    params = Block().init(jax.random.key(0), x)
    loss = lambda p: jnp.mean(Block().apply(p, x) ** 2)  # noqa: E731
    for transform in (lambda f: f, jax.grad):
        plain, cast = (traced(transform(f), params) for f in (loss, autocast(loss, "fp16")))
        casts = [len(named(e, "convert_element_type")) for e in (plain, cast)]
        assert len(cast) - len(plain) == casts[1] - casts[0]
        assert len(cast) <= 1.4 * len(plain)


def test_batch_norm_statistics_of_linen_stay_float32():
    model = nn.Sequential([nn.Dense(4), nn.BatchNorm(use_running_average=False)])
    x = normal(6, 3)
    variables = model.init(jax.random.key(0), x)
    apply = lambda v, x: model.apply(v, x, mutable="batch_stats")  # noqa: E731
    got, want = jax.jit(autocast(apply, "fp16"))(variables, x), apply(variables, x)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(got)} == {"float32"}
    close(got, want, 0.01)


def test_recurrent_and_convolutional_layers_of_linen():
    x = normal(2, 5, 4)
    for model in (nn.RNN(nn.GRUCell(features=3)), nn.Conv(3, (3,)), nn.RNN(nn.LSTMCell(3))):
        params = model.init(jax.random.key(0), x)
        f = lambda p, x, model=model: jnp.sum(model.apply(p, x) ** 2)  # noqa: E731
        assert set(matmuls(autocast(f, "fp16"), params, x)) == {LOW}
        got, want = (jax.jit(jax.grad(g))(params, x) for g in (autocast(f, "fp16"), f))
        close(got, want, 0.02)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


def test_nnx_by_split_and_merge():
    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, rest, x, copy=True):
        model = nnx.merge(graph, params, rest, copy=copy)
        value = jnp.mean((model(x) - 1.0) ** 2)
        return value, nnx.state(model, nnx.BatchStat)

    x = normal(8, 4)
    f = autocast(loss, "fp16")
    assert matmuls(f, params, rest, x) == [LOW] * 2
    equal(f(params, rest, x, copy=False), f(params, rest, x))
    (got, grads), (want, plain) = (
        jax.jit(jax.value_and_grad(g, has_aux=True))(params, rest, x) for g in (f, loss)
    )
    close([*got, grads], [*want, plain], 0.02)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves([got, grads])} == {"float32"}


def test_a_stateful_nnx_module_as_an_argument_is_an_error():
    model = Net(nnx.Rngs(0))
    before = jax.tree.map(jnp.array, nnx.state(model))
    with pytest.raises(TypeError, match="split it outside, merge it inside"):
        autocast(lambda model, x: model(x), "fp16")(model, normal(8, 4))
    equal(nnx.state(model), before)


def test_a_stateful_nnx_module_closed_over_is_an_error():
    model = Net(nnx.Rngs(0))
    with pytest.raises(Exception, match="different trace level"):
        autocast(lambda x: model(x), "fp16")(normal(8, 4))


def test_equinox_modules_and_filters():
    eqx = pytest.importorskip("equinox", reason="a model of equinox")
    model = eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0), activation=jnp.tanh)

    def loss(model, x):
        return jnp.mean((jax.vmap(model)(x) - 1.0) ** 2)

    x = normal(6, 4)
    for f in (eqx.filter_jit(autocast(loss, "fp16")), autocast(eqx.filter_jit(loss), "fp16")):
        got, want = (
            eqx.filter_value_and_grad(f)(model, x),
            eqx.filter_value_and_grad(loss)(model, x),
        )
        assert isinstance(got[1], eqx.nn.MLP)
        close(eqx.filter(got, eqx.is_array), eqx.filter(want, eqx.is_array), 0.01)
    norm = eqx.nn.LayerNorm(4)
    close(autocast(jax.vmap(norm), "fp16")(x), jax.vmap(norm)(x), 1e-6)
    arrays, static = eqx.partition(model, eqx.is_array)
    call = autocast(lambda arrays: loss(eqx.combine(arrays, static), x), "fp16")
    assert matmuls(call, arrays) == [LOW] * 3


def test_functions_of_the_users_that_bear_jaxs_names():
    @jax.custom_jvp
    def relu(x):
        return x * 1e6

    relu.defjvp(lambda primals, tangents: (relu(primals[0]), tangents[0] * 1e6))

    @jax.jit
    def norm(x, w):
        return x @ w

    x = jnp.ones((4, 4))
    assert float(autocast(lambda x: relu(x @ x).max(), "fp16")(x)) == 4e6
    text = str(jax.make_jaxpr(autocast(lambda x: norm(x @ x, x), "fp16"))(x))
    assert "f16[4,4] = dot_general" in text
