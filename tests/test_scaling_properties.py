"""The invariants of the state machine, over random rules and random runs, against the oracle.

The numbers in the test names: 1 unscale with the scale that was used, 2 the scale is finite and
between floor and ceiling, 3 overflow is judged unscaled, 4 a skip leaves no trace, 5 select and
never multiply, 6 flags are combined before one decision, 7 saved and loaded goes on the same,
8 arguments are not changed and rules are values, 9 a lowered interval still grows, 10 hysteresis
has two refills. 3 and 5, and the other half of 1, 4 and 6, are a backend's to keep: see
`polyamp.testing.BackendContract`.
"""

from __future__ import annotations

import copy
import json
import math
import random
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import numpy as np
import pytest
from arithmetics import PYTHON, Arithmetic, Flags
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import SlowScaler
from strategies import dynamics, rules, runs

import polyamp

Run = list[Flags]

FIXED = [
    polyamp.Dynamic(init_scale=2.0**10, growth_interval=5, growth_factor=1.5, backoff_factor=0.7),
    polyamp.Dynamic(
        init_scale=8.0,
        min_scale=1.0,
        max_scale=2.0**9,
        growth_interval=4,
        hysteresis=2,
        hysteresis_refill="clean",
        tolerance=0.25,
        late_first_window=True,
        max_skips_in_a_row=6,
    ),
    polyamp.Dynamic(
        init_scale=64.0,
        min_scale=16.0,
        growth_interval=3,
        hysteresis=2,
        at_floor="fault",
        fault_when="reaching_floor",
        late_first_window=True,
    ),
    polyamp.Dynamic.like("metaseq", growth_interval=2, tolerance=0.1, threshold=0.25),
    polyamp.Static(512.0, max_skips_in_a_row=4),
]
"""Rules that use every parameter between them, for where each rule costs a compilation."""


def oracle(rule: polyamp.Rule, events: Run) -> list[tuple[Any, ...]]:
    slow, seen = SlowScaler(rule), []
    for finite, loss_finite in events:
        slow.step(finite, loss_finite)
        seen.append(slow.state)
    return seen


def long_run(seed: int, steps: int) -> Run:
    """Mostly clean, overflows in bursts, now and then a bad loss."""
    dice = random.Random(seed)
    events: Run = []
    while len(events) < steps:
        events += [(True, True)] * dice.randrange(1, 25)
        events += [(False, True)] * dice.choice([1, 1, 1, 2, 3, 8])
        events += [(dice.random() < 0.5, dice.random() < 0.8)]
    return events[:steps]


@settings(max_examples=200)
@given(rule=rules, events=runs())
def test_every_field_equals_the_oracle(arithmetic: Arithmetic, rule: Any, events: Run) -> None:
    assert arithmetic.run(rule, events) == oracle(rule, events)


@given(rule=rules, events=runs())
def test_a_loss_that_is_known_to_be_fine_needs_no_flag(
    arithmetic: Arithmetic, rule: Any, events: Run
) -> None:
    step, state = polyamp.bind(rule, arithmetic.xp), rule.init(arithmetic.xp)
    for finite, _ in events:
        state = step(state, polyamp.Signal(arithmetic.flag(finite)))
    assert arithmetic.read(state) == oracle(rule, [(f, True) for f, _ in events])[-1]


@pytest.mark.parametrize("rule", FIXED, ids=["odd", "mixed", "fault", "metaseq", "static"])
def test_long_runs_are_bit_identical_in_eager_and_compiled_code(
    backend: Any, rule: polyamp.Rule, fresh_compiler: None
) -> None:
    numbers, events = Arithmetic(backend.NAME, backend.xp), long_run(seed=1, steps=1500)
    wanted = oracle(rule, events)
    assert {w[6] for w in wanted} >= {0, 5}
    assert PYTHON.run(rule, events) == wanted
    assert numbers.run(rule, events) == wanted
    step = backend.compiled(polyamp.bind(rule, backend.xp))
    assert numbers.run(rule, events, step) == wanted


@given(rule=rules, events=runs())
def test_1_the_decision_carries_the_scale_that_was_used(rule: Any, events: Run) -> None:
    state, step = rule.init(), polyamp.bind(rule)
    for finite, loss_finite in events:
        new = step(state, polyamp.Signal(finite, loss_finite))
        verdict = polyamp.decision(state, new)
        assert verdict == (state.loss_scale, finite and loss_finite, new.loss_scale, new.reason)
        state = new


@settings(max_examples=400)
@given(rule=rules, events=runs())
def test_2_the_scale_stays_between_floor_and_ceiling(rule: Any, events: Run) -> None:
    low, high = (float(np.float32(s)) for s in (rule.min_scale, rule.max_scale))
    for scale, *_ in PYTHON.run(rule, events):
        assert 2.0**-126 <= low <= scale <= high < math.inf


@given(rule=dynamics(), clean=st.integers(0, 3))
def test_2_no_number_of_overflows_takes_the_scale_to_zero(rule: Any, clean: int) -> None:
    states = PYTHON.run(rule, [(False, True)] * 400 + [(True, True)] * (clean + 1))
    assert min(s[0] for s in states) >= 2.0**-126
    assert states[-1][4:6] == (400, 0)
    assert math.isfinite(np.float32(1.0) / np.float32(states[-1][0]))


@given(rule=rules, events=runs())
def test_4_a_skipped_step_never_raises_the_scale_and_counts_nothing_as_clean(
    rule: Any, events: Run
) -> None:
    state, step = rule.init(), polyamp.bind(replace_threshold(rule))
    for finite, loss_finite in events:
        new = step(state, polyamp.Signal(finite, loss_finite))
        if not (finite and loss_finite):
            assert new.loss_scale <= state.loss_scale
            assert new.clean in (-1, 0, state.clean)
        state = new


def replace_threshold(rule: Any) -> Any:
    """`rule` without a threshold, which may lie above the scale and then lifts it."""
    return replace(rule, threshold=None) if isinstance(rule, polyamp.Dynamic) else rule


@given(rule=rules, events=runs())
def test_6_one_bad_flag_is_enough(rule: Any, events: Run) -> None:
    """Gradients bad, loss bad and both bad: the same state but for the reason."""
    grads = PYTHON.run(rule, [(f and x, True) for f, x in events])
    loss = PYTHON.run(rule, [(True, f and x) for f, x in events])
    both = PYTHON.run(rule, [(f and x, f and x) for f, x in events])
    assert [s[:6] + s[7:] for s in grads] == [s[:6] + s[7:] for s in loss]
    assert loss == both


@given(rule=rules, events=runs(), data=st.data())
def test_7_saved_at_any_step_and_loaded_elsewhere_it_goes_on_the_same(
    arithmetic: Arithmetic, rule: Any, events: Run, data: Any
) -> None:
    """Saved from one arithmetic, read by Python, carried on there and in the first one."""
    cut = data.draw(st.integers(0, len(events)), label="cut")
    step, state = polyamp.bind(rule, arithmetic.xp), rule.init(arithmetic.xp)
    for flags in events[:cut]:
        state = step(state, arithmetic.signal(flags))
    text = json.dumps([polyamp.rule_to_dict(rule), polyamp.state_to_dict(state)])
    saved_rule, saved_state = json.loads(text)
    loaded_rule = polyamp.rule_from_dict(saved_rule)
    loaded = polyamp.state_from_dict(saved_state, loaded_rule)
    assert loaded == arithmetic.read(state)
    host = loaded
    there = arithmetic.write(loaded)
    for flags in events[cut:]:
        host = polyamp.transition(loaded_rule, host, polyamp.Signal(*flags))
        there = step(there, arithmetic.signal(flags))
    wanted = oracle(rule, events)[-1]
    assert tuple(host) == wanted
    assert arithmetic.read(there) == wanted


@given(rule=rules, events=runs(most=12))
def test_8_a_transition_changes_none_of_its_arguments(
    arithmetic: Arithmetic, rule: Any, events: Run
) -> None:
    before, step = copy.deepcopy(rule), polyamp.bind(rule, arithmetic.xp)
    state = rule.init(arithmetic.xp)
    for flags in events:
        signal, kept = arithmetic.signal(flags), arithmetic.read(state)
        new = step(state, signal)
        polyamp.decision(state, new)
        assert arithmetic.read(state) == kept
        assert (bool(signal.finite), bool(signal.loss_finite)) == flags
        state = new
    assert rule == before


@given(rule=rules, other=rules)
def test_8_rules_are_frozen_and_hash_as_they_compare(rule: Any, other: Any) -> None:
    twin = type(rule)(**{f.name: getattr(rule, f.name) for f in fields(rule)})
    assert twin == rule
    assert hash(twin) == hash(rule)
    assert (rule == other) == (polyamp.rule_to_dict(rule) == polyamp.rule_to_dict(other))
    for field in fields(rule):
        with pytest.raises(FrozenInstanceError):
            setattr(rule, field.name, getattr(rule, field.name))


@given(rule=dynamics(), clean=st.integers(1, 200), lower=st.integers(1, 20))
def test_9_a_growth_interval_lowered_below_the_count_grows_at_once(
    rule: Any, clean: int, lower: int
) -> None:
    rule = replace(
        rule,
        init_scale=2.0**10,
        min_scale=1.0,
        max_scale=2.0**126,
        threshold=None,
        growth_interval=lower,
        window_follows_scale=False,
    )
    old = rule.init()._replace(clean=max(clean, lower) + 1)
    new = polyamp.transition(rule, old, polyamp.Signal(True))
    assert (new.clean, new.left, new.reason) == (0, rule.hysteresis, polyamp.Reason.GREW)
    assert new.loss_scale == np.float32(2.0**10) * np.float32(rule.growth_factor)


@given(hysteresis=st.integers(1, 5), refill=st.sampled_from(["growth", "clean"]), events=runs())
def test_10_hysteresis_is_refilled_when_the_rule_says_so(
    hysteresis: int, refill: Any, events: Run
) -> None:
    rule = polyamp.Dynamic(hysteresis=hysteresis, hysteresis_refill=refill, growth_interval=3)
    left, clean = hysteresis, 0
    states = PYTHON.run(rule, events)
    for (finite, loss_finite), state in zip(events, states, strict=True):
        if finite and loss_finite:
            clean += 1
            left = hysteresis if refill == "clean" or clean % 3 == 0 else left
        else:
            clean, left = 0, max(left - 1, 1)
        assert state[2] == left


@given(rule=rules, events=runs())
def test_counters_count(rule: Any, events: Run) -> None:
    skipped = row = 0
    for n, (flags, state) in enumerate(zip(events, PYTHON.run(rule, events), strict=True)):
        skipped, row = (skipped, 0) if all(flags) else (skipped + 1, row + 1)
        assert state[3:6] == (n + 1, skipped, row)


@given(rule=rules, events=runs())
def test_a_fault_stays_until_the_host_acts(rule: Any, events: Run) -> None:
    faults = [state[7] for state in PYTHON.run(rule, events)]
    first = next((f for f in faults if f), 0)
    assert faults == [0] * faults.count(0) + [first] * (len(faults) - faults.count(0))
    assert rule.can_fault() or first == 0
