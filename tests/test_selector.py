"""The selector: thresholds, hysteresis and dwell, as numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp import (
    Capabilities,
    GradNormSelector,
    ModuleStatistics,
    Policy,
    PolicyMap,
    RuleError,
    Selection,
    Selector,
    StateError,
    Statistics,
)
from polyamp._statistics import merged

GOOD = Statistics(amax=1.0, rms=0.1, size=1000, nonfinite=0, nonzero=1.0, sub=0.1, bad=0, far=0)
WITHOUT_BF16 = Capabilities(formats=frozenset({"float16"}))


def sample(output: float = 1.0, **gradient: float) -> ModuleStatistics:
    return ModuleStatistics(
        output=GOOD._replace(amax=output), gradient=GOOD._replace(**gradient), weight_gradient=GOOD
    )


class Run:
    """A selector at work on one module."""

    def __init__(self, can: Capabilities = Capabilities(), **thresholds: float) -> None:  # noqa: B008
        self.selector = Selector(**thresholds)
        self.can = can
        self.selection = self.selector.start({"m": None}, can)

    def __call__(self, statistics: ModuleStatistics, step: int | None = None) -> str:
        self.selection = self.selector.decide({"m": statistics}, self.selection, self.can, step)
        return self.choice.format

    @property
    def choice(self):
        return self.selection.choices["m"]


def test_the_decision_names_what_made_it() -> None:
    run = Run()
    assert run(sample(output=16400.0)) == "bfloat16"
    assert run.choice[2:] == ("output.amax", 16400.0, 16384.0)
    assert str(run.choice) == "bfloat16: output.amax 1.64e+04 (1.638e+04)"


class TestForward:
    def test_16376_stays_and_16400_moves(self) -> None:
        for can, safer in ((Capabilities(), "bfloat16"), (WITHOUT_BF16, "float32")):
            run = Run(can)
            assert [run(sample(output=16376.0)) for _ in range(5)] == ["float16"] * 5
            assert run(sample(output=16400.0)) == safer

    def test_what_comes_in_counts_as_well(self) -> None:
        run = Run()
        statistics = sample()._replace(inputs=GOOD._replace(amax=2.0**15))
        assert run(statistics) == "bfloat16"
        assert run.choice.statistic == "inputs.amax"

    def test_weights_count_as_well(self) -> None:
        run = Run()
        assert run(sample()._replace(weights=GOOD._replace(amax=1e5))) == "bfloat16"
        assert run.choice.statistic == "weights.amax"

    def test_the_module_where_infinities_begin_is_charged_and_not_those_they_reach(self) -> None:
        lost = GOOD._replace(nonfinite=0.5)
        fine = ModuleStatistics(output=GOOD, inputs=GOOD)
        reached = ModuleStatistics(output=lost, inputs=lost)
        selector = Selector()
        start = selector.start(dict.fromkeys("abc"))
        found = selector.decide({"a": fine, "b": fine._replace(output=lost), "c": reached}, start)
        assert [c.level for c in found.choices.values()] == [0, 3, 0]
        found = selector.decide({"a": reached, "b": reached, "c": reached}, start)
        assert [c.level for c in found.choices.values()] == [3, 3, 3]

    def test_not_finite_moves_at_once(self) -> None:
        infinite = sample()._replace(output=GOOD._replace(nonfinite=1e-3))
        run = Run()
        assert run(infinite) == "float32"
        assert run.choice.statistic == "output.nonfinite"

    def test_growth_towards_the_limit_moves_before_it_is_reached(self) -> None:
        run = Run()
        values = [100.0, 300.0, 1000.0, 4500.0, 9000.0, 14000.0]
        found = [run(sample(output=value)) for value in values]
        assert found == ["float16"] * 5 + ["bfloat16"]
        assert run.choice.statistic == "output.amax, predicted"


class TestGradients:
    def test_bad_share(self) -> None:
        run = Run()
        assert [run(sample(bad=0.049)) for _ in range(9)] == ["float16"] * 9
        wide = {"bad": 0.051, "far": 0.2}
        assert [run(sample(**wide)) for _ in range(3)] == ["float16", "float16", "bfloat16"]
        assert run.choice[2:] == ("gradient.far", 0.2, 0.05)

    def test_three_samples_in_a_row(self) -> None:
        run = Run()
        for _ in range(5):
            assert run(sample(bad=0.051, far=1)) == "float16"
            assert run(sample(bad=0.051, far=1)) == "float16"
            assert run(sample(bad=0.03, far=1)) == "float16"

    def test_a_narrow_span_gets_a_power_of_two_of_its_own(self) -> None:
        run = Run()
        for _ in range(3):
            run(sample(bad=0.5, amax=2.0**-10))
        assert run.choice[:2] == (1, 7)  # the weights' gradient, 1.0, becomes 2**7

    def test_a_backend_without_powers_of_two_passes_them_over(self) -> None:
        run = Run(Capabilities(shifts=False))
        assert [run(sample(bad=0.5)) for _ in range(3)][-1] == "bfloat16"

    def test_a_large_gradient(self) -> None:
        run = Run()
        assert [run(sample(amax=2.0**15)) for _ in range(3)][-1] == "float16"
        assert run.choice[:2] == (1, -8)
        assert run.choice.statistic == "gradient.amax"

    def test_a_sample_with_an_overflow_says_nothing_of_gradients(self) -> None:
        run = Run()
        overflow = sample(bad=1.0, far=1.0, nonfinite=0.1)
        assert [run(overflow) for _ in range(9)] == ["float16"] * 9
        assert run(overflow._replace(output=GOOD._replace(amax=16400.0))) == "bfloat16"

    @pytest.mark.parametrize("told", [True, False])
    def test_such_a_sample_leaves_the_counts_as_they_are(self, told: bool) -> None:
        """One with an overflow, or one that is said to come after a skip."""
        nothing = sample(bad=1.0, nonfinite=0.1) if told else sample(bad=1.0)
        run = Run()

        def say_nothing() -> None:
            run.selection = run.selector.decide(
                {"m": nothing}, run.selection, run.can, gradients=told
            )

        for _ in range(2):
            run(sample(bad=0.06, far=1))
            say_nothing()
        assert run(sample(bad=0.06, far=1)) == "bfloat16"
        for _ in range(5):
            say_nothing()
        assert run.selection.modules["m"].good == 0
        assert run.choice.level == 2

    def test_a_tiny_gradient_gets_the_largest_power_of_two_there_is(self) -> None:
        run = Run()
        for _ in range(3):
            run(sample(bad=0.5, amax=2.0**-149)._replace(weight_gradient=None))
        assert run.choice[:2] == (1, 126)
        run.selection.policy_map()

    def test_negligible_gradients_are_not_judged(self) -> None:
        tiny = GOOD._replace(rms=1e-8, bad=1.0, far=1.0)
        statistics = {
            "key": ModuleStatistics(weight_gradient=tiny),
            "value": ModuleStatistics(weight_gradient=GOOD),
        }
        selector = Selector()
        selection = selector.start({"key": None, "value": None})
        for _ in range(5):
            selection = selector.decide(statistics, selection)
        assert selection.choices["key"].level == 0


class TestReturning:
    def test_1_3_percent_never_and_1_2_percent_after_the_dwell(self) -> None:
        run = Run(Capabilities(shifts=False))
        for step in (50, 100, 150):
            run(sample(bad=0.06), step)
        assert run.choice.level == 2
        for step in range(200, 2000, 50):
            assert run(sample(bad=0.013), step) == "bfloat16"
        for step in (2000, 2050, 2100, 2299):
            assert run(sample(bad=0.012), step) == "bfloat16"
        assert run(sample(bad=0.012), 2300) == "float16"

    def test_a_relapse_doubles_the_dwell(self) -> None:
        run = Run(Capabilities(shifts=False))
        step, waits = 0, []
        for _ in range(3):
            while run(sample(bad=0.06), step) == "float16":
                step += 1
            begin = step
            while run(sample(), step) != "float16":
                step += 1
            waits.append(step - begin - 2)
        assert waits == [200, 400, 800]
        assert run.selection.flips == 6

    def test_a_sample_above_the_margin_starts_the_wait_anew(self) -> None:
        run = Run(Capabilities(shifts=False))
        for step in range(3):
            run(sample(bad=0.06), step)
        for step in (10, 20, 30):
            run(sample(bad=0.01), step)
        run(sample(bad=0.02), 100)
        assert run(sample(bad=0.01), 240) == "bfloat16"
        assert run.choice.level == 2


class TestCapabilities:
    def test_slower_than_float32_is_not_chosen_unless_memory_counts(self) -> None:
        slow = Capabilities(slow=frozenset({"float16"}))
        assert Run(slow)(sample()) == "bfloat16"
        assert Run(slow, prefer="memory")(sample()) == "float16"
        assert Run(Capabilities(formats=frozenset()))(sample()) == "float32"

    def test_families_stay_in_float32(self) -> None:
        selector = Selector()
        selection = selector.start({"norm": "norm", "m": None})
        selection = selector.decide({"norm": sample(), "m": sample()}, selection)
        assert [c.format for c in selection.choices.values()] == ["float32", "float16"]
        with pytest.raises(RuleError, match="no family 'nrom'"):
            selector.start({"norm": "nrom"})


class TestCalibration:
    def test_errors_above_a_tenth_of_the_noise(self) -> None:
        selector = Selector()
        statistics = {"m": sample()._replace(errors=(("float16", 0.11), ("bfloat16", 0.9)))}
        found = selector.calibrated(statistics, selector.start({"m": None})).choices["m"]
        assert (found.format, found.statistic) == ("float32", "error")

    def test_an_island_joins_its_neighbours(self) -> None:
        wide = sample(output=1e6)._replace(errors=(("bfloat16", 1.0),))
        selector = Selector()
        for work, level in ((3.0, 3), (5.0, 0)):
            statistics = {"a": wide, "b": sample()._replace(work=work), "c": wide}
            found = selector.calibrated(statistics, selector.start(dict.fromkeys("abc")))
            assert [c.level for c in found.choices.values()] == [3, level, 3]

    def test_the_map(self) -> None:
        selector = Selector()
        start = selector.start({"a": None, "b": None, "c": None, "c.d": None, "n": "norm"})
        statistics = {
            "a": sample(),
            "b": sample(bad=0.3, amax=0.25)._replace(weight_gradient=None),
            "c": sample(output=1e5),
            "c.d": sample(),
        }
        found = selector.calibrated(statistics, start).policy_map()
        assert found == PolicyMap(
            {"b": "fp16@2^9", "c": "bf16", "c.d": "fp16"}, default=Policy.parse("16-mixed")
        )
        assert PolicyMap.from_toml(found.to_toml()) == found == PolicyMap.from_json(found.to_json())


def test_grad_norm_selector() -> None:
    selector = GradNormSelector()
    found = [selector.mode(n) for n in (0.0, 9.9e-4, 1e-3, 1.0, 65500.0, 65501.0, math.inf)]
    assert found == ["FP32"] * 2 + ["FP16"] * 3 + ["FP32_SCALED"] * 2
    assert selector.mode(math.nan) == "FP32_SCALED"
    norm = GOOD.rms * math.sqrt(1000)
    assert selector.decide({"m": sample()}, loss_scale=1e4) == {"m": ("FP32", norm / 1e4)}


class TestErrors:
    def test_grad_norm_selector(self) -> None:
        for values, told in (
            ({"low": math.nan}, "low must be a number above 0, got nan"),
            ({"high": "a"}, "high must be a number above 0"),
            ({"low": 2.0, "high": 1.0}, "low must not be above high"),
        ):
            with pytest.raises(RuleError, match=told):
                GradNormSelector(**values)
        with pytest.raises(RuleError, match="loss_scale must be a number above 0, got 0"):
            GradNormSelector().decide({"m": sample()}, loss_scale=0)

    @pytest.mark.parametrize(
        ("key", "value", "told"),
        [
            ("shift", 127, "shift must be at most 126"),
            ("shift", 3, "0 but on level 1, got 3 on level 0"),
            ("family", "nrom", "no family 'nrom'"),
        ],
    )
    def test_saved_selections(self, key, value, told) -> None:
        data = Selector().start({"m": None}).to_dict()
        module = data["modules"]["m"]
        (module if key == "family" else module["choice"])[key] = value
        with pytest.raises(StateError, match=told):
            Selection.from_dict(data)

    @pytest.mark.parametrize(
        ("values", "told"),
        [
            ({"share": 1.5}, "share must be below 1"),
            ({"value_limit": -1.0}, "value_limit must be a number above 0"),
            ({"patience": 0}, "patience must be a whole number from 1"),
            ({"dwell": 2.5}, "dwell must be a whole number from 0"),
            ({"prefer": "fun"}, "'speed' or 'memory'"),
            ({"margin": math.nan}, "margin must be a number above 0"),
        ],
    )
    def test_thresholds(self, values, told) -> None:
        with pytest.raises(RuleError, match=told):
            Selector(**values)

    def test_unknown_modules_and_steps_that_go_back(self) -> None:
        selector = Selector()
        selection = selector.start({"m": None})
        with pytest.raises(RuleError, match="no module 'n'"):
            selector.decide({"n": sample()}, selection)
        selection = selector.decide({"m": sample()}, selection, step=10)
        with pytest.raises(RuleError, match="9 after 10"):
            selector.decide({"m": sample()}, selection, step=9)
        with pytest.raises(RuleError, match="whole number, got nan"):
            selector.decide({"m": sample()}, selection, step=math.nan)


shares = st.floats(0, 1)
statistic = st.builds(
    Statistics,
    amax=st.floats(0, 1e30),
    rms=st.floats(0, 1e10),
    size=st.integers(0, 10**9),
    nonfinite=st.sampled_from([0.0, 0.0, 0.0, 0.5]),
    nonzero=shares,
    sub=shares,
    bad=shares,
    far=shares,
)
measured = st.builds(
    ModuleStatistics,
    output=st.none() | statistic,
    gradient=st.none() | statistic,
    weight_gradient=st.none() | statistic,
)


@given(samples=st.lists(measured, max_size=40), cut=st.integers(0, 40), shifts=st.booleans())
def test_any_samples_give_a_decision_that_survives_json(samples, cut, shifts) -> None:
    import json

    can = Capabilities(shifts=shifts)
    selector = Selector(dwell=5)
    whole = selector.start({"m": None}, can)
    resumed = whole
    for number, one in enumerate(samples):
        whole = selector.decide({"m": one}, whole, can)
        resumed = selector.decide({"m": one}, resumed, can)
        if number == cut:
            resumed = Selection.from_dict(json.loads(json.dumps(resumed.to_dict())))
        choice = whole.choices["m"]
        assert shifts or choice.level != 1
        assert choice.shift == 0 or choice.level == 1
        nonfinite = one.output is not None and one.output.nonfinite > 0
        assert not nonfinite or choice.level == 3
    assert whole == resumed
    whole.policy_map()


@given(rows=st.lists(st.lists(st.floats(0, 1e6), min_size=8, max_size=8), min_size=1, max_size=5))
def test_merging_takes_the_largest_amax_and_sums_the_rest(rows) -> None:
    found = merged(rows)
    assert found is not None
    assert found[0] == max(row[0] for row in rows)
    assert found[2] == math.fsum(row[2] for row in rows)
    assert merged([]) is None


def test_raw_numbers_become_shares() -> None:
    found = Statistics.from_raw([4.0, 32.0, 10, 2, 4, 3, 2, 1])
    assert found == Statistics(4.0, 2.0, 10, 0.2, 0.4, 0.75, 0.5, 0.25)
    assert found.norm == pytest.approx(math.sqrt(32.0))
    with pytest.raises(StateError, match="8 numbers, got 2"):
        Statistics.from_raw([1.0, 2.0])
