"""Policies on flax.nnx modules."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import polyamp  # noqa: E402
from polyamp_jax._modules import apply_policy, remove_policy  # noqa: E402

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
HEAD32 = polyamp.PolicyMap({"head": "float32"}, default="fp16")
SEEN: dict[str, Any] = {}


def note(name, *arrays):
    SEEN[name] = tuple(a.dtype.name for a in arrays)


class Gate(nnx.Module):
    """Parameters of its own, one of them in a list; `low` is for the hand-written version."""

    def __init__(self, low=None, *, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))
        self.more = nnx.List([nnx.Param(jnp.ones(8))])
        self.calls = nnx.Variable(jnp.zeros((), F32))
        self.low = low

    def __call__(self, x):
        w, more = self.w[...], self.more[0][...]
        if self.low is not None:
            w, more = w.astype(self.low), more.astype(self.low)
        note("gate", x, w, more)
        self.calls[...] += 1
        return x @ w * more


class Model(nnx.Module):
    def __init__(self, low=None, remat=False, *, rngs):
        wide = None if low is None else F32
        self.stem = nnx.Linear(8, 8, dtype=low, rngs=rngs)
        self.bn = nnx.BatchNorm(8, dtype=wide, rngs=rngs)
        self.ln = nnx.LayerNorm(8, dtype=wide, rngs=rngs)
        self.gate = Gate(low, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, dtype=low, rngs=rngs) for _ in range(2)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 4, dtype=wide, rngs=rngs)
        self.low, self.remat = low, remat

    def body(self, x):
        x = x + self.ln(x).astype(x.dtype)
        x = self.gate(x)
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x

    def __call__(self, x):
        x = self.stem(x)
        x = self.bn(x).astype(x.dtype)
        note("norm", x)
        x = nnx.remat(Model.body)(self, x) if self.remat else self.body(x)
        x = self.drop(x)
        note("body", x)
        return self.head(x)


def make(policy=None, low=None, **how):
    model = Model(low, rngs=nnx.Rngs(0), **how)
    return model if policy is None else apply_policy(model, policy)


def batch():
    return jax.random.normal(jax.random.key(5), (4, 8))


@nnx.jit
def gradients(model, x):
    def loss(model, x):
        out = model(x)
        return (out.astype(F32) ** 2).sum(), out

    return nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(model, x)


@nnx.jit
def call(model, x):
    return model(x)


def arrays(*trees):
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(trees)]


def same(left, right):
    return [a.dtype for a in left] == [b.dtype for b in right] and all(
        bool((a == b).all()) for a, b in zip(left, right, strict=True)
    )


def state(model):
    return nnx.state(model, nnx.Param, nnx.BatchStat)


def dtypes(tree):
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


class TestDtypes:
    def test_inside(self):
        model = make(HEAD32)
        SEEN.clear()
        assert call(model, batch()).dtype == F32
        assert SEEN == {
            "norm": ("float16",),
            "gate": ("float16",) * 3,
            "body": ("float16",),
        }

    def test_parameters_statistics_and_gradients_stay_float32(self):
        model = make(HEAD32)
        _, grads = gradients(model, batch())
        assert dtypes(state(model)) == dtypes(grads) == {"float32"}
        assert bool((model.bn.mean[...] != 0).any())
        assert float(model.gate.calls[...]) == 1
        assert model.gate.w.dtype == F32

    def test_low_parameters_keep_norms(self):
        model = make("bf16-true")
        assert dtypes(nnx.state((model.bn, model.ln))) == {"float32"}
        assert dtypes(nnx.state((model.stem, model.head), nnx.Param)) == {"bfloat16"}
        assert [model.gate.w.dtype, model.gate.more[0].dtype] == [BF16, BF16]
        assert dtypes(state(remove_policy(model))) == {"float32"}

    def test_low_norms_if_asked(self):
        model = make(polyamp.PolicyMap({"op:norm": "bf16"}, default="bf16-true"))
        assert model.ln.scale.dtype == BF16
        assert model.bn.mean.dtype == F32


class TestByHand:
    @pytest.mark.parametrize("remat", [False, True])
    def test_gradients_bit_for_bit(self, remat):
        left, right = make(HEAD32, remat=remat), make(low=F16, remat=remat)
        assert same(arrays(*gradients(left, batch())), arrays(*gradients(right, batch())))
        assert same(arrays(state(left)), arrays(state(right)))

    def test_float32_changes_nothing(self):
        left, right = make("float32"), make()
        assert same(arrays(*gradients(left, batch())), arrays(*gradients(right, batch())))
        assert same(arrays(state(left)), arrays(state(right)))

    def test_scan_over_layers(self):
        @nnx.vmap
        def create(key):
            return Gate(rngs=nnx.Rngs(key))

        def run(model, x):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def forward(x, layer):
                return layer(x)

            return (forward(x, model) ** 2).sum()

        gates = create(jax.random.split(jax.random.key(0), 3))
        low = apply_policy(gates, "mixed_float16")
        x = batch().astype(F16) * 0.1
        grads = nnx.jit(nnx.grad(run))(low, x)
        assert dtypes(grads) == {"float32"}

        def by_hand(w, more, x):
            for i in range(3):
                x = x @ w[i].astype(F16) * more[i].astype(F16)
            return (x**2).sum()

        expected = jax.jit(jax.grad(by_hand))(gates.w[...], gates.more[0][...], x)
        assert same(arrays(grads["w"]), [expected])

    def test_strict_promotion(self):
        with jax.numpy_dtype_promotion("strict"):
            model = nnx.Sequential(
                nnx.Linear(8, 8, rngs=nnx.Rngs(0)),
                nnx.LayerNorm(8, rngs=nnx.Rngs(0)),
                Gate(rngs=nnx.Rngs(0)),
            )
            assert call(apply_policy(model, "fp16"), batch()).dtype == F32


class Tied(nnx.Module):
    def __init__(self, low=None, *, rngs):
        self.embed = nnx.Embed(10, 8, dtype=low, rngs=rngs)
        self.mix = nnx.Linear(8, 8, dtype=low, rngs=rngs)

    def __call__(self, ids):
        return self.embed.attend(self.mix(self.embed(ids)))


class TestModels:
    def test_tied_embedding(self):
        ids = jnp.arange(6)
        left = apply_policy(Tied(rngs=nnx.Rngs(0)), "mixed_float16")
        right = Tied(F16, rngs=nnx.Rngs(0))
        assert call(left, ids).dtype == F16
        grad = nnx.jit(nnx.grad(lambda m: (m(ids).astype(F32) ** 2).sum()))
        assert same(arrays(grad(left)), arrays(grad(right)))

    @pytest.mark.parametrize("rate", [0.0, 0.1])
    def test_softmax_of_attention_in_float32(self, rate):
        attend = nnx.MultiHeadAttention(
            1, 8, dropout_rate=rate, deterministic=True, decode=False, rngs=nnx.Rngs(0)
        )
        x = jnp.ones((1, 4, 8))

        def text(policy):
            graph, state = nnx.split(apply_policy(attend, policy))
            return str(jax.make_jaxpr(lambda s: nnx.merge(graph, s)(x))(state))

        def exponentials(policy):
            return re.findall(r"(f16|f32)\[[\d,]*4,4\] = exp", text(policy))

        assert exponentials("fp16") == ["f32"]
        low = polyamp.PolicyMap({"op:softmax": "fp16"}, default="fp16")
        assert exponentials(low) == (["f16"] if rate else ["f32"])

    def test_attention_compiled_on_a_cpu(self):
        attend = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
        x = batch()[None]
        for policy in ("fp16", "bf16"):
            out = call(apply_policy(attend, policy), x)
            assert np.allclose(out, call(attend, x), atol=2e-2)

    def test_decoding_cache(self):
        attend = apply_policy(
            nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0)), "mixed_float16"
        )
        attend.init_cache((1, 5, 8), dtype=F16)
        assert call(attend, jnp.ones((1, 1, 8))).dtype == F16

    def test_recurrent(self):
        model = apply_policy(nnx.RNN(nnx.LSTMCell(8, 8, rngs=nnx.Rngs(0))), "fp16")
        grads = nnx.jit(nnx.grad(lambda m: m(batch()[None]).sum()))(model)
        assert dtypes(grads) == {"float32"}
        assert all(bool(jnp.isfinite(g).all()) for g in arrays(grads))

    def test_two_towers(self):
        class Two(nnx.Module):
            def __init__(self, rngs):
                self.text, self.image = Gate(rngs=rngs), Model(rngs=rngs)

            def __call__(self, x):
                text, image = self.text(x), self.image(x)
                note("both", text, image)
                return text.sum() + image.sum()

        rules = polyamp.PolicyMap({"text": "float32", "image": "mixed_float16"})
        call(apply_policy(Two(nnx.Rngs(0)), rules), batch())
        assert SEEN["norm"] == SEEN["body"] == ("float16",)
        assert SEEN["both"] == ("float32", "float32")

    def test_training_with_an_optimizer(self):
        import optax

        model = make(HEAD32)
        model.drop.deterministic = True
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        losses = []
        for _ in range(5):
            (loss, _), (grads, _) = gradients(model, batch())
            optimizer.update(model, grads)
            losses.append(float(loss))
        assert losses[-1] < losses[0]
        assert dtypes(state(model)) == {"float32"}

    def test_classes_that_are_no_pytrees_and_compiled_calls(self):
        class Old(nnx.Module, pytree=False):
            def __init__(self, rngs):
                self.layers = [nnx.Linear(8, 8, rngs=rngs)]
                self.w = nnx.Param(jnp.ones(8))

            @nnx.jit
            def __call__(self, x):
                return self.layers[0](x) * self.w

        model = apply_policy(Old(nnx.Rngs(0)), "mixed_float16")
        assert call(model, batch()).dtype == model(batch()).dtype == F16
        assert model.w.dtype == F32


class TestTheModelItself:
    def test_the_original_is_untouched(self):
        model = make()
        before = arrays(state(model))
        mixed = apply_policy(model, "bf16-true")
        gradients(mixed, batch())
        assert same(arrays(state(model)), before)
        assert type(model) is Model
        assert model.stem.dtype is None
        assert isinstance(mixed, Model)

    def test_one_compilation(self):
        traced = []

        @nnx.jit
        def run(model, x):
            traced.append(1)
            return model(x)

        model = make(HEAD32)
        for m in (model, make(HEAD32), model, copy.deepcopy(model)):
            run(m, batch())
        assert len(traced) == 1
        run(make("fp16"), batch())
        assert len(traced) == 2

    def test_removed_and_replaced(self):
        model = make()
        plain = remove_policy(make(HEAD32))
        assert nnx.graphdef(plain) == nnx.graphdef(model)
        assert type(plain) is Model
        assert remove_policy(model) is model
        twice = apply_policy(make("bf16"), HEAD32)
        assert nnx.graphdef(twice) == nnx.graphdef(make(HEAD32))

    def test_copies(self):
        model = make(HEAD32)
        expected = call(make(HEAD32), batch())
        for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), nnx.clone(model)):
            assert type(twin) is type(model)
            assert bool((call(twin, batch()) == expected).all())

    def test_state_keys_stay(self):
        plain, mixed = nnx.state(make()), nnx.state(make(HEAD32))
        assert jax.tree.structure(plain) == jax.tree.structure(mixed)
        model = make(HEAD32)
        nnx.update(model, plain)
        assert same(arrays(state(model)), arrays(state(make())))


class TestRefused:
    def test_a_rule_without_a_module(self):
        with pytest.raises(polyamp.PolicyError, match=r"no module matches 'heat' .*'head'"):
            make(polyamp.PolicyMap({"heat": "float32"}))

    def test_a_shared_module_with_two_policies(self):
        layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        model = nnx.Sequential(layer, layer)
        with pytest.raises(polyamp.PolicyError, match="one shared module with two policies"):
            apply_policy(model, polyamp.PolicyMap({"layers.1": "fp16"}))
        both = apply_policy(model, polyamp.PolicyMap({"layers.*": "mixed_float16"}))
        assert both.layers[0] is both.layers[1]
        assert both.layers[0].dtype == F16

    def test_a_tied_parameter_in_two_dtypes(self):
        model = make()
        model.head = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        model.head.kernel = model.stem.kernel
        with pytest.raises(polyamp.PolicyError, match="stem and head share one tied parameter"):
            apply_policy(model, polyamp.PolicyMap({"head": "bf16-true"}))
        assert call(apply_policy(model, HEAD32), batch()).dtype == F32

    def test_a_given_dtype_wins_with_a_warning(self):
        model = make()
        model.stem.dtype = F32
        with pytest.warns(UserWarning, match=r"stem \(float32, not float16\)\. Leave"):
            mixed = apply_policy(model, "fp16")
        assert mixed.stem.dtype == F32


def test_containers_can_be_named():
    model = make(polyamp.PolicyMap({"layers": "float32"}, default="mixed_float16"))
    assert [layer.dtype for layer in model.layers] == [F32, F32]
    assert np.dtype(model.stem.dtype) == F16
