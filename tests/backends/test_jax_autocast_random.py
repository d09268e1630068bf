"""autocast on JAX over random programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax_autocast_cases import equal, normal

from polyamp_jax._autocast import autocast
from polyamp_jax._interpret import Interpreter

N = 4
"""Every value of a random program is an N x N matrix of numbers of order 1."""


def _small(x):
    return x / (1.0 + jnp.max(jnp.abs(x)))


UNARY = {
    "tanh": jnp.tanh,
    "exp": lambda x: jnp.exp(-jnp.abs(x)),
    "log": lambda x: jnp.log1p(x * x),
    "softmax": jax.nn.softmax,
    "log_softmax": lambda x: 0.3 * jax.nn.log_softmax(x),
    "norm": lambda x: x / (1.0 + jnp.linalg.norm(x)),
    "var": lambda x: x - jnp.var(x),
    "mean": lambda x: x + jnp.mean(x, axis=1, keepdims=True),
    "cumsum": lambda x: 0.25 * jnp.cumsum(x, axis=0),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "where": lambda x: jnp.where(x > 0, x, -0.5 * x),
    "transpose": lambda x: x.T,
    "gather": lambda x: x[jnp.array([2, 0, 3, 1])],
    "roll": lambda x: jnp.roll(x, 1, axis=0),
    "concatenate": lambda x: jnp.concatenate([x[2:], x[:2]]),
    "set": lambda x: x.at[0].set(x[1]),
    "eps": lambda x: x / jnp.sqrt(jnp.mean(x**2) + 1e-6),
    "half": lambda x: x.astype(jnp.float16).astype(jnp.float32),
    "jit": jax.jit(lambda x: x * jnp.eye(N) + x),
    "remat": jax.checkpoint(lambda x: jnp.sin(x) @ x * 0.25),
    "scan": lambda x: lax.scan(lambda c, r: (0.5 * c + r, c), x[0], x)[1],
    "while": lambda x: lax.fori_loop(0, 2, lambda i, c: _small(c @ x), x),
    "cond": lambda x: lax.cond(jnp.max(x) > -2, lambda x: 0.25 * x @ x, jnp.cos, x),
    "vmap": jax.vmap(lambda r: r * jnp.max(r)),
    "grad": lambda x: jax.grad(lambda y: jnp.sum(jnp.tanh(y @ x)))(x),
}
BINARY = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "max": jnp.maximum,
    "matmul": jnp.matmul,
    "matmul ": jnp.matmul,
    "einsum": lambda x, y: jnp.einsum("ij,kj->ik", x, y),
}

steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(sorted(UNARY)), st.integers(0, 9)),
        st.tuples(st.sampled_from(sorted(BINARY)), st.integers(0, 9), st.integers(0, 9)),
    ),
    min_size=1,
    max_size=5,
)


def program(plan, errors=None):
    """A function of two matrices that carries out the plan and returns every value it made.

    `errors`, one matrix for each step, are added to what the steps give.
    """

    def f(x, w):
        values = [x, w]
        for number, (name, *places) in enumerate(plan):
            inputs = [values[p % len(values)] for p in places]
            made = _small({**UNARY, **BINARY}[name](*inputs))
            values.append(made if errors is None else made + errors[number])
        return values[2:]

    return f


TWICE = {"grad", "remat", "while"}
"""Steps of two matrix products."""


def bounds(plan, x, w, unit):
    """How far each value may be from the one in float32, to first order.

    Of operands up to 1, each rounded by at most half a unit, a sum of N products misses by N units,
    and by one more where it is rounded itself; what else a step rounds is at most another unit.
    `_small` enlarges no error. The program's own derivative carries the errors of all steps on:
    |value - exact| <= sum over steps of |d value / d error| * error.
    """
    zeros = jnp.zeros((len(plan), N, N))

    @jax.jit
    @jax.jacfwd
    def carried(errors):
        return jnp.stack(program(plan, errors)(x, w))

    units = jnp.array([(1 + (name in TWICE)) * (N + 1) + 1 for name, *_ in plan]) * unit
    return jnp.einsum("vijskl,s->vij", jnp.abs(carried(zeros)), units)


def loss(f):
    return lambda x, w: jnp.sum(sum(f(x, w)))


@settings(max_examples=20)
@given(steps, st.integers(0, 99))
def test_in_float32_a_random_program_is_the_plain_one(plan, seed):
    x, w = normal(N, N, seed=seed), normal(N, N, seed=seed + 100)
    gradient = jax.grad(loss(program(plan)), (0, 1))
    closed = jax.make_jaxpr(gradient)(x, w)
    interpreter = Interpreter("float32")
    run = jax.jit(lambda *args: tuple(interpreter.run(closed.jaxpr, closed.consts, args)))
    equal(run(x, w), jax.jit(gradient)(x, w))


@settings(max_examples=20)
@given(steps, st.integers(0, 99), st.sampled_from(["fp16", "bf16"]))
def test_in_a_low_dtype_a_random_program_is_near_the_plain_one(plan, seed, policy):
    x, w = (jnp.clip(normal(N, N, seed=s), -1, 1) for s in (seed, seed + 100))
    f = program(plan)
    got = jax.jit(autocast(f, policy))(x, w)
    assert {v.dtype for v in got} == {jnp.dtype("float32")}
    unit = 2.0**-10 if policy == "fp16" else 2.0**-7
    for value, want, bound in zip(got, f(x, w), bounds(plan, x, w, unit), strict=True):
        assert (np.abs(value - want) <= bound).all()
    for grad in jax.jit(jax.grad(loss(autocast(f, policy)), (0, 1)))(x, w):
        assert grad.dtype == jnp.float32
        assert jnp.isfinite(grad).all()
