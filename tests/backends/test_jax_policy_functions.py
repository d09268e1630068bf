"""Policies on plain functions over pytrees, and what `apply_policy` refuses."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

jax = pytest.importorskip("jax", reason="jax is not installed")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import polyamp  # noqa: E402
from polyamp_jax._modules import apply_policy, remove_policy  # noqa: E402

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
POLICIES = {"fp16": (F16, F32), "mixed_float16": (F16, F16), "bf16-true": (BF16, BF16)}


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return ((hidden @ params["v"]) ** 2).mean()


def by_hand(params, batch, compute=F16, output=F32):
    p = {k: v.astype(compute) for k, v in params.items()}
    return loss(p, {"x": batch["x"].astype(compute)}).astype(output)


@pytest.fixture
def params():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"w": (6, 8), "b": (8,), "v": (8, 2)}
    return {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items(), strict=True)}


@pytest.fixture
def batch():
    return {"x": jax.random.normal(jax.random.key(9), (4, 6)), "labels": jnp.arange(4)}


def same(left, right):
    def equal(a, b):
        return a.dtype == b.dtype and bool((a == b).all())

    return jax.tree.structure(left) == jax.tree.structure(right) and jax.tree.all(
        jax.tree.map(equal, left, right)
    )


class TestCasts:
    @pytest.mark.parametrize(("policy", "dtypes"), POLICIES.items())
    def test_equals_casts_written_by_hand(self, policy, dtypes, params, batch):
        mixed = apply_policy(loss, policy)
        for wrap in (lambda f: f, jax.jit, jax.checkpoint):
            left = wrap(jax.value_and_grad(mixed))(params, batch)
            right = wrap(jax.value_and_grad(lambda p, b: by_hand(p, b, *dtypes)))(params, batch)
            assert same(left, right)
            assert {g.dtype for g in left[1].values()} == {jnp.dtype(F32)}

    def test_vmap_and_scan(self, params, batch):
        mixed = apply_policy(loss, "fp16")
        each = {"x": batch["x"][:, None]}
        assert same(
            jax.vmap(jax.grad(mixed), (None, 0))(params, each),
            jax.vmap(jax.grad(by_hand), (None, 0))(params, each),
        )

        def descend(fn):
            def step(p, x):
                return jax.tree.map(lambda a, g: a - g, p, jax.grad(fn)(p, {"x": x})), None

            return jax.jit(lambda p, xs: jax.lax.scan(step, p, xs)[0])(params, each["x"])

        assert same(descend(mixed), descend(by_hand))

    def test_only_floating_arrays_are_cast(self):
        seen = {}

        def look(*args, **kwargs):
            seen.update(args=args, kwargs=kwargs)
            return args[0]

        key = jax.random.key(0)
        out = apply_policy(look, "mixed_float16")(
            {"f": jnp.ones(2), "np": np.ones(2), "c": jnp.ones(2, jnp.complex64)},
            [jnp.arange(2), key, 1.5, None, "text"],
            train=True,
            x=jnp.ones(2),
        )
        first, second = seen["args"]
        assert [first[k].dtype for k in ("f", "np", "c")] == [F16, F16, jnp.complex64]
        assert second[0].dtype == jnp.int32
        assert second[1] is key
        assert second[2:] == [1.5, None, "text"]
        assert seen["kwargs"]["train"] is True
        assert seen["kwargs"]["x"].dtype == F16
        assert out["f"].dtype == F16

    def test_float32_changes_nothing(self, params, batch):
        left = jax.value_and_grad(apply_policy(loss, "float32"))(params, batch)
        assert same(left, jax.value_and_grad(loss)(params, batch))

    def test_strict_promotion(self, params, batch):
        with jax.numpy_dtype_promotion("strict"):
            assert jax.jit(apply_policy(loss, "fp16"))(params, batch).dtype == F32

    def test_one_compilation(self, params, batch):
        traced = []

        def counted(p, b):
            traced.append(1)
            return loss(p, b)

        step = jax.jit(apply_policy(counted, "fp16"))
        for _ in range(3):
            step(params, batch)
        assert len(traced) == 1

    def test_x64(self, params, batch):
        with jax.enable_x64(True):
            assert apply_policy(loss, "float64")(params, batch).dtype == jnp.float64


class TestTheFunctionItself:
    def test_replaced_removed_pickled(self):
        mixed = apply_policy(apply_policy(loss, "bf16"), "fp16")
        assert mixed.applied.policy == polyamp.Policy.parse("fp16")
        assert mixed.__name__ == "loss"
        assert remove_policy(mixed) is loss
        assert remove_policy(loss) is loss
        again = pickle.loads(pickle.dumps(mixed))
        assert again.fn is loss
        assert again.applied == mixed.applied

    def test_a_method(self):
        class Model:
            half = apply_policy(lambda self, x: x * self.k, "mixed_float16")
            k = 2

        assert Model().half(jnp.ones(2)).dtype == F16

    def test_a_map_for_the_whole(self):
        rules = polyamp.PolicyMap({"**": "bf16-true"}, default="fp16")
        assert apply_policy(lambda x: x, rules)(jnp.ones(2)).dtype == BF16


class TestRefused:
    @pytest.mark.parametrize(
        ("model", "policy", "words"),
        [
            (loss, "mixd_float16", "did you mean"),
            (loss, "tf32", "tfloat32"),
            (loss, "O2", "master"),
            (loss, "c=f16,store=bf16", "store_dtype"),
            (loss, "params=float32,compute=float8_e4m3fn,output=float32", "float8"),
            (loss, "float64", "jax_enable_x64"),
            (loss, polyamp.PolicyMap({"head": "fp16"}), "no module matches 'head'"),
            (loss, polyamp.PolicyMap({"op:softmax": "fp16"}), "op:softmax"),
            (3, "fp16", "needs a function"),
            (dict, "fp16", "got the class dict"),
        ],
    )
    def test_refuses(self, model, policy, words):
        with pytest.raises(polyamp.PolicyError, match=words):
            apply_policy(model, policy)


class TestWhatAFunctionCannotCover:
    """Four times 300: the sum of squares, 360000, is beyond float16."""

    def test_a_float16_norm_loses_its_gradient(self):
        grad = jax.grad(apply_policy(jnp.linalg.norm, "fp16"))(jnp.full(4, 300.0))
        assert grad.tolist() == [0, 0, 0, 0]

    def test_float32_by_a_function_of_its_own(self):
        inner = apply_policy(jnp.linalg.norm, "float32")
        grad = jax.grad(apply_policy(lambda x: inner(x), "fp16"))(jnp.full(4, 300.0))
        assert grad.tolist() == [0.5, 0.5, 0.5, 0.5]


def test_no_module_system_is_imported_for_a_function():
    code = (
        "import sys, jax.numpy as jnp; from polyamp_jax._modules import apply_policy;"
        "from polyamp_jax import _describe;"
        "apply_policy(lambda x: x, 'fp16')(jnp.ones(2));"
        "print(sorted({'equinox', 'jmp'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_flax_without_equinox():
    code = (
        "import sys; sys.modules['equinox'] = None\n"
        "import jax, jax.numpy as jnp, flax.linen as nn, flax.nnx as nnx\n"
        "from polyamp_jax._modules import apply_policy\n"
        "m = apply_policy(nn.Dense(2), 'fp16'); v = m.init(jax.random.key(0), jnp.ones((1, 3)))\n"
        "n = apply_policy(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), 'mixed_float16')\n"
        "print(m.apply(v, jnp.ones((1, 3))).dtype, n(jnp.ones((1, 3))).dtype)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["float32", "float16"]
