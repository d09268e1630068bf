"""Scalers of other systems: round trips, what a target cannot do, detection, malformed input."""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import dynamics, rules, runs
from test_foreign_continuation import quiet, scales_here

import polyamp
from polyamp import Dynamic, StateError, Static, export_scaler, import_scaler

SYSTEMS = list(polyamp.presets())
TORCH = {
    "scale": 64.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 3,
    "_growth_tracker": 1,
}
MEGATRON = {"scale": 64.0, "growth_tracker": 1, "hysteresis_tracker": 2}
MEGATRON_CONFIG = {
    "initial_loss_scale": 64.0,
    "loss_scale_window": 3,
    "min_loss_scale": 1.0,
    "hysteresis": 2,
}
ZERO = {
    "cur_scale": 64.0,
    "dynamic": True,
    "cur_iter": 9,
    "last_overflow_iter": 4,
    "scale_factor": 2.0,
    "scale_window": 3,
    "min_scale": 1.0,
    "delayed_shift": 2,
    "cur_hysteresis": 1,
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True,
}
STAGE0 = {
    "dynamic_loss_scale": True,
    "cur_scale": 64.0,
    "cur_iter": 9,
    "last_overflow_iter": 4,
    "scale_factor": 2.0,
    "scale_window": 3,
}


def run_to(rule: polyamp.Rule, events: list[tuple[bool, bool]]) -> polyamp.ScalerState:
    step, state = polyamp.bind(rule), rule.init()
    for finite, loss in events:
        state = step(state, polyamp.Signal(finite, loss))
    return state


# Round trips


@pytest.mark.parametrize("system", SYSTEMS)
@given(data=st.data(), events=runs())
def test_a_rule_of_a_system_comes_back_with_its_state(
    system: str, data: st.DataObject, events: list[tuple[bool, bool]]
) -> None:
    interval = data.draw(st.integers(1, 9))
    start = data.draw(st.sampled_from([64.0, 1024.0]))
    named = {"growth_interval": interval, "init_scale": start} if system != "apex" else {}
    rule = Dynamic.like(system, **named)
    state = run_to(rule, events)
    written = quiet(export_scaler, rule, state, system)
    config = quiet(export_scaler, rule, state, system, part="config")
    through = json.loads(json.dumps(written, allow_nan=False))
    back, again = quiet(import_scaler, through, system, rule=config)
    assert back == rule
    assert again.loss_scale == state.loss_scale
    forgets = system in ("colossalai", "fairseq", "metaseq")
    fields = ("loss_scale",) if forgets else ("loss_scale", "clean", "left", "memory")
    assert [getattr(again, f) for f in fields] == [getattr(state, f) for f in fields]


@given(rule=rules, events=runs(), system=st.sampled_from(SYSTEMS))
def test_a_rule_is_written_faithfully_or_refused(
    rule: polyamp.Rule, events: list[tuple[bool, bool]], system: str
) -> None:
    state = run_to(rule, events)
    before = copy.deepcopy(state)
    try:
        written = quiet(export_scaler, rule, state, system)
    except StateError:
        return
    assert state == before
    config = quiet(export_scaler, rule, state, system, part="config", lossy=True)
    back, again = quiet(import_scaler, written, system, rule=config or None)
    if system in ("colossalai", "fairseq", "metaseq") or state.fault:
        again, state = (rule.init()._replace(loss_scale=s.loss_scale) for s in (again, state))
    tail = [0, 0, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 0]
    assert scales_here(back, again, tail) == scales_here(rule, state, tail)


@given(rule=dynamics(), system=st.sampled_from(SYSTEMS))
def test_lossy_always_writes_and_says_what_is_lost(rule: Dynamic, system: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = export_scaler(rule, rule.init(), system, lossy=True)
    json.dumps(data, allow_nan=False)
    lost = any("lost:" in str(w.message) for w in caught)
    try:
        quiet(export_scaler, rule, rule.init(), system)
        refused = False
    except StateError:
        refused = True
    assert lost == refused


# What a target cannot do


@pytest.mark.parametrize(
    ("rule", "system", "words"),
    [
        (Dynamic(hysteresis=2), "torch", r"hysteresis=2 \(would be 1\)"),
        (Dynamic(hysteresis=2), "flax", "hysteresis=2"),
        (Dynamic(growth_factor=4.0), "keras", r"growth_factor=4.0 \(would be 2.0\)"),
        (Dynamic(growth_factor=4.0), "jmp", "backoff_factor=0.5"),
        (Dynamic(min_scale=1.0), "torch", "min_scale=1.0"),
        (Dynamic(tolerance=0.1), "megatron", "tolerance=0.1"),
        (Dynamic(max_skips_in_a_row=3), "torch", r"max_skips_in_a_row=3 \(would be None\)"),
        (Dynamic.like("deepspeed-zero"), "torch", "late_first_window=True"),
        (Dynamic.like("metaseq"), "fairseq", "window_follows_scale=True"),
        (Dynamic(growth_interval=7), "apex", "growth_interval=7"),
        (Static(8.0), "megatron", "a Static rule"),
        (Static(8.0), "keras", "a Static rule"),
    ],
    ids=str,
)
def test_what_is_lost_is_named(rule: polyamp.Rule, system: str, words: str) -> None:
    with pytest.raises(StateError, match=f"{system} cannot do .*{words}"):
        export_scaler(rule, rule.init(), system)
    with pytest.warns(UserWarning, match=f"{system}: lost: .*"):
        export_scaler(rule, rule.init(), system, lossy=True)


def test_a_scale_that_is_no_power_of_two_has_no_deepspeed_configuration() -> None:
    rule = Dynamic.like("deepspeed-zero", init_scale=96.0)
    with pytest.raises(StateError, match=r"init_scale=96.0 \(would be 128.0\)"):
        export_scaler(rule, rule.init(), "deepspeed-zero", part="config")


def test_what_a_system_does_not_save_is_a_warning() -> None:
    rule = Dynamic.like("colossalai")
    with pytest.warns(UserWarning, match="colossalai does not save its counts of clean steps"):
        data = export_scaler(rule, rule.init()._replace(clean=3), "colossalai")
    config = {"growth_interval": 1000, "min_scale": 1.0, "max_scale": 2.0**32}
    with pytest.warns(UserWarning, match="they start anew, as they do when colossalai itself"):
        assert import_scaler(data, rule=config) == (rule, rule.init())
    rule = Dynamic.like("megatron", growth_interval=5)
    with pytest.warns(UserWarning, match="does not save its configuration.*loss_scale_window"):
        export_scaler(rule, rule.init(), "megatron")


def test_what_was_not_found_is_a_warning_with_the_values_assumed() -> None:
    words = r"growth_interval=1000, min_scale=1.0, hysteresis=2"
    with pytest.warns(UserWarning, match=words) as caught:
        rule, _ = import_scaler(MEGATRON)
    assert rule == Dynamic.like("megatron")
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule, state = import_scaler(MEGATRON, rule=MEGATRON_CONFIG)
    assert (rule.growth_interval, rule.hysteresis, state.clean, state.left) == (3, 2, 1, 2)


def test_nemo_is_written_under_both_spellings() -> None:
    rule = Dynamic.like("nemo")
    data = export_scaler(rule, rule.init()._replace(left=1), "nemo")
    assert (data["_hysteresis_tracker"], data["_hysterisis_tracker"]) == (1, 1)
    with pytest.warns(UserWarning, match="NeMo itself would go on with 1 overflow"):
        state = import_scaler({**TORCH, "_hysteresis_tracker": 2}, rule={"hysteresis": 2})[1]
    assert state.left == 2
    for tracker, left in ((1, 1), (0, 1), (-5, 1)):
        saved = {**TORCH, "_hysterisis_tracker": tracker}
        assert import_scaler(saved, rule={"hysteresis": 2})[1].left == left


def test_exact_forms() -> None:
    rule = Dynamic.like("torch", growth_interval=3)
    state = rule.init()._replace(loss_scale=64.0, clean=1)
    assert export_scaler(rule, state, "torch") == TORCH
    assert export_scaler(rule, state, "lightning") == {"MixedPrecision": TORCH}
    assert export_scaler(rule, state, "accelerate") == TORCH
    assert export_scaler(rule, state, "polyamp") == polyamp.scaler_to_dict(rule, state)
    late = Dynamic.like("deepspeed-zero", growth_interval=3)
    state = late.init()._replace(loss_scale=64.0, clean=0, left=1, step=9)
    assert quiet(import_scaler, ZERO)[1] == state._replace(step=0)
    assert export_scaler(late, state, "deepspeed-zero") == {**ZERO, "last_overflow_iter": 7}


# Configurations


def test_deepspeed_s_json() -> None:
    block = {"enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 5}
    zero = {"fp16": block, "zero_optimization": {"stage": 2}}
    assert import_scaler(zero)[0] == Dynamic.like(
        "deepspeed-zero", init_scale=256.0, growth_interval=5
    )
    stage0 = {"fp16": {**block, "hysteresis": 4}}
    with pytest.warns(UserWarning, match=r"ignore fp16.hysteresis without ZeRO"):
        rule, state = import_scaler(stage0)
    assert rule == Dynamic.like("deepspeed-stage0", init_scale=256.0, growth_interval=5)
    assert state == rule.init()
    assert import_scaler({"fp16": {"enabled": "auto", "loss_scale": 128}})[0] == Static(128.0)
    auto = {"fp16": {"initial_scale_power": "auto"}, "zero_optimization": {"stage": 3}}
    assert import_scaler(auto)[0] == Dynamic.like("deepspeed-zero")
    with pytest.raises(StateError, match="enabled is false"):
        import_scaler({"fp16": {"enabled": False}})
    with pytest.raises(StateError, match=r"zero_optimization\.stage is 'auto'; name the system"):
        import_scaler({"fp16": block, "zero_optimization": {"stage": "auto"}})


def test_configurations_are_written_in_the_system_s_words() -> None:
    rule = Dynamic.like("deepspeed-zero", init_scale=256.0)
    assert export_scaler(rule, rule.init(), "deepspeed-zero", part="config") == {
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 8,
            "loss_scale_window": 1000,
            "min_loss_scale": 1,
            "hysteresis": 2,
            "consecutive_hysteresis": False,
        },
        "zero_optimization": {"stage": 1},
    }
    rule = Dynamic.like("megatron", init_scale=64.0, growth_interval=3)
    assert export_scaler(rule, rule.init(), "megatron", part="config") == MEGATRON_CONFIG
    assert import_scaler(argparse.Namespace(**MEGATRON_CONFIG, lr=1.0))[0] == rule
    assert import_scaler({"native_amp_init_scale": 8.0, "hysteresis": 3})[0] == Dynamic.like(
        "nemo", init_scale=8.0, hysteresis=3
    )


def test_the_configuration_beside_the_state_is_used() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = {
            "optimizer": {"grad_scaler": MEGATRON},
            "args": argparse.Namespace(**MEGATRON_CONFIG),
        }
        assert import_scaler(whole)[0].growth_interval == 3
        config = {"fp16": {"min_loss_scale": 8, "hysteresis": 2, "consecutive_hysteresis": True}}
        rule, _ = import_scaler({"optimizer": STAGE0, "ds_config": config})
        assert (rule.min_scale, rule.hysteresis) == (8.0, 1)
        newer = {"optimizer": {**STAGE0, "cur_hysteresis": 1}, "ds_config": config}
        rule, state = import_scaler(newer)
        assert (rule.hysteresis, rule.hysteresis_refill, state.left) == (2, "clean", 1)


def test_flax_s_interval_counts_as_flax_counts_under_a_rule_too() -> None:
    saved = {"scale": 8.0, "fin_steps": 2, "growth_interval": 5}
    rule, state = import_scaler(saved, rule=Dynamic(hysteresis=3))
    assert (rule.growth_interval, rule.hysteresis, state.clean) == (6, 3, 2)


def test_a_rule_stands_for_a_configuration() -> None:
    given = Dynamic(hysteresis=3, max_skips_in_a_row=9)
    rule, state = import_scaler(TORCH, rule=given)
    assert (rule.hysteresis, rule.max_skips_in_a_row, rule.growth_interval) == (3, 9, 3)
    assert (state.loss_scale, state.clean, state.left) == (64.0, 1, 3)
    assert quiet(import_scaler, {"loss_scale": 4.0}, "metaseq", rule=Static(2.0)) == (
        Static(2.0),
        Static(2.0).init()._replace(loss_scale=4.0),
    )


# Where it lies


def test_a_lone_loss_scale_gives_way_to_a_scaler() -> None:
    assert import_scaler({"loss_scale": 2.0, "scaler": TORCH}) == import_scaler(TORCH)
    assert quiet(import_scaler, {"loss_scale": 2.0, "scaler": TORCH}, "fairseq")[1].loss_scale == 2


@pytest.mark.parametrize(
    ("place", "saved", "system"),
    [
        ("MixedPrecision", TORCH, "lightning"),
        ("MixedPrecisionPlugin", TORCH, None),
        ("native_amp_scaling_state", TORCH, "torch"),
        ("scaler", TORCH, None),
        ("MegatronHalfPrecisionPlugin", {**TORCH, "_hysteresis_tracker": 1}, None),
        ("amp", {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 1}}, None),
        ("amp_scaling_state", {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 1}}, "apex"),
        ("optimizer", {"grad_scaler": MEGATRON}, None),
        ("optimizer", [{"grad_scaler": MEGATRON}, {"grad_scaler": dict(MEGATRON)}], None),
        ("optimizer", {0: {"grad_scaler": MEGATRON}, 1: {"grad_scaler": MEGATRON}}, "megatron"),
        ("optimizer", STAGE0, None),
        ("optimizer_state_dict", {"loss_scaler": ZERO, "dynamic_loss_scale": True}, None),
        ("last_optimizer_state", {"loss_scale": 64.0, "param_groups": []}, "fairseq"),
    ],
    ids=str,
)
def test_the_known_places(place: str, saved: Any, system: str | None) -> None:
    rule, state = quiet(import_scaler, {"state_dict": {"w": [1.0]}, place: saved}, system)
    assert state.loss_scale == 64.0
    assert isinstance(rule, Dynamic)


def test_another_place_is_named() -> None:
    data = {"mine": [{"deep": TORCH}]}
    with pytest.raises(StateError, match=r"no loss scaler that is known.*mine.*--at"):
        import_scaler(data)
    assert import_scaler(data, at="mine.0.deep")[1].loss_scale == 64.0
    with pytest.raises(StateError, match=r"no loss scaler that is known at mine\.1\.deep"):
        import_scaler(data, at="mine.1.deep")


def test_two_that_differ_are_listed() -> None:
    scalers = {f"loss_scaler{i}": {"loss_scale": 2.0**i, "unskipped": 0} for i in range(2)}
    with pytest.raises(StateError, match=r"apex at loss_scaler0; apex at loss_scaler1.*--at"):
        import_scaler(scalers)
    assert quiet(import_scaler, scalers, at="loss_scaler1")[1].loss_scale == 2.0
