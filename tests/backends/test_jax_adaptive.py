"""The selector at work on JAX: how plans change, calibration."""

# ruff: noqa: F811
from __future__ import annotations

import functools
import json
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="the test is about JAX")
import flax.linen as nn  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax_selector_cases import (  # noqa: E402
    CAN,
    TX,
    Case,
    Nnx,
    X,
    case,  # noqa: F401
    linen_case,
)

import polyamp.jax as amp  # noqa: E402
from polyamp import (  # noqa: E402
    PolyampError,
    Selector,
    StateError,
    Statistics,
)


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

    def test_skips_before_it_was_saved_are_not_skips_after(self) -> None:
        first = Training(every=6)
        first.opt_state = first.opt_state._replace(
            scaler=first.opt_state.scaler._replace(skipped=jnp.int32(3))
        )
        first.run(7, 1.0)
        saved = first.adaptive.to_dict()
        assert saved["skipped"] == 3
        second = Training(every=6)
        second.adaptive.from_dict(saved)
        second.params, second.opt_state = first.params, first.opt_state
        judged, decide = [], second.adaptive.decide
        second.adaptive.decide = lambda s, gradients: (
            judged.append(gradients) or decide(s, gradients)
        )
        second.run(6, 1.0)
        assert judged == [True]

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

    def test_skips_before_it_was_saved_are_not_skips_after(self) -> None:
        first = Training(every=6)
        first.opt_state = first.opt_state._replace(
            scaler=first.opt_state.scaler._replace(skipped=jnp.int32(3))
        )
        first.run(7, 1.0)
        saved = first.adaptive.to_dict()
        assert saved["skipped"] == 3
        second = Training(every=6)
        second.adaptive.from_dict(saved)
        second.params, second.opt_state = first.params, first.opt_state
        judged, decide = [], second.adaptive.decide
        second.adaptive.decide = lambda s, gradients: (
            judged.append(gradients) or decide(s, gradients)
        )
        second.run(6, 1.0)
        assert judged == [True]

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
