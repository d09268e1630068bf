"""autocast on JAX under and around transformations, and through control flow."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax_autocast_cases import close, dtypes, equal, full, half, matmuls, named, normal, traced

from polyamp_jax._autocast import autocast

LOW = "float16 float16 -> float16"
PLAIN = "float32 float32 -> float32"


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


def low(x, w):
    """A matmul as autocast runs it, written by hand."""
    return full(half(x) @ half(w))


def squared(x):
    """The product of a matrix with itself, cast once."""
    return (lambda h: full(h @ h))(half(x))


def mlp(params, x):
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def mlp_by_hand(params, x):
    for w, b in params[:-1]:
        x = jax.nn.relu(low(x, w) + b)
    w, b = params[-1]
    return low(x, w) + b


def layers(*sizes):
    return [
        (normal(i, o, seed=k, scale=i**-0.5), normal(o, seed=k + 9))
        for k, (i, o) in enumerate(itertools.pairwise(sizes))
    ]


def loss_of(model):
    return lambda params, x: jnp.mean((model(params, x) - 1.0) ** 2)


PARAMS, X = layers(6, 16, 16, 3), normal(8, 6, seed=5)


@pytest.mark.parametrize("jit", [True, False])
def test_an_mlp_is_the_one_cast_by_hand(jit):
    compiled = jax.jit if jit else lambda f: f
    got = compiled(jax.value_and_grad(autocast(loss_of(mlp), "fp16")))(PARAMS, X)
    want = compiled(jax.value_and_grad(loss_of(mlp_by_hand)))(PARAMS, X)
    equal(got, want)
    close(got, jax.value_and_grad(loss_of(mlp))(PARAMS, X), 0.01)


def test_autocast_around_a_gradient():
    got = jax.jit(autocast(jax.grad(loss_of(mlp)), "fp16"))(PARAMS, X)
    close(got, jax.grad(loss_of(mlp))(PARAMS, X), 0.01)
    found = matmuls(autocast(jax.grad(loss_of(mlp)), "fp16"), PARAMS, X)
    assert found == [LOW] * 8


def attention(q, k, v, mask):
    scores = jnp.einsum("qd,kd->qk", q, k) * 0.25
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return jnp.einsum("qk,kd->qd", weights, v)


def attention_by_hand(q, k, v, mask):
    q, k, v = half(q), half(k), half(v)
    scores = full(jnp.einsum("qd,kd->qk", q, k) * jnp.float16(0.25))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return full(jnp.einsum("qk,kd->qd", half(weights), v))


def test_attention_is_the_one_cast_by_hand():
    qkv = [normal(5, 16, seed=s) for s in range(3)]
    mask = jnp.tril(jnp.ones((5, 5), bool))
    gradient = lambda f: jax.jit(jax.grad(lambda *a: jnp.sum(f(*a) ** 2), (0, 1, 2)))  # noqa: E731
    equal(autocast(attention, "fp16")(*qkv, mask), attention_by_hand(*qkv, mask))
    got = gradient(autocast(attention, "fp16"))(*qkv, mask)
    equal(got, gradient(attention_by_hand)(*qkv, mask))
    close(got, gradient(attention)(*qkv, mask), 0.02)


def test_jax_nn_attention():
    q, k, v = (normal(1, 5, 2, 8, seed=s) for s in range(3))
    f = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    assert matmuls(autocast(f, "fp16"), q, k, v) == [LOW] * 2
    close(autocast(f, "fp16")(q, k, v), f(q, k, v), 5e-3)


def test_a_convolutional_net_is_the_one_cast_by_hand():
    def net(conv, w, kernel, x):
        h = jax.nn.relu(conv(x, kernel))
        h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 1, 2), (1, 1, 2), "VALID")
        return jnp.sum((h.reshape(h.shape[0], -1) @ w) ** 2)

    def plain(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1,), "SAME")

    def by_hand(w, kernel, x):
        h = jax.nn.relu(plain(half(x), half(kernel)))
        h = lax.reduce_window(h, np.float16(-np.inf), lax.max, (1, 1, 2), (1, 1, 2), "VALID")
        return jnp.sum(full(h.reshape(h.shape[0], -1) @ half(w)) ** 2)

    args = (normal(16, 3), normal(4, 2, 3, seed=1), normal(3, 2, 8, seed=2))
    got = jax.jit(jax.grad(autocast(functools.partial(net, plain), "fp16"), (0, 1)))(*args)
    equal(got, jax.jit(jax.grad(by_hand, (0, 1)))(*args))


class TestLoops:
    def test_scan_keeps_the_dtype_of_its_carry(self):
        w, u, xs = normal(4, 4, scale=0.5), normal(3, 4, seed=1), normal(6, 3, seed=2)

        def rnn(matmul, w, u, xs):
            def step(h, x):
                h = jnp.tanh(matmul(h, w) + matmul(x, u))
                return h, matmul(h, w)

            return lax.scan(step, jnp.zeros(4), xs)

        plain, hand = (functools.partial(rnn, f) for f in (jnp.matmul, low))
        (scan,) = named(traced(autocast(plain, "fp16"), w, u, xs), "scan")
        body = scan.params["jaxpr"]
        assert [str(a.dtype) for a in body.out_avals] == ["float32", "float16"]
        assert [dtypes(e) for e in named(body.jaxpr.eqns, "dot_general")] == [LOW] * 3

        def gradient(f):
            return jax.jit(jax.grad(lambda w, u: jnp.sum(f(w, u, xs)[1] ** 2), (0, 1)))(w, u)

        close(autocast(plain, "fp16")(w, u, xs), hand(w, u, xs), 2e-3)
        close(gradient(autocast(plain, "fp16")), gradient(hand), 5e-3)

    def test_a_low_value_enters_the_carry_in_float32(self):
        x = normal(3, 3)
        f = lambda x: lax.scan(lambda c, _: (c + 1e-4, None), x @ x, None, length=50)[0]  # noqa: E731
        close(autocast(f, "fp16")(x), low(x, x) + 5e-3, 1e-6)

    def test_scan_with_reverse_unroll_and_associative_scan(self):
        xs = normal(5, 2, 2)
        f = lambda xs: lax.scan(lambda c, x: (c @ x, c), jnp.eye(2), xs, reverse=True, unroll=2)  # noqa: E731
        close(autocast(f, "fp16")(xs), f(xs), 5e-3)
        g = functools.partial(lax.associative_scan, jnp.matmul)
        assert set(matmuls(autocast(g, "fp16"), xs)) == {LOW}
        close(autocast(g, "fp16")(xs), g(xs), 5e-3)

    def test_while_and_fori(self):
        x = normal(3, 3, scale=0.4)

        def f(x):
            def more(state):
                return (state[1] < 4) & (jnp.max(jnp.abs(state[0] @ x)) > 1e-6)

            return lax.while_loop(more, lambda s: (s[0] @ x, s[1] + 1), (x @ x, 0))

        found = traced(autocast(f, "fp16"), x)
        (loop,) = named(found, "while")
        assert matmuls(autocast(f, "fp16"), x).count(PLAIN) == 1
        assert [dtypes(e) for e in named(loop.params["body_jaxpr"].jaxpr.eqns, "dot_general")] == [
            LOW
        ]
        out, count = autocast(f, "fp16")(x)
        assert (out.dtype, int(count)) == (jnp.float32, 4)
        close(out, f(x)[0], 5e-3)
        g = lambda x: lax.fori_loop(0, 3, lambda i, h: h @ x, x)  # noqa: E731
        close(
            jax.grad(lambda x: autocast(g, "fp16")(x).sum())(x),
            jax.grad(lambda x: g(x).sum())(x),
            5e-3,
        )

    @pytest.mark.parametrize("index", [0, 1, 2])
    def test_switch_returns_what_its_branches_were_traced_with(self, index):
        x = normal(3, 3)
        branches = [lambda x: x @ x, jnp.exp, lambda x: x]
        f = lambda i, x: lax.switch(i, branches, x @ x)  # noqa: E731
        got = jax.jit(autocast(f, "fp16"))(index, x)
        h = low(x, x)
        equal(got, [low(h, h), jnp.exp(h), h][index])

    def test_the_gradient_of_cond(self):
        x = normal(3, 3)
        f = lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: 2.0 * x, x).sum()  # noqa: E731
        hand = lambda x: lax.cond(x[0, 0] > 0, squared, lambda x: 2.0 * x, x).sum()  # noqa: E731
        for sign in (1.0, -1.0):
            equal(jax.grad(autocast(f, "fp16"))(sign * x), jax.grad(hand)(sign * x))

    def test_map(self):
        xs = normal(3, 2, 2)
        got = autocast(lambda xs: lax.map(lambda x: x @ x, xs), "fp16")(xs)
        equal(got, full(jnp.stack([half(x) @ half(x) for x in xs])))


class TestTransformations:
    @pytest.mark.parametrize(
        "policy",
        [None, jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.nothing_saveable],
    )
    @pytest.mark.parametrize("inside", [True, False])
    def test_remat_gives_the_gradients_without_it(self, policy, inside):
        remat = functools.partial(jax.checkpoint, policy=policy)
        loss = loss_of(mlp)
        f = autocast(remat(loss), "fp16") if inside else remat(autocast(loss, "fp16"))
        equal(jax.grad(f)(PARAMS, X), jax.grad(autocast(loss, "fp16"))(PARAMS, X))

    def test_remat_of_a_closure_and_named_values(self):
        w = normal(4, 4)
        policy = jax.checkpoint_policies.save_only_these_names("h")

        def f(x):
            def block(x):
                h = checkpoint_name(jnp.tanh(x @ w), "h")
                return jnp.sum(h @ w)

            return jax.checkpoint(block, policy=policy)(x)

        plain = lambda x: jnp.sum(jnp.tanh(x @ w) @ w)  # noqa: E731
        gradient = jax.grad(autocast(f, "fp16"))
        equal(gradient(w), jax.grad(autocast(plain, "fp16"))(w))
        assert matmuls(gradient, w) == [LOW] * len(matmuls(jax.grad(f), w))

    def test_vmap_of_grad_and_grad_of_vmap(self):
        loss = autocast(loss_of(mlp), "fp16")
        per_example = jax.vmap(jax.grad(loss), (None, 0))(PARAMS, X[:, None])
        loop = [jax.grad(loss)(PARAMS, x[None]) for x in X]
        close(per_example, jax.tree.map(lambda *g: jnp.stack(g), *loop), 2e-3)
        inside = autocast(jax.vmap(loss_of(mlp), (None, 0)), "fp16")
        close(inside(PARAMS, X[:, None]), jax.vmap(loss, (None, 0))(PARAMS, X[:, None]), 2e-3)

    def test_jvp_and_hessian_vector_product(self):
        f, t = autocast(loss_of(mlp), "fp16"), jax.tree.map(jnp.ones_like, PARAMS)
        one = lambda f: lambda p: f(p, X)  # noqa: E731
        got, want = (jax.jvp(one(g), (PARAMS,), (t,)) for g in (f, loss_of(mlp)))
        close(got, want, 0.02)
        got, want = (jax.jvp(jax.grad(one(g)), (PARAMS,), (t,)) for g in (f, loss_of(mlp)))
        close(got, want, 0.05)

    def test_a_nested_jit_keeps_its_name_and_its_parameters(self):
        @functools.partial(jax.jit, inline=False)
        def project(x, w):
            return x @ w

        f = autocast(lambda x, w: project(x, w) + project(x, w), "fp16")
        x = normal(3, 3)
        calls = [e for e in traced(f, x, x) if e.params.get("name") == "project"]
        assert [e.params["inline"] for e in calls] == [False, False]
        assert calls[0].params["jaxpr"] is calls[1].params["jaxpr"]
        assert dtypes(calls[0]) == "float32 float32 -> float16"
        equal(f(x, x), full(2.0 * (half(x) @ half(x))))

    def test_a_nested_jit_with_constants_static_arguments_and_shardings(self):
        table = normal(3, 3, seed=3)
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

        @functools.partial(jax.jit, static_argnames="n", out_shardings=device)
        def f(x, n):
            return (x @ table) * float(n)

        x = normal(3, 3)
        g = autocast(lambda x: f(x, n=3), "fp16")
        equal(g(x), full((half(x) @ half(table)) * jnp.float16(3)))
        equal(jax.jit(g)(x), g(x))
        equal(
            jax.grad(lambda x: g(x).sum())(x),
            jax.grad(lambda x: full((half(x) @ half(table)) * jnp.float16(3)).sum())(x),
        )

    def test_recursion_of_jits_remats_and_scans(self):
        w = normal(3, 4, 4, scale=0.5)

        @jax.jit
        def net(x, w):
            block = jax.checkpoint(jax.jit(lambda x, w: jax.nn.silu(x @ w)))
            return lax.scan(lambda x, w: (block(x, w), None), x, w)[0]

        x = normal(2, 4)
        gradient = lambda f: jax.grad(lambda w: jnp.sum(f(x, w) ** 2))(w)  # noqa: E731
        close(gradient(autocast(net, "fp16")), gradient(net), 0.01)
        assert set(matmuls(autocast(net, "fp16"), x, w)) == {LOW}

    def test_one_compilation_for_equal_calls_of_nested_functions(self):
        @jax.jit
        def f(x):
            return x @ x

        g = autocast(lambda x: f(x), "fp16")
        first, second = (traced(g, normal(2, 2, seed=s)) for s in (0, 1))
        (a,), (b,) = (named(e, "jit", "pjit") for e in (first, second))
        assert a.params["jaxpr"] is b.params["jaxpr"]

    def test_effects_run_with_the_dtypes_they_were_traced_with(self):
        seen = []

        def f(x):
            jax.debug.callback(lambda h: seen.append(h.dtype), x @ x)
            shape = jax.ShapeDtypeStruct((3, 3), jnp.float32)
            return jax.pure_callback(lambda h: np.asarray(h) * 2, shape, x @ x)

        out = jax.jit(autocast(f, "fp16"))(normal(3, 3))
        jax.effects_barrier()
        equal(out, 2.0 * low(normal(3, 3), normal(3, 3)))
        assert seen == [jnp.float32]

    def test_shard_map_around_autocast(self):
        mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("d")
        f = lambda x: lax.psum(jnp.maximum(x @ x.T, 0.0) * 2.0, "d")  # noqa: E731
        outside = jax.shard_map(
            autocast(f, "fp16"), mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec()
        )
        x = normal(2, 2)
        equal(outside(x), full(jnp.maximum(half(x) @ half(x).T, jnp.float16(0)) * jnp.float16(2)))
        inside = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec())
        assert matmuls(autocast(inside, "fp16"), x) == [PLAIN]
        equal(autocast(inside, "fp16")(x), inside(x))


class TestCustomRules:
    def test_custom_vjp_is_called_as_it_was_traced(self):
        seen = []

        @jax.custom_vjp
        def f(x):
            return x * 2.0

        def forward(x):
            seen.append(x.dtype)
            return f(x), x

        def backward(x, g):
            seen.extend([x.dtype, g.dtype])
            return (lax.dot(g, x),)

        f.defvjp(forward, backward)
        x = normal(3, 3)
        gradient = jax.grad(autocast(lambda x: jnp.sum(f(x @ x)), "fp16"))(x)
        assert set(seen) == {jnp.dtype("float32")}
        h = low(x, x)
        want = jax.vjp(squared, x)[1](lax.dot(jnp.ones((3, 3)), h))[0]
        equal(gradient, want)

    def test_custom_vjp_inside_jit_scan_and_remat(self):
        @jax.custom_vjp
        def clip(x):
            return x

        clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))

        def f(x):
            body = jax.checkpoint(jax.jit(lambda c: clip(c @ x)))
            return jnp.sum(lax.scan(lambda c, _: (body(c), None), x, None, length=2)[0])

        x = normal(3, 3, scale=0.5)
        close(jax.jit(jax.grad(autocast(f, "fp16")))(x), jax.grad(f)(x), 0.01)

    def test_custom_jvp_runs_in_float32(self):
        @jax.custom_jvp
        def f(x):
            return jnp.sin(x) @ x

        f.defjvp(lambda p, t: (f(*p), 3.0 * t[0]))
        x = normal(3, 3)
        call = autocast(lambda x: f(x @ x), "fp16")
        assert matmuls(call, x) == [LOW, PLAIN]
        equal(jax.jit(call)(x), jax.jit(lambda x: f(low(x, x)))(x))
        gradient = jax.grad(lambda x: jnp.sum(call(x)))(x)
        equal(gradient, jax.grad(lambda x: jnp.sum(3.0 * squared(x)))(x))

    @pytest.mark.parametrize(
        "name", ["relu", "relu6", "silu", "elu", "gelu", "selu", "softplus", "leaky_relu", "celu"]
    )
    def test_activations(self, name):
        act = getattr(jax.nn, name)
        x = normal(4, 4)
        f = autocast(lambda x: jnp.sum(act(x @ x)), "fp16")
        want = lambda x: jnp.sum(act(low(x, x)))  # noqa: E731
        close([f(x), jax.grad(f)(x)], [want(x), jax.grad(want)(x)], 3e-3)
