"""Rules that follow the gradients' range: right values, and slow versions as oracles."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_range import SlowDelayed, SlowPredictive, SlowTwoPhase

import polyamp
from polyamp import DelayedScaling, LogMax, Predictive, Reason, RuleError, Signal, TwoPhase

INF = math.inf


def exponent(state: polyamp.ScalerState) -> int:
    mantissa, k = math.frexp(state.loss_scale)
    assert mantissa == 0.5
    return k - 1


def follow(rule: polyamp.Rule, unscaled: list[float]) -> list[polyamp.ScalerState]:
    """The states under gradients of these unscaled maxima; what float16 cannot hold overflows."""
    step, state, seen = polyamp.bind(rule), rule.init(), []
    for amax in unscaled:
        scaled = amax * state.loss_scale
        fits = scaled < 65520
        kept = float(np.float32(scaled)) if scaled >= 2.0**-25 else 0.0
        state = step(state, Signal(fits, True, kept if fits else INF))
        seen.append(state)
    return seen


@pytest.mark.parametrize("k0", [0, 12, 24, 100])
def test_the_initial_scale_does_not_matter(k0: int) -> None:
    states = follow(Predictive(init_scale=2.0**k0), [1.0] * 40)
    first = next(i for i, s in enumerate(states) if s.skipped_in_a_row == 0)
    assert exponent(states[first + 2]) == 13
    assert exponent(states[-1]) == 13
    assert first == states[-1].skipped <= 8


def test_zeros_at_first_climb_and_cost_two_skips() -> None:
    states = follow(Predictive(), [0.0] * 50 + [1.0] * 10)
    assert exponent(states[49]) == 22
    assert states[-1].skipped <= 2
    assert exponent(states[-1]) in (12, 13)


def test_zeros_after_numbers_cost_at_most_seven_skips() -> None:
    states = follow(Predictive(), [1.0] * 20 + [0.0] * 200 + [1.0] * 20)
    assert states[-1].skipped <= 7
    assert states[-1].skipped_in_a_row == 0
    assert 8 <= exponent(states[-1]) <= 13


def test_overflows_in_a_row_are_imputed_further_and_further_above() -> None:
    rule = Predictive(init_scale=2.0**16, min_scale=2.0**-100)
    step, state = polyamp.bind(rule), rule.init()
    above = []
    for _ in range(5):
        k = exponent(state)
        state = step(state, Signal(False, True, INF))
        above.append(state.memory[0] / 65536 - (16 - k))
    assert above == [2, 4, 8, 16, 16]


@pytest.mark.parametrize(
    ("finite", "amax", "k"),
    [(True, 1e-42, 20), (True, 3e38, -101), (False, INF, 7), (False, math.nan, 7), (True, 0.0, 20)],
)
def test_extreme_maxima_have_defined_results(finite: bool, amax: float, k: int) -> None:
    rule = Predictive(min_scale=2.0**-120)
    state = polyamp.transition(rule, rule.init(), Signal(finite, True, amax))
    want = {
        (True, 1e-42): 22,
        (True, 3e38): 12 + 13 - 128,
        (True, 0.0): 22,
    }.get((finite, amax), 12 - 2 - 1 - 2)
    assert exponent(state) == want
    assert (state.skipped, state.reason) == (
        (0, Reason.GREW if want > 12 else Reason.LOWERED) if finite else (1, Reason.OVERFLOW)
    )


def test_a_forward_nan_leaves_the_model_alone() -> None:
    rule = Predictive(max_skips_in_a_row=50)
    step, state = polyamp.bind(rule), rule.init()
    for count in range(1, 101):
        state = step(state, Signal(False, False, math.nan))
        assert (state.loss_scale, state.skipped) == (2.0**12, count)
        assert state.memory == rule.init().memory
        assert state.reason == Reason.LOSS_NOT_FINITE
        assert state.fault == (polyamp.Fault.MAX_SKIPS if count >= 50 else polyamp.Fault.NONE)


def test_the_guard_lowers_the_scale_by_as_many_bits() -> None:
    for guard in (0, 1, 4):
        assert exponent(follow(Predictive(guard=guard), [1.0] * 5)[-1]) == 14 - guard


def test_an_overflow_at_the_floor_faults_where_asked() -> None:
    rule = Predictive(init_scale=1.0, min_scale=1.0, at_floor="fault")
    state = polyamp.transition(rule, rule.init(), Signal(False, True, INF))
    assert (state.fault, state.loss_scale, state.reason) == (1, 1.0, Reason.FLOOR)
    state = polyamp.transition(rule, rule.init(), Signal(False, False, INF))
    assert (state.fault, state.reason) == (0, Reason.LOSS_NOT_FINITE)


def test_delayed_scaling_follows_the_largest_of_its_history() -> None:
    states = follow(DelayedScaling(history=8, margin=1), [1.0, *[0.125] * 12])
    assert [exponent(s) for s in states] == [15] * 8 + [18] * 5
    over = follow(DelayedScaling(history=8, margin=1), [2.0])[-1]
    assert (exponent(over), over.memory[1]) == (15, 0)


def test_two_phases_explore_then_keep_a_margin() -> None:
    rule = TwoPhase(init_scale=1024.0, explore_steps=4, margin=3)
    states = follow(rule, [1.0] * 8)
    assert [s.loss_scale for s in states] == [1536.0, 2304.0, 3456.0, *[2.0**13] * 5]
    assert [s.memory[0] for s in states] == [1, 2, 3, -1, -1, -1, -1, -1]


def test_two_phases_end_exploration_at_an_overflow_unless_literal() -> None:
    maxima = [1.0, 1e9, 1.0, 1.0]
    sound = follow(TwoPhase(init_scale=1024.0), maxima)
    assert [s.loss_scale for s in sound] == [1536.0, 768.0, 2.0**13, 2.0**13]
    literal = follow(TwoPhase(init_scale=1024.0, literal=True), maxima)
    assert [s.loss_scale for s in literal] == [1536.0, 768.0, 1152.0, 1728.0]


def test_log_max_keeps_deviations_free() -> None:
    rng = np.random.default_rng(0)
    levels = rng.normal(-3.0, 2.0, 8000)
    states = follow(LogMax(), [float(2.0**x) for x in levels])
    late = [exponent(s) for s in states[4000:]]
    assert abs(np.mean(late) - (16 + 3 - 3.09 * 2.0 - 0.5)) < 0.5
    assert 1 <= states[-1].skipped < 60


def test_the_levels_of_log_max_are_a_mean_and_a_variance() -> None:
    rng = np.random.default_rng(1)
    levels = rng.normal(5.0, 1.5, 20000)
    rule = LogMax(fast=10)
    mean, middle, var, count = follow(rule, [float(2.0**x) for x in levels])[-1].memory
    assert mean / 65536 == pytest.approx(5.0, abs=0.15)
    assert middle / 65536 == pytest.approx(5.0, abs=0.15)
    assert var / 2**20 == pytest.approx(1.5**2, rel=0.1)
    assert count == 20000


RULES: dict[str, polyamp.Rule] = {
    "auto": Predictive(sub_interval=64),
    "predictive": Predictive(),
    "logmax": LogMax(),
    "delayed": DelayedScaling(),
    "two-phase": TwoPhase(),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_have_names(name: str) -> None:
    assert polyamp.resolve_rule(name) == RULES[name]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_amax_is_needed(rule: polyamp.Rule) -> None:
    with pytest.raises(RuleError, match=r"needs Signal\.amax"):
        polyamp.transition(rule, rule.init(), Signal(True))


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (Predictive, {"init_scale": 3.0}, "init_scale must be a power of two, got 3.0"),
        (Predictive, {"min_scale": 0.3}, "min_scale must be a power of two"),
        (Predictive, {"guard": 17}, "guard must be 0 to 16 bits, got 17"),
        (Predictive, {"guard": 1.0}, "guard must be an integer"),
        (Predictive, {"at_floor": "hold"}, "'clamp' or 'fault', got 'hold'"),
        (DelayedScaling, {"history": 0}, "history must be an integer from 1"),
        (DelayedScaling, {"history": 2**21}, "at most 1048576 steps"),
        (DelayedScaling, {"margin": 17}, "margin must be 0 to 16 bits, got 17"),
        (TwoPhase, {"growth_factor": 1.0}, "growth_factor must be above 1"),
        (TwoPhase, {"backoff_factor": 1.0}, "backoff_factor below 1"),
        (TwoPhase, {"literal": 1}, "literal must be True or False, got 1"),
        (LogMax, {"fast": 17}, "fast must be between 0 and 16, got 17"),
        (LogMax, {"deviations": -1.0}, "deviations must be between 0 and 16, got -1.0"),
        (LogMax, {"init_scale": 2.0**30}, "min_scale <= init_scale <= max_scale"),
    ],
)
def test_parameters_out_of_range_are_refused(
    cls: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuleError, match=message):
        cls(**arguments)


ends = st.sampled_from([0.0, 1e-42, 2.0**-126, 2.0**-60, 1.0, 2.0**60, 3e38])
maxima = st.one_of(st.floats(-60, 60).map(lambda x: 2.0**x), ends)
shares = st.sampled_from([-1.0, 0.0, 0.01, 0.02, 0.05, 0.08, 0.5])
measured = st.tuples(
    st.sampled_from([True] * 4 + [False]), maxima, shares, st.sampled_from([True] * 9 + [False])
)
signals = st.lists(measured, min_size=1, max_size=40)
bounds = st.sampled_from([(-24, 12, 100), (-126, 0, 127), (0, 0, 0), (3, 9, 15)])


def against(oracle: Any, rule: polyamp.Rule, run: list[Any]) -> None:
    step, state, slow = polyamp.bind(rule), rule.init(), oracle(rule)
    for finite, amax, sub, loss_finite in run:
        amax = float(np.float32(amax)) if finite else INF
        state = step(state, Signal(finite, loss_finite, amax, sub))
        slow.step(finite, amax, sub, loss_finite)
        assert state.loss_scale == slow.scale
        if isinstance(slow, SlowPredictive):
            assert state.memory == slow.memory
        saved = polyamp.state_from_dict(polyamp.state_to_dict(state), rule)
        assert saved == state


@given(bounds, st.integers(0, 16), st.sampled_from([0, 1, 4, 64]), signals)
def test_predictive_is_its_docstring(
    at: tuple[int, int, int], guard: int, interval: int, run: Any
) -> None:
    low, first, high = (2.0**k for k in at)
    rule = Predictive(first, low, high, guard=guard, sub_interval=interval)
    against(SlowPredictive, rule, run)


@given(bounds, st.sampled_from([1, 2, 7, 8, 9, 16, 20]), st.integers(0, 16), signals)
def test_delayed_scaling_is_its_docstring(at: Any, history: int, margin: int, run: Any) -> None:
    low, first, high = (2.0**k for k in at)
    rule = DelayedScaling(first, low, high, history=history, margin=margin)
    against(SlowDelayed, rule, run)


@given(bounds, st.sampled_from([1, 3, 9, 16]), st.integers(1, 12), st.booleans(), signals)
def test_two_phases_are_their_docstring(
    at: Any, history: int, explore: int, literal: bool, run: Any
) -> None:
    low, first, high = (2.0**k for k in at)
    rule = TwoPhase(first, low, high, explore_steps=explore, history=history, literal=literal)
    against(SlowTwoPhase, rule, run)


@given(signals)
def test_log_max_stays_within_its_bounds(run: Any) -> None:
    rule = LogMax()
    step, state = polyamp.bind(rule), rule.init()
    for finite, amax, sub, loss_finite in run:
        before = state
        state = step(state, Signal(finite, loss_finite, amax if finite else INF, sub))
        assert 1.0 <= state.loss_scale <= 2.0**24
        assert polyamp.state_from_dict(polyamp.state_to_dict(state), rule) == state
        if not loss_finite:
            assert (state.loss_scale, state.memory) == (before.loss_scale, before.memory)
        elif not finite:
            assert state.loss_scale < before.loss_scale or before.loss_scale == 1.0
