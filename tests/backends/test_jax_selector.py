"""The selector on JAX: what is measured, call by call."""

# ruff: noqa: F811
from __future__ import annotations

import functools
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="the test is about JAX")
import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax_selector_cases import (  # noqa: E402
    SCALE,
    TX,
    Case,
    Eqx,
    Linen,
    Nnx,
    X,
    case,  # noqa: F401
    close,
    expected,
    nnx_case,
    sampled,
)

import polyamp.jax as amp  # noqa: E402
from polyamp import (  # noqa: E402
    PolicyMap,
    PolyampError,
    Statistics,
)
from polyamp_jax._measure import raw, summable, summed  # noqa: E402


class TestNumbers:
    def test_they_are_numpys(self) -> None:
        source = np.random.default_rng(0)
        x = np.ldexp(source.normal(size=4000), source.integers(-40, 10, size=4000))
        x[:7], x[7:9], x[9] = 0.0, np.inf, np.nan
        x = x.astype(np.float32)
        close(Statistics.from_raw(jax.jit(raw)([x.reshape(10, -1)]).tolist()), x)

    def test_a_large_array_is_judged_by_some_entries_but_for_amax_and_finiteness(self) -> None:
        x = np.random.default_rng(0).normal(size=(1000, 300)).astype(np.float32)
        x[3, 5], x[7, 1] = 70000.0, np.nan
        found = Statistics.from_raw(raw([x]).tolist())
        assert (found.amax, found.size) == (70000.0, 300_000)
        assert found.nonfinite == pytest.approx(1 / 300_000)
        assert found.nonzero == pytest.approx(1, abs=1e-5)

    def test_of_a_sum_amax_is_on_the_right_side_of_every_power_of_two(self) -> None:
        rows = [raw([jnp.float32(value)]) for value in (3.0, 16376.0, 12.0, 0.0)]
        found = summed(sum(map(summable, rows)))
        assert 16376.0 < found[0] < 16384.0
        assert found[2] == 4.0
        assert summed(summable(rows[1]))[0] == 16376.0

    def test_vmap_measures_the_whole_batch(self) -> None:
        x = jnp.arange(24.0).reshape(2, 3, 4)
        found = jax.vmap(jax.vmap(lambda v: raw([v])))(x)
        assert found.shape == (2, 3, 8)
        np.testing.assert_array_equal(found, jnp.broadcast_to(raw([x]), (2, 3, 8)))


def test_multiply_adds_an_entry_of_the_output() -> None:
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.MultiHeadDotProductAttention(2, name="attention")(x)
            x = nn.Embed(9, 4, name="table")(jnp.zeros((2, 3), int)) + x
            return nn.RMSNorm(name="norm")(nn.Conv(5, (3,), name="conv")(x))

    found = amp.units(Stack(), jnp.ones((2, 3, 4)))
    assert {path: unit.work for path, unit in found.items() if path != "norm"} == {
        "attention.query": 4.0,
        "attention.key": 4.0,
        "attention.value": 4.0,
        "attention.out": 4.0,
        "table": 0.0,
        "conv": 12.0,
    }
    assert [path for path, unit in found.items() if unit.family] == ["norm"]


class TestMeasured:
    def test_what_a_step_gives_is_what_the_tensors_hold(self, case: Case) -> None:
        grads, found = sampled(case)
        assert sorted(found) == ["first", "last", "norm"]
        assert {p: u.family for p, u in case.units.items()} == {
            "first": None, "norm": "norm", "last": None
        }  # fmt: skip
        assert (case.units["first"].work, case.units["last"].work) == (4.0, 6.0)
        one = found["first"]
        assert one.inputs[:3:2] == (np.abs(X).max(), X.size)
        assert one.weights[:3:2] == (max(np.abs(w).max() for w in case.weights(case.params)), 30)
        close(one.weight_gradient, *case.weights(grads))
        weight = next(w for w in case.weights(case.params) if w.ndim == 2)
        bias = next(w for w in case.weights(case.params) if w.ndim == 1)
        kernel = weight if weight.shape == (4, 6) else weight.T
        close(one.output, X @ kernel + bias)
        assert one.gradient is not None
        assert one.gradient.size == 48
        bias_gradient = next(g for g in case.weights(grads) if g.ndim == 1)
        assert one.gradient.amax >= np.abs(bias_gradient).max() / 8

    def test_gradients_of_outputs_carry_the_loss_scale_and_no_power_of_the_region(
        self, case: Case
    ) -> None:
        _, plain = sampled(case)
        _, shifted = sampled(case, "float32@2^9")
        for path in ("first", "norm", "last"):
            assert shifted[path].gradient == plain[path].gradient
        rows = jax.vmap(lambda x: x)(X)
        assert plain["last"].gradient is not None
        direct = jax.grad(lambda e: _with_last(case, e, rows))(jnp.zeros((8, 2))) * SCALE
        close(plain["last"].gradient, direct)

    def test_gradients_are_those_of_the_step_that_does_not_measure(self, case: Case) -> None:
        grads, _ = sampled(case, "fp16")
        fun = functools.partial(case.loss, PolicyMap(default="fp16"))
        _, again = jax.jit(amp.value_and_grad(fun))(TX.init(case.params), case.params, X)
        jax.tree.map(np.testing.assert_array_equal, grads, again)

    def test_a_step_that_does_not_measure_is_the_plain_step(self, case: Case) -> None:
        plan = amp.Plan(PolicyMap(default="fp16"), False, tuple(case.units))
        fun = functools.partial(case.loss, plan.policy)
        ours = amp.value_grad_and_statistics(fun, plan)
        args = TX.init(case.params), case.params, X
        assert ours(*args)[2] == {}
        plain = jax.make_jaxpr(amp.value_and_grad(fun))(*args)
        assert len(jax.make_jaxpr(ours)(*args).eqns) == len(plain.eqns)

    def test_a_policy_applied_outside_is_refused(self) -> None:
        model = Nnx(nnx.Rngs(0))
        plan = amp.Plan(PolicyMap(default="fp16"), True, tuple(amp.units(model)))
        fun = amp.value_grad_and_statistics(lambda model, x: model(x).sum(), plan)
        applied = amp.apply_policy(model, plan.policy)
        with pytest.raises(PolyampError, match="apply the policy inside the function"):
            fun(TX.init(nnx.state(applied)), applied, X)

    def test_a_jitted_function_inside_is_traced_for_each_measured_trace(self) -> None:
        model = Nnx(nnx.Rngs(0))
        graph, params = nnx.split(model)
        inner = nnx.jit(lambda model, x: model(x))

        def loss(policy: Any, params: Any, x: Any) -> Any:
            return (inner(amp.apply_policy(nnx.merge(graph, params), policy), x) ** 2).mean()

        case = Case(amp.units(model), params, loss, lambda p: [])
        first, second = sampled(case)[1], sampled(case)[1]
        assert first == second == sampled(nnx_case())[1]

    @pytest.mark.parametrize("remat", [False, True])
    def test_scanned_layers_are_measured_together(self, remat: bool) -> None:
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x: Any, _: Any) -> Any:
                return nn.Dense(4, name="dense")(x), None

        class Stack(nn.Module):
            @nn.compact
            def __call__(self, x: Any) -> Any:
                block = nn.remat(Block, prevent_cse=False) if remat else Block
                layers = nn.scan(
                    block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
                )
                return layers(name="layers")(x, None)[0]

        params = Stack().init(jax.random.key(0), X)["params"]

        def loss(policy: Any, params: Any, x: Any) -> Any:
            return amp.apply_policy(Stack(), policy).apply({"params": params}, x).mean()

        units = amp.units(Stack(), X)
        _, found = sampled(Case(units, params, loss, lambda p: []))
        inputs, x = [X], X
        dense = params["layers"]["dense"]
        for kernel, bias in zip(dense["kernel"], dense["bias"], strict=True):
            x = x @ kernel + bias
            inputs.append(x)
        one, want = found["layers.dense"], expected(*inputs[1:])
        assert one.output is not None
        np.testing.assert_allclose(one.output[1:], want[1:], rtol=1e-5)
        assert want.amax <= one.output.amax <= 1.25 * want.amax


def _with_last(case: Case, extra: Any, x: Any) -> Any:
    """The loss with something added to the model's output."""
    if isinstance(case.params, Eqx):
        return ((jax.vmap(case.params)(x) + extra) ** 2).mean()
    if isinstance(case.params, dict):
        return ((Linen().apply({"params": case.params}, x) + extra) ** 2).mean()
    model = Nnx(nnx.Rngs(0))
    nnx.update(model, case.params)
    return ((model(x) + extra) ** 2).mean()
