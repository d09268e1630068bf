"""Rules and transitions: the right values of known cases, and what is refused."""

from __future__ import annotations

import math
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
from arithmetics import PYTHON, Arithmetic, flags

import polyamp
from polyamp import Dynamic, Fault, Reason, Signal, Static

F32_MAX = 3.4028234663852886e38


def scales(rule: polyamp.Rule, events: str, numbers: Arithmetic = PYTHON) -> list[float]:
    """The scale after each event: "." clean, "x" overflow."""
    return [s[0] for s in numbers.run(rule, flags([int(e == "x") for e in events]))]


# Right values


def test_hysteresis_spares_the_first_overflow(arithmetic: Arithmetic) -> None:
    rule = Dynamic(init_scale=65536, hysteresis=2)
    assert scales(rule, "xx", arithmetic) == [65536.0, 32768.0]


def test_hysteresis_comes_back_at_growth_or_at_any_clean_step(arithmetic: Arithmetic) -> None:
    growth = Dynamic(init_scale=65536, hysteresis=2, hysteresis_refill="growth")
    clean = Dynamic(init_scale=65536, hysteresis=2, hysteresis_refill="clean")
    assert scales(growth, "x.x", arithmetic) == [65536.0, 65536.0, 32768.0]
    assert scales(clean, "x.x", arithmetic) == [65536.0, 65536.0, 65536.0]


def test_hysteresis_once_spent_lets_every_overflow_cut(arithmetic: Arithmetic) -> None:
    rule = Dynamic(init_scale=1024, hysteresis=3, growth_interval=2)
    wanted = [1024, 1024, 512, 256, 256, 512, 512, 512, 256]
    assert scales(rule, "xxxx..xxx", arithmetic) == wanted


def test_tolerance_is_a_share_of_the_steps_since_the_last_change(arithmetic: Arithmetic) -> None:
    tolerant = Dynamic(init_scale=256, growth_interval=3, tolerance=0.4)
    strict = Dynamic(init_scale=256, growth_interval=3, tolerance=0)
    assert scales(tolerant, "..x..x", arithmetic) == [256.0] * 6
    assert scales(strict, "..x..x", arithmetic) == [256.0, 256.0, 128.0, 128.0, 128.0, 64.0]


def test_tolerance_is_compared_as_a_ratio_of_integers(arithmetic: Arithmetic) -> None:
    """One overflow in ten at tolerance 0.1 is a cut; in binary 0.1 is a little more than 1/10."""
    rule = Dynamic(init_scale=64, growth_interval=100, tolerance=0.1)
    assert scales(rule, "." * 9 + "x", arithmetic)[-1] == 32.0
    assert scales(rule, "." * 10 + "x", arithmetic)[-1] == 64.0


def test_tolerance_still_counts_when_its_counters_are_full(arithmetic: Arithmetic) -> None:
    """2**20 steps are remembered exactly, more by halving both counts."""
    rule = Dynamic(init_scale=64, growth_interval=2**30, tolerance=0.5)
    for failed, scale in ((2**19 - 2, 64.0), (2**19, 32.0)):
        full = rule.init()._replace(memory=(2**20, failed))
        new = polyamp.transition(
            rule, arithmetic.write(full), arithmetic.signal((False, True)), arithmetic.xp
        )
        assert arithmetic.read(new)[0] == scale
        assert arithmetic.read(new)[-1] == ((2**19, 2**18 - 1) if scale == 64.0 else (0, 0))


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"at_floor": "clamp"}, [2.0, 1.0, 1.0, 1.0]),
        ({"at_floor": "hold"}, [2.0, 1.0, 1.0, 1.0]),
        ({"at_floor": "fault"}, [2.0, 1.0, 1.0, 1.0]),
        ({"at_floor": "fault", "fault_when": "reaching_floor"}, [2.0, 2.0, 2.0, 2.0]),
    ],
)
def test_at_the_floor(arithmetic: Arithmetic, choice: dict[str, Any], wanted: list[float]) -> None:
    rule = Dynamic(init_scale=4, min_scale=1, **choice)
    assert scales(rule, "xxxx", arithmetic) == wanted
    faults = [s[7] for s in arithmetic.run(rule, flags([1, 1, 1, 1]))]
    first = {"at_floor": 2, "reaching_floor": 1}[rule.fault_when]
    assert faults == [0] * 4 if rule.at_floor != "fault" else [0] * first + [1] * (4 - first)


def test_clamp_goes_to_the_floor_and_hold_stays_above(arithmetic: Arithmetic) -> None:
    clamp = Dynamic(init_scale=3, min_scale=1, at_floor="clamp")
    hold = Dynamic(init_scale=3, min_scale=1, at_floor="hold")
    assert scales(clamp, "xxx", arithmetic) == [1.5, 1.0, 1.0]
    assert scales(hold, "xxx", arithmetic) == [1.5, 1.5, 1.5]


def test_a_fault_at_the_floor_changes_nothing_but_the_counters(arithmetic: Arithmetic) -> None:
    rule = Dynamic(
        init_scale=1, min_scale=1, hysteresis=2, tolerance=0.1, at_floor="fault", growth_interval=9
    )
    *_, before, after = arithmetic.run(rule, flags([1, 0, 0, 1]))
    assert before == (1.0, 2, 1, 3, 1, 0, 0, 0, (3, 1))
    assert after == (1.0, 2, 1, 4, 2, 1, Reason.FLOOR, Fault.AT_FLOOR, (3, 1))


def test_the_third_skip_in_a_row_faults_whatever_the_scale(arithmetic: Arithmetic) -> None:
    for rule in (Dynamic(max_skips_in_a_row=3), Static(8.0, max_skips_in_a_row=3)):
        faults = [s[7] for s in arithmetic.run(rule, flags([1, 1, 0, 1, 1, 1, 0]))]
        assert faults == [0, 0, 0, 0, 0, Fault.MAX_SKIPS, Fault.MAX_SKIPS]


def test_the_third_skip_in_a_row_faults_in_compiled_code(
    backend: Any, fresh_compiler: None
) -> None:
    rule = Dynamic(max_skips_in_a_row=3)
    step = backend.compiled(polyamp.bind(rule, backend.xp))
    states = Arithmetic(backend.NAME, backend.xp).run(rule, flags([1, 1, 0, 1, 1, 1, 0]), step)
    assert [s[7] for s in states] == [0, 0, 0, 0, 0, Fault.MAX_SKIPS, Fault.MAX_SKIPS]


def test_the_first_fault_is_kept(arithmetic: Arithmetic) -> None:
    early = Dynamic(init_scale=2, min_scale=1, at_floor="fault", max_skips_in_a_row=3)
    late = Dynamic(init_scale=8, min_scale=1, at_floor="fault", max_skips_in_a_row=3)
    assert [s[7] for s in arithmetic.run(early, flags([1] * 5))] == [0, 1, 1, 1, 1]
    assert [s[7] for s in arithmetic.run(late, flags([1] * 5))] == [0, 0, 2, 2, 2]
    both = Dynamic(init_scale=1, min_scale=1, at_floor="fault", max_skips_in_a_row=1)
    assert arithmetic.run(both, flags([1]))[0][7] == Fault.MAX_SKIPS


def test_four_hundred_overflows_leave_a_usable_scale(arithmetic: Arithmetic) -> None:
    scale = scales(Dynamic(), "x" * 400 + ".", arithmetic)[-1]
    assert scale == 2.0**-126
    assert np.float32(1) / np.float32(scale) == 2.0**126


def test_a_lowered_interval_grows_at_the_next_clean_step(arithmetic: Arithmetic) -> None:
    state = arithmetic.write(Dynamic().init()._replace(clean=50))
    new = polyamp.transition(
        Dynamic(growth_interval=10), state, arithmetic.signal((True, True)), arithmetic.xp
    )
    assert arithmetic.read(new)[:2] == (131072.0, 0)


def test_a_ceiling_stops_growth_and_never_shrinks_a_scale(arithmetic: Arithmetic) -> None:
    rule = Dynamic(init_scale=512, growth_factor=4, growth_interval=1, max_scale=3000)
    assert scales(rule, "...", arithmetic) == [2048.0, 3000.0, 3000.0]
    above = arithmetic.write(rule.init()._replace(loss_scale=2.0**20))
    new = polyamp.transition(rule, above, arithmetic.signal((True, True)), arithmetic.xp)
    assert arithmetic.read(new)[0] == 2.0**20
    assert arithmetic.read(new)[6] == Reason.CLEAN


def test_a_threshold_limits_the_cut(arithmetic: Arithmetic) -> None:
    rule = Dynamic(init_scale=64, threshold=24, min_scale=1)
    assert scales(rule, "xxx", arithmetic) == [32.0, 24.0, 24.0]
    reasons = [s[6] for s in arithmetic.run(rule, flags([1, 1, 1]))]
    assert reasons == [Reason.OVERFLOW, Reason.FLOOR, Reason.FLOOR]


def test_a_late_first_window_takes_one_clean_step_more(arithmetic: Arithmetic) -> None:
    rule = Dynamic(init_scale=16, growth_interval=2, late_first_window=True)
    assert scales(rule, "...." + ".x...", arithmetic) == [16, 16, 32, 32, 64, 32, 32, 32, 64]
    assert [s[1] for s in arithmetic.run(rule, flags([0, 0, 0, 0, 1, 0]))] == [0, 1, 0, 1, -1, 0]


def test_a_window_that_follows_the_scale(arithmetic: Arithmetic) -> None:
    rule = Dynamic(init_scale=4, growth_interval=2, window_follows_scale=True)
    states = arithmetic.run(rule, flags([0, 0, 0, 0, 1, 0, 0]))
    assert [s[0] for s in states] == [4, 8, 8, 16, 8, 8, 8]
    assert [s[-1][0] for s in states] == [2, 4, 4, 8, 4, 4, 4]
    narrow = arithmetic.run(rule, flags([1, 1, 1]))
    assert [s[-1][0] for s in narrow] == [1, 1, 1]


def test_a_window_grows_no_further_than_2_to_the_24(arithmetic: Arithmetic) -> None:
    rule = Dynamic(growth_factor=1024, growth_interval=2**30, window_follows_scale=True)
    state = rule.init()
    assert state.memory == (2**24,)
    state = arithmetic.write(state._replace(clean=2**24 - 1))
    new = polyamp.transition(rule, state, arithmetic.signal((True, True)), arithmetic.xp)
    assert arithmetic.read(new)[0] == 2.0**26
    assert arithmetic.read(new)[-1] == (2**24,)


def test_every_reason() -> None:
    rule = Dynamic(init_scale=4, min_scale=2, growth_interval=2, hysteresis=2)
    events = [(True, True), (True, True), (False, True), (False, True), (False, True)]
    reasons = [s[6] for s in PYTHON.run(rule, [*events, (False, True), (True, False)])]
    assert reasons == [
        Reason.CLEAN,
        Reason.GREW,
        Reason.TOLERATED,
        Reason.OVERFLOW,
        Reason.OVERFLOW,
        Reason.FLOOR,
        Reason.LOSS_NOT_FINITE,
    ]


def test_growth_that_meets_the_ceiling_is_not_called_growth() -> None:
    rule = Dynamic(init_scale=8, max_scale=8, growth_interval=1, hysteresis=2)
    states = PYTHON.run(rule, flags([1, 0]))
    assert [(s[1], s[2], s[6]) for s in states] == [(0, 1, Reason.TOLERATED), (0, 2, Reason.CLEAN)]


def test_a_static_scale_never_changes_and_skips_all_the_same(arithmetic: Arithmetic) -> None:
    states = arithmetic.run(Static(128.0), flags([0, 0, 1, 0]))
    assert [s[0] for s in states] == [128.0] * 4
    assert [s[1] for s in states] == [1, 2, 0, 1]
    assert states[-1][3:6] == (4, 1, 0)
    assert [s[6] for s in states] == [Reason.CLEAN, Reason.CLEAN, Reason.OVERFLOW, Reason.CLEAN]


def test_transition_is_bind_called_once() -> None:
    rule, signal = Dynamic(init_scale=8.0), Signal(False)
    once = polyamp.transition(rule, rule.init(), signal)
    assert once == polyamp.bind(rule)(rule.init(), signal)
    assert once.loss_scale == 4.0
    assert polyamp.decision(rule.init(), once) == (8.0, False, 4.0, Reason.OVERFLOW)


def test_numpy_bools_count_as_bools() -> None:
    new = polyamp.transition(Dynamic(), Dynamic().init(), Signal(np.True_, np.False_))
    assert (new.skipped, new.reason) == (1, Reason.LOSS_NOT_FINITE)


def test_fresh_states_share_no_array(backend: Any) -> None:
    """Buffers that are given away one by one (donation) must be distinct."""
    state = Dynamic(tolerance=0.1).init(backend.xp)
    leaves = [*state[:-1], *state.memory]
    assert len({id(leaf) for leaf in leaves}) == len(leaves) == 10


# What is refused

NOT_A_NUMBER = [math.nan, math.inf, -math.inf, "2", None, True, [2.0], 10**400]
BAD = [
    *(("init_scale", v) for v in [*NOT_A_NUMBER, 0, -1, 1e-39, 1e39]),
    *(("min_scale", v) for v in [*NOT_A_NUMBER, 0, 2.0**-127, 2.0**17]),
    *(("max_scale", v) for v in [*NOT_A_NUMBER, 3.5e38, 2.0**15]),
    *(("growth_factor", v) for v in [*NOT_A_NUMBER, 1, 0.5, 1 + 1e-9]),
    *(("backoff_factor", v) for v in [*NOT_A_NUMBER, 0, 1, 2, -0.5, 1 - 1e-9, 1e-46]),
    *(("growth_interval", v) for v in [*NOT_A_NUMBER, 0, -1, 2.0, 2**31]),
    *(("hysteresis", v) for v in [*NOT_A_NUMBER, 0, -1, 2.0, 2**31]),
    *(("tolerance", v) for v in [*NOT_A_NUMBER, -0.1, 1.1]),
    *(("threshold", v) for v in [math.nan, math.inf, "2", True, 0, 1e39, 10**400]),
    *(("max_skips_in_a_row", v) for v in [math.nan, "2", True, 0, -1, 2.0, 2**31]),
    *(("hysteresis_refill", v) for v in ["never", None, 1, True]),
    *(("at_floor", v) for v in ["abort", None, 1]),
    *(("fault_when", v) for v in ["later", None]),
    *(("late_first_window", v) for v in [1, 0, "yes", None]),
    *(("window_follows_scale", v) for v in [1, 0, "yes", None]),
]


def short(value: Any) -> str:
    return repr(value)[:20]


@pytest.mark.parametrize(("name", "value"), BAD, ids=short)
def test_a_bad_parameter_is_named_with_its_value(name: str, value: Any) -> None:
    with pytest.raises(polyamp.RuleError, match=f"Dynamic: .*{name}") as caught:
        Dynamic(**{name: value})
    assert isinstance(caught.value, ValueError)
    shown = {repr(value), f"{value:g}"} if isinstance(value, float) else {repr(value)}
    assert any(text in str(caught.value) for text in shown)


@pytest.mark.parametrize("value", [*NOT_A_NUMBER, 0, -1, 1e39], ids=short)
def test_a_bad_static_scale_is_named(value: Any) -> None:
    with pytest.raises(polyamp.RuleError, match="Static: init_scale"):
        Static(value)


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"window_follows_scale": True, "growth_factor": 1.5}, "whole growth_factor"),
        ({"window_follows_scale": True, "growth_factor": 2.0**25}, "whole growth_factor"),
        ({"window_follows_scale": True, "late_first_window": True}, "exclude each other"),
        ({"init_scale": 4.0, "min_scale": 8.0}, "min_scale <= init_scale <= max_scale"),
        ({"init_scale": 4.0, "max_scale": 2.0}, "min_scale <= init_scale <= max_scale"),
        ({"max_scale": 2.0**20, "threshold": 2.0**21}, "threshold"),
    ],
)
def test_parameters_that_do_not_go_together(choice: dict[str, Any], words: str) -> None:
    with pytest.raises(polyamp.RuleError, match=words):
        Dynamic(**choice)


def test_whole_numbers_are_taken_for_floats() -> None:
    rule = Dynamic(init_scale=65536, growth_factor=2, tolerance=0, max_skips_in_a_row=5)
    assert rule == Dynamic(max_skips_in_a_row=5)
    assert hash(rule) == hash(Dynamic(max_skips_in_a_row=5))
    assert type(rule.init_scale) is type(rule.growth_factor) is type(rule.tolerance) is float


@pytest.mark.parametrize("rule", ["torch", None, 2.0, Dynamic])
def test_bind_wants_a_rule(rule: Any) -> None:
    with pytest.raises(polyamp.RuleError, match="needs a Rule"):
        polyamp.bind(rule)


def test_can_fault() -> None:
    assert not Dynamic().can_fault()
    assert not Static().can_fault()
    assert Dynamic(at_floor="fault").can_fault()
    assert Dynamic(max_skips_in_a_row=9).can_fault()
    assert Static(max_skips_in_a_row=9).can_fault()


# What the host does about it


def test_a_fault_is_raised_with_what_is_known() -> None:
    rule = Dynamic(init_scale=2, min_scale=1, at_floor="fault")
    state = rule.init()
    polyamp.raise_on_fault(state)
    for _ in range(2):
        state = polyamp.transition(rule, state, Signal(False))
    with pytest.raises(polyamp.ScaleFloorError, match=r"no smaller loss scale.*block.3") as caught:
        polyamp.raise_on_fault(state, module="block.3")
    error = caught.value
    assert (error.loss_scale, error.skipped_in_a_row, error.module) == (1.0, 2, "block.3")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.loss_scale, again.skipped_in_a_row, again.module) == (
        str(error),
        1.0,
        2,
        "block.3",
    )


def test_too_many_skips_are_raised_on_device_scalars_too(arithmetic: Arithmetic) -> None:
    rule = Static(4.0, max_skips_in_a_row=1)
    state = polyamp.transition(
        rule, rule.init(arithmetic.xp), arithmetic.signal((False, True)), arithmetic.xp
    )
    with pytest.raises(polyamp.ScaleFloorError, match="max_skips_in_a_row") as caught:
        polyamp.raise_on_fault(state)
    assert (caught.value.loss_scale, caught.value.skipped_in_a_row) == (4.0, 1)
    assert caught.value.module is None


def test_skips_warn_at_1_10_100_in_a_row() -> None:
    from polyamp._state import warn_on_skip

    warned = []
    for row in range(1001):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_on_skip(row, 8.0, stacklevel=1)
        warned += [row] * len(caught)
        assert all(w.category is polyamp.SkippedStepWarning for w in caught)
        assert all(w.filename == __file__ for w in caught)
    assert warned == [1, 10, 100, 1000]
