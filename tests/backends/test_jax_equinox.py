"""Policies on equinox modules."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
eqx = pytest.importorskip("equinox", reason="equinox is not installed")

import jax.numpy as jnp  # noqa: E402

import polyamp  # noqa: E402
from polyamp_jax._modules import apply_policy, remove_policy  # noqa: E402

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
HEAD32 = polyamp.PolicyMap({"head": "float32"}, default="fp16")
SEEN: dict[str, Any] = {}


def note(name, *arrays):
    SEEN[name] = tuple(a.dtype.name for a in arrays)


class Gate(eqx.Module):
    w: jax.Array
    more: list[jax.Array]

    def __call__(self, x):
        note("gate", x, self.w, self.more[0])
        return self.w @ x * self.more[0]


class Model(eqx.Module):
    stem: eqx.nn.Linear
    bn: eqx.nn.BatchNorm
    ln: eqx.nn.LayerNorm
    gate: Gate
    layers: tuple[eqx.nn.Linear, ...]
    drop: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.stem = eqx.nn.Linear(8, 8, key=keys[0])
        self.bn = eqx.nn.BatchNorm(8, "batch", mode="batch")
        self.ln = eqx.nn.LayerNorm(8)
        self.gate = Gate(jax.random.normal(keys[1], (8, 8)), [jnp.ones(8)])
        self.layers = tuple(eqx.nn.Linear(8, 8, key=k) for k in keys[2:4])
        self.drop = eqx.nn.Dropout(0.5)
        self.head = eqx.nn.Linear(8, 4, key=keys[4])

    def __call__(self, x, state, key):
        x, state = self.bn(self.stem(x), state)
        note("norm", x)
        x = self.gate(x + self.ln(x))
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        x = self.drop(x, key=key)
        note("body", x)
        return self.head(x), state


def by_hand(model, x, state, key):
    def half(tree):
        return jax.tree.map(lambda a: a.astype(F16) if eqx.is_inexact_array(a) else a, tree)

    x, state = model.bn(half(model.stem)(x.astype(F16)).astype(F32), state)
    x = x.astype(F16)
    x = half(model.gate)(x + model.ln(x.astype(F32)).astype(F16))
    for layer in half(model.layers):
        x = jnp.tanh(layer(x))
    return model.head(model.drop(x, key=key).astype(F32)), state


def make(policy=None):
    model, state = eqx.nn.make_with_state(Model)(jax.random.key(0))
    return (model if policy is None else apply_policy(model, policy)), state


def batch():
    return jax.random.normal(jax.random.key(5), (4, 8))


def run(model, state, call=None, wrap=lambda f: f):
    keys = jax.random.split(jax.random.key(2), 4)
    one = wrap(lambda x, state, key: (call or type(model).__call__)(model, x, state, key))
    each = jax.vmap(one, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
    return each(batch(), state, keys)


def gradients(model, state, call=None, wrap=lambda f: f):
    def loss(model):
        out, new = run(model, state, call, wrap)
        return (out**2).sum(), (out, new)

    return eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))(model)


def arrays(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)]


def same(left, right):
    left, right = arrays(left), arrays(right)
    return [a.dtype for a in left] == [b.dtype for b in right] and all(
        bool((a == b).all()) for a, b in zip(left, right, strict=True)
    )


def dtypes(tree):
    return {a.dtype.name for a in arrays(tree) if eqx.is_inexact_array(a)}


class TestDtypes:
    def test_inside(self):
        model, state = make(HEAD32)
        out, new = eqx.filter_eval_shape(run, model, state)
        assert SEEN == {"norm": ("float16",), "gate": ("float16",) * 3, "body": ("float16",)}
        assert out.dtype == F32
        assert {s.dtype.name for s in jax.tree.leaves(new)} == {"float32", "int32"}

    def test_parameters_and_gradients_stay_float32(self):
        model, state = make(HEAD32)
        _, grads = gradients(model, state)
        assert dtypes(model) == dtypes(grads) == {"float32"}

    def test_low_parameters_keep_norms(self):
        model, _ = make("bf16-true")
        assert dtypes([model.bn, model.ln]) == {"float32"}
        assert dtypes([model.stem, model.gate, model.layers, model.head]) == {"bfloat16"}
        assert dtypes(remove_policy(model)) == {"float32"}

    def test_low_norms_if_asked(self):
        model, _ = make(polyamp.PolicyMap({"op:norm": "bf16"}, default="bf16-true"))
        assert dtypes(model) == {"bfloat16"}


class TestByHand:
    @pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "remat"])
    def test_gradients_bit_for_bit(self, wrap):
        policied, state = make(HEAD32)
        left = gradients(policied, state, wrap=wrap)
        right = gradients(make()[0], state, by_hand, wrap=wrap)
        assert same(left, right)

    def test_float32_changes_nothing(self):
        model, state = make()
        assert same(gradients(make("float32")[0], state), gradients(model, state))

    def test_scan_over_layers(self):
        stacked = eqx.filter_vmap(lambda k: eqx.nn.Linear(8, 8, key=k))(
            jax.random.split(jax.random.key(0), 3)
        )
        x = batch()[0].astype(F16)

        def forward(model, x, low=lambda m: m):
            arrays_, static = eqx.partition(model, eqx.is_array)
            step = lambda x, a: (low(eqx.combine(a, static))(x), None)  # noqa: E731
            return (jax.lax.scan(step, x, arrays_)[0] ** 2).sum()

        def half(model):
            return jax.tree.map(lambda a: a.astype(F16) if eqx.is_array(a) else a, model)

        left = eqx.filter_jit(eqx.filter_grad(forward))(apply_policy(stacked, "mixed_float16"), x)
        right = eqx.filter_jit(eqx.filter_grad(lambda m: forward(m, x, half)))(stacked)
        assert same(left, right)
        assert dtypes(left) == {"float32"}

    def test_strict_promotion(self):
        with jax.numpy_dtype_promotion("strict"):
            model, state = make("mixed_float16")
            out, new = eqx.filter_eval_shape(run, model, state)
        assert out.dtype == F16
        assert {s.dtype.name for s in jax.tree.leaves(new)} == {"float32", "int32"}


class TestModels:
    def test_attention_and_mlp(self):
        attend = eqx.nn.MultiheadAttention(2, 8, key=jax.random.key(0))
        mlp = eqx.nn.MLP(8, 2, 8, 1, key=jax.random.key(1))
        model = apply_policy(eqx.nn.Sequential([eqx.nn.Lambda(lambda x: x), mlp]), "mixed_float16")
        assert model(batch()[0]).dtype == F16
        text = str(jax.make_jaxpr(lambda x: apply_policy(attend, "fp16")(x, x, x))(batch()))
        assert "f32[2,4,4] = exp" in text
        assert set(re.findall(r"(f\d\d)\S* = dot_general", text)) == {"f16"}

    def test_tied_embedding(self):
        class Tied(eqx.Module):
            shared: eqx.nn.Shared

            def __init__(self):
                embed = eqx.nn.Embedding(10, 8, key=jax.random.key(0))
                head = eqx.nn.Linear(8, 10, use_bias=False, key=jax.random.key(1))
                self.shared = eqx.nn.Shared(
                    (embed, head), lambda pair: pair[1].weight, lambda pair: pair[0].weight
                )

            def __call__(self, i):
                embed, head = self.shared()
                return head(embed(i))

        model = Tied()
        mixed = apply_policy(model, "mixed_float16")
        assert mixed(3).dtype == F16
        table = model.shared()[0].weight

        def expected(table):
            return ((table.astype(F16) @ table[3].astype(F16)).astype(F32) ** 2).sum()

        grads = eqx.filter_grad(lambda m: (m(3).astype(F32) ** 2).sum())(mixed)
        assert same(grads, jax.grad(expected)(table))

    def test_two_towers(self):
        class Two(eqx.Module):
            text: Gate
            image: eqx.nn.Sequential

            def __call__(self, x):
                text, image = self.text(x), self.image(x)
                note("both", text, image)
                return text @ image

        gate = Gate(jnp.ones((8, 8)), [jnp.ones(8)])
        linear = eqx.nn.Linear(8, 8, key=jax.random.key(0))
        look = eqx.nn.Lambda(lambda x: (note("image", x), x)[1])
        rules = polyamp.PolicyMap({"text": "float32", "image": "mixed_float16"})
        apply_policy(Two(gate, eqx.nn.Sequential([linear, look])), rules)(batch()[0])
        assert SEEN["gate"] == ("float32",) * 3
        assert SEEN["image"] == ("float16",)
        assert SEEN["both"] == ("float32", "float32")

    def test_a_module_in_a_transformation(self):
        each = eqx.filter_vmap(eqx.nn.Linear(8, 8, key=jax.random.key(0)))
        mixed = apply_policy(each, "mixed_float16")
        assert eqx.filter_eval_shape(mixed, batch()).dtype == F16
        assert jax.tree.structure(remove_policy(mixed)) == jax.tree.structure(each)

    def test_inference_mode_and_tree_at(self):
        model, state = make("fp16")
        out, _ = eqx.filter_eval_shape(run, eqx.nn.inference_mode(model), state)
        assert out.dtype == F32
        changed = eqx.tree_at(lambda m: m.head.bias, model, jnp.ones(4))
        assert changed.head.bias.tolist() == [1, 1, 1, 1]
        assert type(changed) is type(model)


class TestTheModelItself:
    def test_removed_and_replaced(self):
        model, _ = make()
        plain = remove_policy(make(HEAD32)[0])
        assert type(plain) is Model
        assert jax.tree.structure(plain) == jax.tree.structure(model)
        assert same(plain, model)
        assert remove_policy(model) is model
        twice = apply_policy(make("bf16")[0], HEAD32)
        assert jax.tree.structure(twice) == jax.tree.structure(make(HEAD32)[0])
        assert isinstance(twice, Model)

    def test_one_compilation(self):
        traced = []

        @eqx.filter_jit
        def call(model, x):
            traced.append(1)
            return model(x)

        linear = eqx.nn.Linear(8, 8, key=jax.random.key(0))
        for policy in ("fp16", "fp16", "bf16"):
            call(apply_policy(linear, policy), batch()[0])
        assert len(traced) == 2

    def test_pickle_and_leaves(self, tmp_path):
        linear = apply_policy(eqx.nn.Linear(8, 8, key=jax.random.key(0)), "fp16")
        twin = pickle.loads(pickle.dumps(linear))
        assert jax.tree.structure(twin) == jax.tree.structure(linear)
        assert same(twin, linear)
        eqx.tree_serialise_leaves(tmp_path / "model.eqx", linear)
        other = eqx.nn.Linear(8, 8, key=jax.random.key(1))
        assert same(eqx.tree_deserialise_leaves(tmp_path / "model.eqx", other), linear)

    def test_a_rule_without_a_module(self):
        with pytest.raises(polyamp.PolicyError, match=r"no module matches 'heat' .*'head'"):
            make(polyamp.PolicyMap({"heat": "float32"}))

    def test_containers_can_be_named(self):
        model, state = make(polyamp.PolicyMap({"layers": "float32"}, default="mixed_float16"))
        eqx.filter_eval_shape(run, model, state)
        assert SEEN["body"] == ("float32",)
