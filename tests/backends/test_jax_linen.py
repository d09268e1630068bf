"""Policies on flax.linen modules."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")
nn = pytest.importorskip("flax.linen", reason="flax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402

import polyamp  # noqa: E402
from polyamp_jax._modules import apply_policy, remove_policy  # noqa: E402

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


class TestRefused:
    def test_a_rule_without_a_module(self):
        model = apply_policy(Model(), polyamp.PolicyMap({"heat": "float32"}, default="fp16"))
        with pytest.raises(polyamp.PolicyError, match=r"no module matches 'heat' .*'head'"):
            variables(model)
        state = variables(Model())
        out = jax.eval_shape(lambda: model.apply(state, batch(), train=False))
        assert out.dtype == F32, "apply may leave out what only training calls: it refuses nothing"

    def test_a_module_met_only_in_training(self):
        rules = polyamp.PolicyMap({"Dropout_0": "float32"}, default="fp16")
        model = apply_policy(Model(), rules)
        state = variables(model)
        assert jax.eval_shape(lambda: model.apply(state, batch(), train=False)).dtype == F32

    def test_bound_or_part_of_another(self):
        model = apply_policy(Tied(), "fp16")
        ids = jnp.arange(3)
        state = model.init(jax.random.key(0), ids)
        with pytest.raises(polyamp.PolicyError, match="only its own init and apply follow"):
            model.bind(state)
        with pytest.raises(polyamp.PolicyError, match="only its own init and apply follow"):
            nn.Sequential([model]).init(jax.random.key(0), ids)
        with pytest.raises(polyamp.PolicyError, match="is bound to variables"):
            apply_policy(Tied().bind(state), "fp16")

    def test_another_family(self):
        with pytest.raises(polyamp.PolicyError, match="op:exp"):
            apply_policy(Tied(), polyamp.PolicyMap({"op:exp": "fp16"}, default="fp16"))

    def test_a_given_dtype_wins_with_a_warning(self):
        class Given(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = nn.Dense(8, dtype=F32, name="stubborn")(x)
                note("stubborn", x)
                return nn.LayerNorm(dtype=F32)(x)

        model = apply_policy(Given(), "mixed_float16")
        with pytest.warns(UserWarning, match=r"stubborn \(float32, not float16\)\. Leave"):
            state = model.init(jax.random.key(0), batch())
        with pytest.warns(UserWarning, match="wins over the policy"):
            out = model.apply(state, batch())
        assert SEEN["stubborn"] == ("float32",)
        assert out.dtype == F16

    def test_an_error_inside_leaves_nothing_behind(self):
        class Broken(nn.Module):
            @nn.compact
            def __call__(self, x):
                raise RuntimeError("broken")

        with pytest.raises(RuntimeError, match="broken"):
            apply_policy(Broken(), "fp16").init(jax.random.key(0), batch())
        out = nn.Dense(2).init_with_output(jax.random.key(0), batch())[0]
        assert out.dtype == F32


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
