"""The selector on JAX: what is measured, how plans change, calibration."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

jax = pytest.importorskip("jax", reason="the test is about JAX")
import equinox as eqx  # noqa: E402
import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import polyamp.jax as amp  # noqa: E402
from polyamp import (  # noqa: E402
    Capabilities,
    PolicyMap,
    PolyampError,
    Selector,
    StateError,
    Static,
    Statistics,
)
from polyamp_jax._adaptive import read_statistics  # noqa: E402
from polyamp_jax._measure import raw, summable, summed  # noqa: E402

CAN = Capabilities()
X = jax.random.normal(jax.random.key(1), (8, 4))
SCALE = 2.0**10
TX = amp.loss_scaled(optax.sgd(1e-3), Static(SCALE))


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 6, rngs=rngs)
        self.norm = nnx.LayerNorm(6, rngs=rngs)
        self.last = nnx.Linear(6, 2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.norm(jnp.tanh(self.first(x))))


class Linen(nn.Module):
    def setup(self) -> None:
        self.first, self.norm, self.last = nn.Dense(6), nn.LayerNorm(), nn.Dense(2)

    def __call__(self, x: Any) -> Any:
        return self.last(self.norm(jnp.tanh(self.first(x))))


class Eqx(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    last: eqx.nn.Linear

    def __call__(self, x: Any) -> Any:
        return self.last(self.norm(jnp.tanh(self.first(x))))


class Case(NamedTuple):
    units: Any
    params: Any
    loss: Callable[..., Any]
    """(policy, params, x) -> loss"""
    weights: Callable[[Any], list[Any]]
    """Of `first`, in a tree of parameters or gradients."""


def nnx_case() -> Case:
    graph, params = nnx.split(Nnx(nnx.Rngs(0)))

    def loss(policy: Any, params: Any, x: Any) -> Any:
        return (amp.apply_policy(nnx.merge(graph, params), policy)(x) ** 2).mean()

    return Case(
        amp.units(nnx.merge(graph, params)), params, loss, lambda p: jax.tree.leaves(p["first"])
    )


def linen_case() -> Case:
    params = Linen().init(jax.random.key(0), X)["params"]

    def loss(policy: Any, params: Any, x: Any) -> Any:
        return (amp.apply_policy(Linen(), policy).apply({"params": params}, x) ** 2).mean()

    return Case(amp.units(Linen(), X), params, loss, lambda p: jax.tree.leaves(p["first"]))


def eqx_case() -> Case:
    keys = jax.random.split(jax.random.key(0))
    model = Eqx(
        eqx.nn.Linear(4, 6, key=keys[0]), eqx.nn.LayerNorm(6), eqx.nn.Linear(6, 2, key=keys[1])
    )

    def loss(policy: Any, params: Any, x: Any) -> Any:
        return (jax.vmap(amp.apply_policy(params, policy))(x) ** 2).mean()

    return Case(amp.units(model), model, loss, lambda p: jax.tree.leaves(p.first))


CASES = {"nnx": nnx_case, "linen": linen_case, "equinox": eqx_case}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


def expected(*arrays: Any) -> Statistics:
    """The slow way."""
    values = np.abs(np.concatenate([np.asarray(a, np.float64).ravel() for a in arrays]))
    finite = values[np.isfinite(values)]
    nonzero = finite[finite > 0]
    amax = finite.max(initial=0.0)
    shares = [np.mean(nonzero < limit) for limit in (2.0**-14, 2.0**-20, amax * 2.0**-30)]
    return Statistics(
        amax=amax,
        rms=np.sqrt(np.mean(finite**2)),
        size=values.size,
        nonfinite=1 - finite.size / values.size,
        nonzero=nonzero.size / values.size,
        sub=shares[0],
        bad=shares[1],
        far=shares[2],
    )


def close(found: Statistics | None, *arrays: Any) -> None:
    assert found is not None
    np.testing.assert_allclose(found, expected(*arrays), rtol=2e-5)


def sampled(case: Case, policy: str | PolicyMap = "float32") -> tuple[Any, dict[str, Any]]:
    """Gradients and statistics of one step."""
    rules = policy if isinstance(policy, PolicyMap) else PolicyMap(default=policy)
    plan = amp.Plan(rules, True, tuple(case.units))
    step = jax.jit(amp.value_grad_and_statistics(functools.partial(case.loss, plan.policy), plan))
    _, grads, statistics = step(TX.init(case.params), case.params, X)
    return grads, read_statistics(statistics, case.units)


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
        assert found[0] == 16384.0  # 16400 would be 20480
        assert found[2] == 4.0
        assert summed(summable(rows[1]))[0] == 16376.0

    def test_vmap_measures_the_whole_batch(self) -> None:
        x = jnp.arange(24.0).reshape(2, 3, 4)
        found = jax.vmap(jax.vmap(lambda v: raw([v])))(x)
        assert found.shape == (2, 3, 8)
        np.testing.assert_array_equal(found, jnp.broadcast_to(raw([x]), (2, 3, 8)))


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


class Wide(nn.Module):
    """Its first layer's outputs are `factor` times its inputs."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(4, use_bias=False, name="first", kernel_init=_identity)(x)
        return nn.Dense(2, name="last")(x / jax.lax.stop_gradient(jnp.abs(x).max()))


def _identity(key: Any, shape: Any, dtype: Any = jnp.float32) -> Any:
    return jnp.eye(*shape, dtype=dtype)


compiled: list[amp.Plan] = []


@functools.partial(jax.jit, static_argnames="plan")
def train_step(params: Any, opt_state: Any, x: Any, plan: amp.Plan) -> Any:
    compiled.append(plan)

    def loss_fn(params: Any) -> Any:
        return (amp.apply_policy(Wide(), plan.policy).apply({"params": params}, x) ** 2).mean()

    fun = amp.value_grad_and_statistics(loss_fn, plan)
    loss, grads, statistics = fun(opt_state, params)
    params, opt_state = amp.step(TX, grads, opt_state, params, loss=loss)
    return params, opt_state, statistics


class Training:
    """A training of `Wide` under `Adaptive`."""

    def __init__(self, every: int = 4, **options: Any) -> None:
        self.adaptive = amp.Adaptive(amp.units(Wide(), X), capabilities=CAN, every=every, **options)
        self.params = Wide().init(jax.random.key(0), X)["params"]
        self.opt_state = TX.init(self.params)

    def run(self, steps: int, top: float) -> list[str]:
        """The formats of the first layer after each step, with inputs as large as `top`."""
        x = X / jnp.abs(X).max() * top
        found = []
        for _ in range(steps):
            self.params, self.opt_state, statistics = train_step(
                self.params, self.opt_state, x, plan=self.adaptive.plan
            )
            selection = self.adaptive.update(statistics, self.opt_state)
            found.append(selection.choices["first"].format)
        return found


class TestAdaptive:
    def test_16376_stays_and_16400_moves_at_once(self) -> None:
        training = Training(every=2)
        training.params["first"]["kernel"] *= 8
        assert training.run(5, 16376 / 8) == ["float16"] * 5
        assert training.adaptive.statistics["first"].output.amax == 16376.0
        assert training.run(2, 16400 / 8) == ["float16", "bfloat16"]
        choice = training.adaptive.selection.choices["first"]
        assert choice[2:] == ("output.amax", 16400.0, 16384.0)
        assert training.adaptive.policy.policy_for("first").compute_dtype == "bfloat16"

    def test_one_compilation_a_change_and_one_for_the_sample(self) -> None:
        train_step.clear_cache()
        compiled.clear()
        training = Training()
        training.run(8, 100.0)
        assert [plan.sampling for plan in compiled] == [True, False]
        training.run(8, 17000.0)
        assert [plan.sampling for plan in compiled] == [True, False, False, True]
        assert len({plan.policy for plan in compiled}) == 2
        assert training.adaptive.changes == 1
        training.run(40, 17000.0)
        assert len(compiled) == 4

    def test_it_goes_on_from_its_dict(self) -> None:
        whole, first, second = Training(), Training(), Training()
        expected = whole.run(6, 100.0) + whole.run(14, 17000.0)
        found = first.run(6, 100.0) + first.run(5, 17000.0)
        second.params, second.opt_state = first.params, first.opt_state
        second.adaptive.from_dict(json.loads(json.dumps(first.adaptive.to_dict())))
        assert found + second.run(9, 17000.0) == expected
        assert second.adaptive.selection == whole.adaptive.selection
        assert second.adaptive.to_dict() == whole.adaptive.to_dict()

    def test_another_models_dict_changes_nothing(self) -> None:
        adaptive = amp.Adaptive(Nnx(nnx.Rngs(0)), capabilities=CAN)
        before = adaptive.to_dict()
        with pytest.raises(StateError, match="other modules: norm"):
            adaptive.from_dict(Training().adaptive.to_dict())
        assert adaptive.to_dict() == before

    def test_after_max_changes_the_formats_stay(self) -> None:
        training = Training(every=1, max_changes=1)
        with pytest.warns(UserWarning, match="they stay now"):
            assert training.run(1, 17000.0) == ["bfloat16"]
        assert training.run(1, jnp.inf) == ["bfloat16"]

    def test_statistics_and_plan_must_agree(self) -> None:
        adaptive = Training().adaptive
        with pytest.raises(PolyampError, match="expected statistics of step 0"):
            adaptive.update({})

    def test_gradients_of_a_step_after_a_skip_are_not_judged(self) -> None:
        tx = amp.loss_scaled(optax.sgd(1e-3))
        small = Statistics(1e-6, 1e-6, 100, 0.0, 1.0, 1.0, 1.0, 0.0)
        row = [1e-6, 1e-10, 100.0, 0.0, 100.0, 100.0, 100.0, 0.0]
        good = [1.0, 1.0, 100.0, 0.0, 100.0, 0.0, 0.0, 0.0]
        numbers = {p: np.array([good, good, row, row, good]) for p in ("first", "last")}
        assert Statistics.from_raw(row).bad == small.bad
        for skipped, level in ((0, 1), (1, 0)):
            adaptive = amp.Adaptive(
                Training().adaptive.units, capabilities=CAN, every=1, selector=Selector(patience=1)
            )
            state = tx.init({"w": X})
            state = state._replace(scaler=state.scaler._replace(skipped=jnp.int32(skipped)))
            selection = adaptive.update(numbers, state)
            assert selection.choices["first"].level == level

    def test_refusals(self) -> None:
        with pytest.raises(PolyampError, match="every must be"):
            amp.Adaptive(Nnx(nnx.Rngs(0)), every=0)
        with pytest.raises(PolyampError, match="no parameters"):
            amp.Adaptive(nnx.Dropout(0.5))
        with pytest.raises(PolyampError, match="expected a module"):
            amp.units(lambda x: x)


class TestCalibrate:
    def batches(self, factor: float = 1.0) -> list[tuple[Any]]:
        keys = jax.random.split(jax.random.key(5), 3)
        return [(factor * jax.random.normal(key, (8, 4)),) for key in keys]

    def test_nothing_is_changed_and_the_map_has_its_reasons(self, case: Case) -> None:
        before = jax.tree.map(np.array, case.params)
        found = amp.advise(case.units, case.loss, case.params, self.batches(), capabilities=CAN)
        jax.tree.map(np.testing.assert_array_equal, case.params, before)
        assert found.choices["first"].format == "float16"
        assert found.choices["norm"].statistic == "family norm"
        assert found.choices["last"].level < 3

    def test_large_values_want_bfloat16_and_a_tiny_noise_float32(self) -> None:
        def loss(policy: Any, params: Any, x: Any) -> Any:
            return (amp.apply_policy(Wide(), policy).apply({"params": params}, x) ** 2).mean()

        units, params = amp.units(Wide(), X), Wide().init(jax.random.key(0), X)["params"]
        batches = [(x * 1e5,) for (x,) in self.batches()]
        found = amp.advise(units, loss, params, batches, capabilities=CAN)
        assert found.choices["first"].format == "bfloat16"
        assert found.choices["first"].statistic == "inputs.amax"
        x = self.batches()[0][0]
        exact = amp.advise(units, loss, params, [(x,), (x * 1.0001,)], capabilities=CAN)
        assert exact.choices["last"].level == 3
        assert exact.choices["last"].statistic == "error"

    def test_forward_alone(self) -> None:
        def outputs(policy: Any, params: Any, x: Any) -> Any:
            return amp.apply_policy(Wide(), policy).apply({"params": params}, x)

        units, params = amp.units(Wide(), X), Wide().init(jax.random.key(0), X)["params"]
        batches = [(x * 1e5,) for (x,) in self.batches()]
        found = amp.advise(units, outputs, params, batches, gradients=False, capabilities=CAN)
        assert [c.format for c in found.choices.values()] == ["bfloat16", "float16"]
        rules = amp.calibrate(units, outputs, params, batches, gradients=False, capabilities=CAN)
        assert rules == found.policy_map()

    def test_refusals(self) -> None:
        case = linen_case()
        with pytest.raises(PolyampError, match="no batch"):
            amp.calibrate(case.units, case.loss, case.params, [], capabilities=CAN)
        with pytest.raises(PolyampError, match="share must be"):
            amp.calibrate(case.units, case.loss, case.params, [], share=2.0)
        with pytest.raises(PolyampError, match="the loss is inf"):
            amp.calibrate(
                case.units,
                lambda policy, params, x: case.loss(policy, params, x) * jnp.inf,
                case.params,
                self.batches(),
                capabilities=CAN,
            )


def test_capabilities_are_measured() -> None:
    found = amp.capabilities("cpu")
    assert found.formats == {"float16", "bfloat16"}
    assert found.slow <= found.formats
    assert found is amp.capabilities(jax.devices("cpu")[0])


def test_the_bench_runs_its_steps() -> None:
    from polyamp_jax import _bench_selector as bench
    from polyamp_jax._compat import compiled_count

    jitted = jax.jit(bench.train_step, donate_argnums=(0, 1), static_argnames="plan")
    cases = [bench.case(jitted, every) for every in (10**9, 1, None)]
    assert all(case() > 0 for case in cases for _ in range(2))
    assert compiled_count(jitted) == 2
