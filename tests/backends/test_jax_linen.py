"""Policies on flax.linen modules."""

from __future__ import annotations

import copy
import pickle

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
nn = pytest.importorskip("flax.linen", reason="flax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402
from jax_linen_cases import (  # noqa: E402
    F16,
    F32,
    HEAD32,
    SEEN,
    Model,
    Tied,
    batch,
    dtypes,
    gradients,
    note,
    same,
    shapes,
    variables,
)

import polyamp  # noqa: E402
from polyamp_jax._modules import apply_policy, remove_policy  # noqa: E402


class TestDtypes:
    def test_inside(self):
        SEEN.clear()
        _, out = shapes(apply_policy(Model(), HEAD32), batch())
        assert SEEN == {
            "norm": ("float16",),
            "gate": ("float16", "float16"),
            "dropped": ("float16",),
            "head": ("float32",),
        }
        assert out.dtype == F32

    def test_parameters_and_statistics_stay_float32(self):
        model = apply_policy(Model(), HEAD32)
        state = variables(model)
        (_, (_, new)), (grads, _) = gradients(model, state)
        assert dtypes(state) == dtypes(grads) == dtypes(new["batch_stats"]) == {"float32"}
        assert bool((new["batch_stats"]["BatchNorm_0"]["mean"] != 0).any())

    def test_init_is_that_of_the_plain_model(self):
        assert same(variables(apply_policy(Model(), HEAD32)), variables(Model()))

    def test_low_parameters(self):
        params = shapes(apply_policy(Model(), "bf16-true"), batch())[0]["params"]
        norms = [params["BatchNorm_0"], params["blocks"]["LayerNorm_0"]]
        assert dtypes(norms) == {"float32"}
        assert dtypes([params["Dense_0"], params["blocks"]["gate"], params["head"]]) == {"bfloat16"}

    def test_low_norms_if_asked(self):
        rules = polyamp.PolicyMap({"op:norm": "bfloat16"}, default="bf16-true")
        assert dtypes(shapes(apply_policy(Model(), rules), batch())[0]["params"]) == {"bfloat16"}


class TestByHand:
    @pytest.mark.parametrize("wrap", ["remat", "scan"])
    def test_gradients_bit_for_bit(self, wrap):
        policied, byhand = apply_policy(Model(wrap=wrap), HEAD32), Model(F16, wrap=wrap)
        state = variables(Model(wrap=wrap))
        assert same(gradients(policied, state), gradients(byhand, state))

    def test_float32_changes_nothing(self):
        model = Model(wrap="scan")
        state = variables(model)
        left = gradients(apply_policy(model, "float32"), state)
        assert same(left, gradients(model, state))

    def test_vmap(self):
        model, byhand = apply_policy(Model(), HEAD32), Model(F16)
        state = variables(Model())
        x = jnp.stack([batch(), 2 * batch()])
        left, right = (
            jax.vmap(lambda x, m=m: m.apply(state, x, train=False))(x) for m in (model, byhand)
        )
        assert same(left, right)

    def test_strict_promotion(self):
        with jax.numpy_dtype_promotion("strict"):
            model = apply_policy(nn.Sequential([nn.Dense(8), nn.LayerNorm(), nn.Dense(2)]), "fp16")
            assert shapes(model, batch())[1].dtype == F32


class TestModels:
    def test_tied_embedding(self):
        ids = jnp.arange(6).reshape(2, 3)
        params = Tied().init(jax.random.key(0), ids)

        def loss(model, params):
            out = model.apply(params, ids)
            return (out.astype(F32) ** 2).sum(), out

        grad = jax.jit(jax.grad(loss, argnums=1, has_aux=True), static_argnums=0)
        left, out = grad(apply_policy(Tied(), "mixed_float16"), params)
        right, expected = grad(Tied(F16), params)
        assert same((left, out), (right, expected))
        assert out.dtype == F16
        assert SEEN["tied"] == ("float16",)

    def test_a_rule_in_a_list(self):
        rules = polyamp.PolicyMap({"layers_1": "float32"}, default="mixed_float16")
        model = apply_policy(Tied(), rules)
        shapes(model, jnp.arange(3))
        assert SEEN["tied"] == ("float32",)

    def test_two_towers(self):
        class Tower(nn.Module):
            name_: str = ""

            @nn.compact
            def __call__(self, x):
                for _ in range(2):
                    x = nn.Dense(8)(x)
                note(self.name_, x)
                return x

        class Two(nn.Module):
            def setup(self):
                self.text, self.image = Tower("text"), Tower("image")

            def __call__(self, text, image):
                text, image = self.text(text), self.image(image)
                note("both", text, image)
                return text @ image.T

        model = apply_policy(Two(), polyamp.PolicyMap({"image": "mixed_float16"}))
        shapes(model, batch()[0], batch()[1])
        assert SEEN["text"] == ("float32",)
        assert SEEN["image"] == ("float16",)
        assert SEEN["both"] == ("float32", "float32")

    def test_decoding_cache(self):
        attend = nn.MultiHeadDotProductAttention(2, qkv_features=8, decode=True)
        model = apply_policy(attend, "fp16")
        state = model.init(jax.random.key(0), batch())
        assert state["cache"]["cached_key"].dtype == F16
        out, _ = model.apply(state, batch()[:, :1], mutable=["cache"])
        assert out.dtype == F32

    def test_recurrent(self):
        model = apply_policy(nn.RNN(nn.OptimizedLSTMCell(8)), "fp16")
        state = model.init(jax.random.key(0), batch())
        grads = jax.jit(jax.grad(lambda p: model.apply(p, batch()).sum()))(state)
        assert dtypes(grads) == {"float32"}
        assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))

    def test_own_methods_and_upcasts_are_left_alone(self):
        class Careful(nn.Module):
            @nn.compact
            def __call__(self, x):
                w = self.param("w", nn.initializers.ones, (8, 8))
                return self.stable(jnp.asarray(x @ w, F32)).astype(x.dtype)

            def stable(self, logits):
                note("stable", logits)
                return jax.nn.softmax(logits)

        model = apply_policy(Careful(), "fp16")
        shapes(model, batch())
        assert SEEN["stable"] == ("float32",)

    def test_softmax_of_attention_in_float32(self):
        x = jnp.ones((1, 8, 8))
        attend = nn.MultiHeadDotProductAttention(1)
        state = jax.jit(attend.init)(jax.random.key(0), x)
        text = str(jax.make_jaxpr(lambda: apply_policy(attend, "fp16").apply(state, x))())
        low = polyamp.PolicyMap({"op:softmax": "fp16"}, default="fp16")
        narrow = str(jax.make_jaxpr(lambda: apply_policy(attend, low).apply(state, x))())
        assert "f32[1,1,8,8] = exp" in text
        assert "f16[1,1,8,8] = exp" in narrow

    def test_jit_inside_does_not_mix_policies(self):
        class Inner(nn.Module):
            @nn.compact
            def __call__(self, x):
                return x * self.param("w", nn.initializers.constant(1 + 2**-12), ())

        compiled = nn.jit(Inner)

        class Outer(nn.Module):
            @nn.compact
            def __call__(self, x):
                return compiled(name="inner")(x)

        one = jnp.ones((), F16)
        plain = Outer()
        state = plain.init(jax.random.key(0), one)
        models = (plain, apply_policy(plain, "fp16"), plain)
        assert [float(m.apply(state, one)) for m in models] == [1 + 2**-12, 1, 1 + 2**-12]


class TestTheModuleItself:
    def test_copies(self):
        model = apply_policy(Tied(), HEAD32_TIED)
        assert isinstance(model, Tied)
        for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), model.clone()):
            assert twin == model
            assert type(twin) is type(model)
        assert hash(model) == hash(apply_policy(Tied(), HEAD32_TIED))
        assert model != Tied()
        assert remove_policy(model) == Tied()
        assert type(remove_policy(model)) is Tied

    def test_replaced(self):
        model = apply_policy(apply_policy(Tied(), "bf16"), "mixed_float16")
        assert shapes(model, jnp.arange(3))[1].dtype == F16
        assert type(remove_policy(model)) is Tied

    def test_train_state(self):
        import optax

        model = apply_policy(Tied(), "fp16")
        ids = jnp.arange(3)
        params = model.init(jax.random.key(0), ids)["params"]
        state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(1.0))
        grads = jax.grad(lambda p: state.apply_fn({"params": p}, ids).sum())(state.params)
        assert dtypes(state.apply_gradients(grads=grads).params) == {"float32"}

    def test_method_by_name_and_shapes_alone(self):
        model = apply_policy(Tied(), "mixed_float16")
        ids = jnp.arange(3)
        state, _ = shapes(model, ids)
        assert dtypes(state) == {"float32"}
        out = jax.eval_shape(lambda v: model.apply(v, ids, method="__call__"), state)
        assert out.dtype == F16
        assert "mixed" not in model.tabulate(jax.random.key(0), ids)


HEAD32_TIED = polyamp.PolicyMap({"layers_0": "float32"}, default="fp16")


def test_float16_log_softmax_is_a_matter_of_operations():
    # Beyond 2**16 classes the sum of exponentials overflows in float16: a module of its own in
    # float32 covers it, the policy of the enclosing module does not.
    class Head(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jax.nn.log_softmax(x)

    class Classes(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Head(name="head")(x)

    x = jnp.zeros(2**17)
    low = apply_policy(Classes(), "fp16").apply({}, x)
    wide = apply_policy(Classes(), HEAD32).apply({}, x)
    assert not bool(jnp.isfinite(low).all())
    assert np.allclose(wide, -17 * np.log(2.0), rtol=1e-6)
