"""The portable form: what comes back, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

import copy
import json
import math
import warnings
from typing import Any

import pytest
from arithmetics import PYTHON, Arithmetic, Flags
from hypothesis import given
from strategies import rules, runs

import polyamp
from polyamp import Dynamic, StateError, Static

TOLERANT = Dynamic(init_scale=64.0, tolerance=0.25, growth_interval=3, hysteresis=2)
WINDOWED = Dynamic.like("metaseq")


def reject(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def through_json(data: Any) -> Any:
    """Written and read by a strict JSON codec."""
    return json.loads(json.dumps(data, allow_nan=False), parse_constant=reject)


# What comes back


@given(rule=rules)
def test_a_rule_comes_back_equal(rule: polyamp.Rule) -> None:
    data = through_json(polyamp.rule_to_dict(rule))
    loaded = polyamp.rule_from_dict(data)
    assert loaded == rule
    assert type(loaded) is type(rule)
    assert polyamp.rule_to_dict(loaded) == data


@given(rule=rules, events=runs())
def test_a_state_comes_back_equal_from_every_arithmetic(
    arithmetic: Arithmetic, rule: polyamp.Rule, events: list[Flags]
) -> None:
    step, state = polyamp.bind(rule, arithmetic.xp), rule.init(arithmetic.xp)
    for flags in events:
        state = step(state, arithmetic.signal(flags))
    data = through_json(polyamp.state_to_dict(state))
    loaded = polyamp.state_from_dict(data, rule)
    assert PYTHON.read(loaded) == arithmetic.read(state)
    assert polyamp.state_to_dict(loaded) == data
    assert polyamp.scaler_from_dict(through_json(polyamp.scaler_to_dict(rule, state))) == (
        rule,
        loaded,
    )


@pytest.mark.parametrize("system", polyamp.presets())
def test_presets_come_back_equal(system: str) -> None:
    rule = polyamp.presets()[system]
    assert polyamp.rule_from_dict(through_json(polyamp.rule_to_dict(rule))) == rule


def test_the_form_itself() -> None:
    """Later versions read what this one writes: it may only change with the version number."""
    assert polyamp.rule_to_dict(Static(8.0)) == {
        "polyamp": 1,
        "kind": "rule",
        "rule": "Static",
        "init_scale": 8.0,
        "max_skips_in_a_row": None,
    }
    state = polyamp.transition(TOLERANT, TOLERANT.init(), polyamp.Signal(False))
    assert polyamp.state_to_dict(state) == {
        "polyamp": 1,
        "kind": "state",
        "loss_scale": 64.0,
        "clean": 0,
        "left": 1,
        "step": 1,
        "skipped": 1,
        "skipped_in_a_row": 1,
        "reason": 3,
        "fault": 0,
        "memory": [1, 1],
    }
    assert list(polyamp.rule_to_dict(Dynamic())) == [
        "polyamp",
        "kind",
        "rule",
        *Dynamic.__dataclass_fields__,
    ]


# Scales


@pytest.mark.parametrize("scale", [0, 0.0, -0.0, 1e-46, 2.0**-130])
def test_a_collapsed_scale_is_lifted_with_a_warning(scale: float) -> None:
    data = {**polyamp.state_to_dict(Dynamic().init()), "loss_scale": scale}
    with pytest.warns(UserWarning, match="below the floor; lifted to 1.17549e-38") as caught:
        state = polyamp.state_from_dict(data, Dynamic())
    assert state.loss_scale == 2.0**-126
    assert [w.filename for w in caught] == [__file__]


def test_a_collapsed_scale_is_lifted_to_the_rules_own_floor() -> None:
    rule = Dynamic(min_scale=0.1)
    data = {**polyamp.state_to_dict(rule.init()), "loss_scale": 0.05}
    with pytest.warns(UserWarning, match="lifted"):
        state = polyamp.state_from_dict(data, rule)
    assert state.loss_scale == 0.10000000149011612
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = polyamp.state_from_dict(polyamp.state_to_dict(state), rule)
    assert again == state


def test_a_scale_above_the_ceiling_is_kept() -> None:
    data = {**polyamp.state_to_dict(Dynamic().init()), "loss_scale": 2.0**30}
    assert polyamp.state_from_dict(data, Dynamic(max_scale=2.0**20)).loss_scale == 2.0**30


def test_a_scale_is_rounded_to_float32() -> None:
    data = {**polyamp.state_to_dict(Dynamic().init()), "loss_scale": 1000.1}
    assert polyamp.state_from_dict(data, Dynamic()).loss_scale == 1000.0999755859375


# A state under a rule it was not saved with


def test_more_hysteresis_than_the_rule_has_is_cut_down_to_it() -> None:
    """Otherwise a rule that cuts at once would never cut again."""
    data = {**polyamp.state_to_dict(Dynamic().init()), "left": 5}
    assert polyamp.state_from_dict(data, Dynamic()).left == 1
    assert polyamp.state_from_dict(data, Dynamic(hysteresis=3)).left == 3
    assert polyamp.state_from_dict(data, Static()).left == 1


def test_a_late_window_is_known_to_late_rules_only() -> None:
    late = Dynamic(late_first_window=True)
    data = polyamp.state_to_dict(late.init())
    assert polyamp.state_from_dict(data, late).clean == -1
    with pytest.raises(StateError, match="clean must be an integer from 0"):
        polyamp.state_from_dict(data, Dynamic())


@pytest.mark.parametrize(
    ("rule", "memory"),
    [
        (Dynamic(), [0]),
        (TOLERANT, []),
        (TOLERANT, [0]),
        (TOLERANT, [0, 0, 0]),
        (TOLERANT, "00"),
        (TOLERANT, None),
        (TOLERANT, {"0": 0, "1": 0}),
        (WINDOWED, []),
        (Static(), [1]),
    ],
)
def test_memory_of_another_length_is_refused(rule: polyamp.Rule, memory: Any) -> None:
    data = {**polyamp.state_to_dict(rule.init()), "memory": memory}
    with pytest.raises(StateError, match=f"memory must be a list of {len(rule.init().memory)}"):
        polyamp.state_from_dict(data, rule)


@pytest.mark.parametrize(
    ("rule", "memory"),
    [
        (TOLERANT, [-1, 0]),
        (TOLERANT, [0, 1.0]),
        (TOLERANT, [True, 0]),
        (TOLERANT, [0, "1"]),
        (TOLERANT, [2**21, 0]),
        (TOLERANT, [0, 2**31]),
        (WINDOWED, [0]),
        (WINDOWED, [-4]),
        (WINDOWED, [2**24 + 1]),
    ],
)
def test_memory_out_of_range_is_refused(rule: polyamp.Rule, memory: Any) -> None:
    """A window of 0 would be divided by; counts beyond the caps overflow int32 on devices."""
    data = {**polyamp.state_to_dict(rule.init()), "memory": memory}
    with pytest.raises(StateError, match="memory must be an integer from"):
        polyamp.state_from_dict(data, rule)


# What is refused

NOT_A_SCALE = [
    math.nan,
    math.inf,
    -math.inf,
    -1.0,
    -1,
    True,
    False,
    "8",
    None,
    [8.0],
    1e39,
    10**400,
]
NOT_A_COUNT = [math.nan, 1.0, -1, -2, True, False, "1", None, [1], 2**31, 10**400]
COUNTS = ["clean", "left", "step", "skipped", "skipped_in_a_row", "reason", "fault"]


def short(value: Any) -> str:
    return repr(value)[:12]


def refuses_state(data: Any, words: str, rule: polyamp.Rule = TOLERANT) -> None:
    """Refused with these words, alone and inside a saved scaler; nothing is changed."""
    before = copy.deepcopy(data)
    with pytest.raises(StateError, match=words) as caught:
        polyamp.state_from_dict(data, rule)
    assert isinstance(caught.value, ValueError)
    whole = {**polyamp.scaler_to_dict(rule, rule.init()), "state": data}
    with pytest.raises(StateError, match=words):
        polyamp.scaler_from_dict(whole)
    assert repr(data) == repr(before)


def refuses_rule(data: Any, words: str) -> None:
    before = repr(data)
    with pytest.raises(StateError, match=words):
        polyamp.rule_from_dict(data)
    with pytest.raises(StateError, match=words):
        polyamp.scaler_from_dict(
            {**polyamp.scaler_to_dict(TOLERANT, TOLERANT.init()), "rule": data}
        )
    assert repr(data) == before


@pytest.mark.parametrize("value", NOT_A_SCALE, ids=short)
def test_a_wrong_scale(value: Any) -> None:
    data = {**polyamp.state_to_dict(TOLERANT.init()), "loss_scale": value}
    refuses_state(data, "loss_scale must be a positive finite number, got ")


@pytest.mark.parametrize("key", COUNTS)
@pytest.mark.parametrize("value", NOT_A_COUNT, ids=short)
def test_a_wrong_count(key: str, value: Any) -> None:
    data = {**polyamp.state_to_dict(TOLERANT.init()), key: value}
    refuses_state(data, f"state: {key} must be an integer from [01] to .*, got ")


def test_codes_beyond_the_known_ones() -> None:
    good = polyamp.state_to_dict(TOLERANT.init())
    refuses_state({**good, "left": 0}, "left must be an integer from 1")
    refuses_state({**good, "reason": 7}, "reason must be an integer from 0 to 6")
    refuses_state({**good, "fault": 3}, "fault must be an integer from 0 to 2")


@pytest.mark.parametrize("key", ["loss_scale", *COUNTS, "memory"])
def test_a_missing_state_key(key: str) -> None:
    data = polyamp.state_to_dict(TOLERANT.init())
    del data[key]
    refuses_state(data, f"state: missing key {key}$")


@pytest.mark.parametrize("key", Dynamic.__dataclass_fields__)
def test_a_missing_rule_key(key: str) -> None:
    data = polyamp.rule_to_dict(TOLERANT)
    del data[key]
    refuses_rule(data, f"rule Dynamic: missing key {key}$")


def test_unknown_keys_get_the_closest() -> None:
    state, rule = polyamp.state_to_dict(TOLERANT.init()), polyamp.rule_to_dict(TOLERANT)
    refuses_state({**state, "skiped": 1}, "unknown key 'skiped'; did you mean 'skipped'")
    refuses_state({**state, 7: 1}, "unknown key 7")
    refuses_rule({**rule, "tolerence": 1}, "unknown key 'tolerence'; did you mean 'tolerance'")


@pytest.mark.parametrize("version", [0, 2, 99, "1", None, True, math.nan, [1]], ids=short)
def test_an_unknown_version(version: Any) -> None:
    refuses_state({**polyamp.state_to_dict(TOLERANT.init()), "polyamp": version}, "format version")
    refuses_rule({**polyamp.rule_to_dict(TOLERANT), "polyamp": version}, "reads version 1")
    whole = {**polyamp.scaler_to_dict(TOLERANT, TOLERANT.init()), "polyamp": version}
    with pytest.raises(StateError, match=r"is not known; this polyamp reads version 1.*upgrade"):
        polyamp.scaler_from_dict(whole)


@pytest.mark.parametrize("data", [None, 3, "{}", [], b""], ids=short)
def test_what_is_no_dict(data: Any) -> None:
    refuses_state(data, f"a saved state is a dict, got {type(data).__name__}")
    refuses_rule(data, f"a saved rule is a dict, got {type(data).__name__}")


def test_what_is_another_kind_of_dict() -> None:
    state, rule = polyamp.state_to_dict(TOLERANT.init()), polyamp.rule_to_dict(TOLERANT)
    refuses_state({}, "'polyamp' .format version. is missing")
    refuses_state({"scale": 65536.0, "_growth_tracker": 0}, "not a saved polyamp state")
    refuses_state(rule, "expected a saved state, got kind 'rule'")
    refuses_rule(state, "expected a saved rule, got kind 'state'")
    refuses_rule({**rule, "kind": None}, "got kind None")


def test_a_scaler_needs_both_parts() -> None:
    whole = polyamp.scaler_to_dict(TOLERANT, TOLERANT.init())
    for key in ("rule", "state"):
        part = {k: v for k, v in whole.items() if k != key}
        with pytest.raises(StateError, match=f"scaler: missing key {key}$"):
            polyamp.scaler_from_dict(part)
    with pytest.raises(StateError, match="scaler: unknown key 'extra'"):
        polyamp.scaler_from_dict({**whole, "extra": 1})


@pytest.mark.parametrize("name", ["Dynamik", None, 3, "", ["Dynamic"], "Rule"], ids=short)
def test_an_unknown_rule(name: Any) -> None:
    refuses_rule({**polyamp.rule_to_dict(TOLERANT), "rule": name}, "unknown rule .*'Dynamic'")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("init_scale", math.nan),
        ("init_scale", -1.0),
        ("init_scale", True),
        ("init_scale", "64"),
        ("init_scale", 10**400),
        ("growth_interval", 2.5),
        ("growth_interval", True),
        ("hysteresis", 0),
        ("hysteresis_refill", "sometimes"),
        ("tolerance", None),
        ("late_first_window", 1),
        ("max_skips_in_a_row", "3"),
    ],
    ids=short,
)
def test_a_wrong_rule_value(key: str, value: Any) -> None:
    data = {**polyamp.rule_to_dict(TOLERANT), key: value}
    refuses_rule(data, f"saved rule is not valid: Dynamic: .*{key}")


def test_a_rule_of_somebody_elses_cannot_be_saved() -> None:
    class Mine(polyamp.Rule):
        def init(self, xp=polyamp.host):
            return Dynamic().init(xp)

        def bind_change(self, xp):
            return Dynamic().bind_change(xp)

    Double = type("Dynamic", (Dynamic,), {})
    for rule in (Mine(), Double(), "torch", Dynamic):
        with pytest.raises(StateError, match="cannot save"):
            polyamp.rule_to_dict(rule)  # type: ignore[arg-type]


def test_loading_hands_out_nothing_of_what_was_read() -> None:
    data = polyamp.state_to_dict(TOLERANT.init())
    state = polyamp.state_from_dict(data, TOLERANT)
    data["memory"].append(9)
    data["clean"] = 7
    assert state == TOLERANT.init()
