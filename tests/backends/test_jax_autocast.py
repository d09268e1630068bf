"""autocast on JAX: which operation runs in which dtype, and the public function itself."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax_autocast_cases import dtypes, equal, full, half, matmuls, named, normal, traced

import polyamp
from polyamp_jax._autocast import autocast
from polyamp_jax._interpret import Interpreter

LOW = "float16 float16 -> float16"
PLAIN = "float32 float32 -> float32"


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def matmul(x, w):
    return x @ w


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1,), "SAME")


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_matmul_runs_in_the_compute_dtype(name):
    policy = f"p=float32,c={name},o=float32"
    x, w = normal(3, 4), normal(4, 5, seed=1)
    assert matmuls(autocast(matmul, policy), x, w) == [f"{name} {name} -> {name}"]
    out = autocast(matmul, policy)(x, w)
    equal(out, full(x.astype(name) @ w.astype(name)))


def test_a_convolution_runs_in_the_compute_dtype():
    x, w = normal(2, 3, 8), normal(4, 3, 3, seed=1)
    assert matmuls(autocast(conv, "fp16"), x, w) == [LOW]
    equal(autocast(conv, "fp16")(x, w), full(conv(half(x), half(w))))
    grad = jax.grad(lambda w: autocast(conv, "fp16")(x, w).sum())(w)
    equal(grad, jax.grad(lambda w: full(conv(half(x), half(w))).sum())(w))


@pytest.mark.parametrize("w_dtype", ["float32", "float16"])
def test_gradients_run_in_the_compute_dtype_and_have_the_parameters_dtype(w_dtype):
    x, w = normal(3, 4), normal(4, 5, seed=1)
    gradient = jax.grad(lambda x, w: jnp.sum(autocast(matmul, "fp16")(x, w)), argnums=(0, 1))
    assert matmuls(gradient, x, w) == [LOW] * 3
    assert [g.dtype for g in gradient(x, w)] == [jnp.float32, jnp.float32]


SENSITIVE = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "prod": jnp.prod,
    "cumsum": jnp.cumsum,
    "var": jnp.var,
    "std": jnp.std,
    "norm": jnp.linalg.norm,
    "sum of squares": lambda h: jnp.sum(h * h),
    "exp": jnp.exp,
    "log": lambda h: jnp.log(jnp.abs(h)),
    "power": lambda h: h**2,
    "pow": lambda h: jnp.power(jnp.abs(h), 0.3),
    "rsqrt": lambda h: lax.rsqrt(jnp.abs(h)),
    "logistic": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "logsumexp": jax.nn.logsumexp,
    "mse": lambda h: jnp.mean((h - 1.0) ** 2),
    "average pool": lambda h: lax.reduce_window(h, 0.0, lax.add, (1, 2), (1, 2), "VALID"),
}


@pytest.mark.parametrize("name", SENSITIVE)
def test_a_sensitive_operation_on_a_low_matmul_is_the_float32_one(name):
    x, w = normal(4, 4), normal(4, 4, seed=1)
    operation = SENSITIVE[name]
    got = jax.jit(autocast(lambda x, w: operation(x @ w), "fp16"))(x, w)
    want = jax.jit(lambda x, w: operation(full(half(x) @ half(w))))(x, w)
    equal(got, want)


STAY_LOW = {
    "add": lambda h: h + h,
    "scale": lambda h: 2.0 * h,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "transpose": lambda h: h.T,
    "reshape": lambda h: h.reshape(-1),
    "take": lambda h: h[jnp.array([1, 0])],
    "slice": lambda h: h[1:, ::2],
    "concatenate": lambda h: jnp.concatenate([h, h]),
    "stack": lambda h: jnp.stack([h, h]),
    "pad": lambda h: jnp.pad(h, 1),
    "max": lambda h: h.max(axis=0),
    "where": lambda h: jnp.where(h > 0, h, 0.0),
    "clip": lambda h: jnp.clip(h, -1.0, 1.0),
    "zeros": lambda h: h + jnp.zeros_like(h),
    "sort": jnp.sort,
    "split": lambda h: jnp.split(h, 2)[1],
}


SPREAD = {"convert_element_type", "broadcast_in_dim"}
RELU = {"custom_jvp_call", "jit", "max"}


@pytest.mark.parametrize("name", STAY_LOW)
def test_other_operations_stay_in_the_dtype_that_comes(name):
    x, w = normal(4, 4), normal(4, 4, seed=1)
    policy = "p=float32,c=float16,o=float16"
    operation = STAY_LOW[name]
    got = autocast(lambda x, w: operation(x @ w), policy)
    equal(got(x, w), operation(half(x) @ half(w)))
    wide = [e for e in traced(got, x, w) if any(v.aval.dtype == jnp.float32 for v in e.outvars)]
    assert {e.primitive.name for e in wide} <= SPREAD | (RELU if name == "relu" else set())


def test_mixed_operands_meet_in_the_widest_dtype():
    x, w, b = normal(3, 4), normal(4, 4, seed=1), normal(4, seed=2)
    got = autocast(lambda x, w, b: x @ w + b, "fp16")(x, w, b)
    equal(got, full(half(x) @ half(w)) + b)
    both = autocast(lambda x, w: x.astype(jnp.bfloat16) + (x @ w).astype(jnp.bfloat16), "fp16")
    assert dtypes(named(traced(both, x, w), "add")[0]) == "bfloat16 bfloat16 -> bfloat16"


@pytest.mark.parametrize(
    ("constant", "dtype"),
    [
        (2.0, "float16"),
        (1e-8, "float32"),
        (-1e9, "float32"),
        (0.0, "float16"),
        (jnp.inf, "float16"),
        (6e-5, "float32"),
    ],
)
def test_a_constant_widens_only_what_float16_cannot_hold(constant, dtype):
    x = normal(4, 4)
    eqns = traced(autocast(lambda x: jnp.maximum(x @ x + constant, constant), "fp16"), x)
    assert dtypes(named(eqns, "add")[0]) == f"{dtype} {dtype} -> {dtype}"
    spread = traced(autocast(lambda x: x @ x + jnp.full((4, 4), constant), "fp16"), x)
    assert dtypes(named(spread, "add")[0]) == f"{dtype} {dtype} -> {dtype}"


def test_the_result_of_relu_returns_to_the_dtype_that_came():
    eqns = traced(autocast(lambda x: 2.0 * jax.nn.relu(x @ x), "fp16"), normal(4, 4))
    assert dtypes(named(eqns, "mul")[0]) == LOW


def test_what_is_also_used_elsewhere_is_computed_in_the_dtype_that_comes():
    def f(x, *, both):
        scaled = 3.0 * (x @ x)
        return jnp.exp(scaled), scaled if both else None

    for both, want in ((True, LOW), (False, PLAIN)):
        eqns = traced(autocast(functools.partial(f, both=both), "fp16"), normal(4, 4))
        assert dtypes(named(eqns, "mul")[0]) == want


def test_a_sum_of_squares_of_a_float16_argument_does_not_underflow():
    x = jnp.full(16, 1e-4, jnp.float16)
    got = autocast(lambda x: jnp.sum(x * x), "fp16")(x)
    np.testing.assert_allclose(got, 16 * float(x[0]) ** 2, rtol=1e-6)


def test_a_weight_used_twice_is_cast_once():
    eqns = traced(autocast(lambda x, w: (x @ w) @ w + x @ w, "fp16"), normal(4, 4), normal(4, 4))
    casts = [
        e for e in named(eqns, "convert_element_type") if e.invars[0].aval.dtype == jnp.float32
    ]
    assert len(casts) == 2


class TestExplicit:
    """What the user wrote himself is kept."""

    x = normal(4, 4)

    def test_preferred_element_type_of_low_operands(self):
        def f(x):
            y = x.astype(jnp.bfloat16)
            return jnp.matmul(y, y, preferred_element_type=jnp.float32)

        assert matmuls(autocast(f, "fp16"), self.x) == ["bfloat16 bfloat16 -> float32"]
        equal(autocast(f, "fp16")(self.x), f(self.x))

    def test_preferred_element_type_narrower_than_float32(self):
        def f(x):
            return jnp.matmul(x, x, preferred_element_type=jnp.bfloat16)

        assert matmuls(autocast(f, "fp16"), self.x) == matmuls(f, self.x)

    @pytest.mark.parametrize("precision", [lax.Precision.HIGHEST, lax.Precision.DEFAULT])
    def test_precision(self, precision):
        f = autocast(lambda x: jnp.matmul(x, x, precision=precision), "fp16")
        (dot,) = named(traced(f, self.x), "dot_general")
        assert dot.params["precision"] == (precision, precision)
        assert dtypes(dot) == LOW

    def test_an_algorithm_names_its_own_dtypes(self):
        f = autocast(
            lambda x: jnp.matmul(x, x, precision=lax.DotAlgorithmPreset.F32_F32_F32), "fp16"
        )
        assert matmuls(f, self.x) == [PLAIN]

    def test_the_dtype_of_a_product(self):
        f = autocast(lambda x: lax.mul(x @ x, x @ x, out_dtype=jnp.float32), "fp16")
        assert dtypes(named(traced(f, self.x), "mul")[0]) == PLAIN

    def test_a_cast_to_float32_stays(self):
        f = autocast(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32) * 2.0, "fp16")
        (mul,) = named(traced(f, self.x), "mul")
        assert dtypes(mul) == PLAIN

    def test_a_cast_to_a_low_dtype_stays(self):
        policy = "p=float32,c=float16,o=float32"
        f = autocast(lambda x: jnp.exp(x @ x).astype(jnp.bfloat16) * 2.0, policy)
        (mul,) = named(traced(f, self.x), "mul")
        assert dtypes(mul) == "bfloat16 bfloat16 -> bfloat16"

    def test_a_cast_to_an_integer_and_the_bits_of_a_float(self):
        f = lambda x: ((x @ x).astype(jnp.int32), lax.bitcast_convert_type(x @ x, jnp.int32))  # noqa: E731
        whole, bits = autocast(f, "fp16")(self.x)
        low = half(self.x) @ half(self.x)
        equal(whole, low.astype(jnp.int32))
        equal(bits, lax.bitcast_convert_type(full(low), jnp.int32))


def test_float64_complex_integers_and_keys_are_left_alone():
    def f(x, z, i, key):
        return x @ x, z @ z, i @ i, jax.random.split(key)

    args = (normal(2, 2), lax.complex(normal(2, 2), normal(2, 2)), jnp.arange(4).reshape(2, 2))
    got = autocast(f, "fp16")(*args, jax.random.key(0))
    want = f(*args, jax.random.key(0))
    equal(got[1:3], want[1:3])
    assert (got[3] == want[3]).all()
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 2)))
        assert x.dtype == jnp.float64
        policy = "p=float32,c=float16,o=float32"
        assert matmuls(autocast(matmul, policy), x, x) == ["float64 float64 -> float64"]


def test_random_numbers_are_the_plain_ones():
    def f(key):
        return jax.random.normal(key, (8,)), jax.random.bernoulli(key, 0.3, (8,))

    equal(autocast(f, "fp16")(jax.random.key(1)), f(jax.random.key(1)))


@pytest.mark.parametrize("solve", [jnp.linalg.inv, jnp.linalg.cholesky, jnp.fft.rfft])
def test_what_is_on_no_list_runs_as_it_was_traced(solve):
    x = normal(4, 4)
    spd = lambda x: x @ x.T + 8.0 * jnp.eye(4)  # noqa: E731
    got = jax.jit(autocast(lambda x: jnp.abs(solve(spd(x))), "fp16"))(x)
    want = jax.jit(lambda x: jnp.abs(solve(full(half(x) @ half(x).T) + 8.0 * jnp.eye(4))))(x)
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("x_dtype", ["float16", "float32"])
def test_the_gradient_of_a_norm_is_not_zero(x_dtype):
    x = jnp.full(16, 1e-4, x_dtype)
    gradient = jax.grad(autocast(lambda x: jnp.linalg.norm(x @ jnp.eye(16, dtype=x.dtype)), "fp16"))
    np.testing.assert_allclose(full(gradient(x)), np.full(16, 0.25), rtol=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_log_softmax_over_many_classes_is_finite(dtype):
    logits = jnp.zeros((1, 2**17), dtype)
    got = jax.jit(autocast(lambda x: jax.nn.log_softmax(x * 1.0), "fp16"))(logits)
    np.testing.assert_allclose(got, np.full((1, 2**17), -17 * np.log(2)), rtol=1e-6)


class TestCall:
    """Arguments, outputs, policies and errors."""

    def test_outputs_have_the_output_dtype(self):
        x = normal(2, 2)
        for name, want in {
            "fp16": "float32",
            "mixed_float16": "float16",
            "mixed_bfloat16": "bfloat16",
            "float32": "float32",
        }.items():
            out = autocast(lambda x: {"a": x @ x, "n": x.astype(jnp.int32), "x": x}, name)(x)
            assert {k: str(v.dtype) for k, v in out.items()} == {"a": want, "n": "int32", "x": want}

    def test_pytrees_keywords_and_static_arguments(self):
        def f(tree, scale, *, mode, extra=None, flag):
            out = tree["w"] @ tree["w"] * scale if flag else tree["w"]
            return {"out": out, "mode": mode, "extra": extra, "n": 3, "f": 1.5}

        call = functools.partial(f, mode="mean", flag=True)
        out = autocast(call, "fp16")({"w": normal(2, 2)}, 2.0)
        assert (out["mode"], out["extra"], out["n"], out["f"]) == ("mean", None, 3, 1.5)
        equal(out["out"], full(half(normal(2, 2)) @ half(normal(2, 2)) * 2.0))
        plain = autocast(f, "fp16")({"w": normal(2, 2)}, 2.0, mode=max, flag=False)
        assert plain["mode"] is max

    def test_jit_with_static_names_traces_once(self):
        count = 0

        def f(x, mode):
            nonlocal count
            count += 1
            return jnp.exp(x @ x) if mode == "exp" else x

        jitted = jax.jit(autocast(f, "fp16"), static_argnames="mode")
        for i in range(3):
            jitted(normal(2, 2, seed=i), mode="exp")
        assert count == 1

    def test_donated_arguments(self):
        x = normal(8, 8)
        want = autocast(matmul, "fp16")(x, x)
        w = jnp.array(x)
        got = jax.jit(autocast(matmul, "fp16"), donate_argnums=1)(x, w)
        equal(got, want)
        assert w.is_deleted()

    def test_weak_types_and_numpy_arrays(self):
        weak = jnp.asarray(2.0)
        assert weak.aval.weak_type
        x = normal(2, 2)
        got = autocast(lambda x, s: (x @ x) * s, "fp16")(np.asarray(x), weak)
        equal(got, full(half(x) @ half(x)) * 2.0)

    def test_closed_over_tracers(self):
        x = normal(3, 3)
        grad = jax.jit(jax.grad(lambda w: jnp.sum(autocast(lambda x: x @ w, "fp16")(x))))(x)
        equal(grad, jax.grad(lambda w: jnp.sum(full(half(x) @ half(w))))(x))

    @pytest.mark.parametrize("policy", ["float32", "no", "32-true"])
    def test_a_float32_policy_is_the_plain_function(self, policy):
        f = lambda x, w: jnp.sum(jax.nn.softmax(jnp.tanh(x @ w) @ w) ** 2)  # noqa: E731
        x, w = normal(4, 4), normal(4, 4, seed=1)
        equal(jax.grad(autocast(f, policy), (0, 1))(x, w), jax.grad(f, (0, 1))(x, w))
        closed = jax.make_jaxpr(f)(x, w)
        (same,) = Interpreter("float32").run(closed.jaxpr, closed.consts, [x, w])
        equal(same, f(x, w))

    def test_an_inner_autocast_wins(self):
        x = normal(4, 4)
        inner = lambda policy: autocast(matmul, policy)  # noqa: E731
        outer = lambda policy, f: autocast(lambda x: f(x @ x, x), policy)  # noqa: E731
        bf = "bfloat16 bfloat16 -> bfloat16"
        assert matmuls(outer("fp16", inner("float32")), x) == [LOW, PLAIN]
        assert matmuls(outer("fp16", inner("bf16")), x) == [LOW, bf]
        assert matmuls(outer("float32", inner("bf16")), x) == [PLAIN, bf]
        gradient = jax.grad(lambda x: jnp.sum(inner("float32")(x @ x, x)))
        found = matmuls(autocast(gradient, "fp16"), x)
        assert (found.count(LOW), found.count(PLAIN)) == (3, 3)
        jitted = jax.jit(lambda x: inner("float32")(x, x))
        jitted(x)
        assert matmuls(outer("fp16", lambda h, x: jitted(h)), x) == [LOW, PLAIN]

    def test_the_function_comes_first(self):
        with pytest.raises(TypeError, match=r"autocast\(fun, 'fp16'\).*'fp16' of type str"):
            autocast("fp16", matmul)

    @pytest.mark.parametrize(
        "policy", ["16-true", "O2", "float64", "tf32", "c=fp8_e5m2", "c=bf16,store=f16"]
    )
    def test_a_policy_that_cannot_be_applied(self, policy):
        with pytest.raises(polyamp.PolicyError, match=r"jax\.autocast"):
            autocast(matmul, policy)

    def test_a_changed_argument_is_an_error(self):
        def f(state, x):
            state["mean"] = jnp.mean(x)
            return x @ x

        state = {"mean": jnp.zeros(())}
        with pytest.raises(TypeError, match=r"\[0\]\['mean'\].*would be lost"):
            autocast(f, "fp16")(state, normal(2, 2))
        equal(state, {"mean": jnp.zeros(())})
