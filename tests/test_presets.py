"""`Dynamic.like`: the defaults a user of each system gets, and the errors on the way."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest
from arithmetics import PYTHON, flags

import polyamp

F32_MAX = 3.4028234663852886e38
NO_FLOOR, NO_CEILING = 2.0**-126, 2.0**126

DEFAULTS: dict[str, tuple[float, int, float, float, int]] = {
    # init_scale, clean steps until growth, min_scale, max_scale, hysteresis
    "torch": (65536.0, 2000, NO_FLOOR, F32_MAX, 1),
    "keras": (32768.0, 2000, NO_FLOOR, NO_CEILING, 1),
    "flax": (65536.0, 2001, NO_FLOOR, NO_CEILING, 1),
    "jmp": (32768.0, 2000, 1.0, NO_CEILING, 1),
    "deepspeed-stage0": (65536.0, 1000, 1.0, NO_CEILING, 1),
    "deepspeed-zero": (65536.0, 1000, 1.0, NO_CEILING, 2),
    "megatron": (4294967296.0, 1000, 1.0, NO_CEILING, 2),
    "nemo": (4294967296.0, 1000, NO_FLOOR, NO_CEILING, 2),
    "apex": (65536.0, 2000, NO_FLOOR, 16777216.0, 1),
    "colossalai": (65536.0, 1000, 1.0, 4294967296.0, 2),
    "fairseq": (128.0, 16384, 1e-4, NO_CEILING, 1),
    "metaseq": (4.0, 256, 0.03125, NO_CEILING, 1),
}
SPECIAL: dict[str, dict[str, Any]] = {
    "deepspeed-stage0": {"late_first_window": True},
    "deepspeed-zero": {"late_first_window": True, "at_floor": "fault"},
    "nemo": {"hysteresis_refill": "clean"},
    "fairseq": {"at_floor": "fault", "fault_when": "reaching_floor"},
    "metaseq": {"at_floor": "hold", "window_follows_scale": True},
}


@pytest.mark.parametrize("system", DEFAULTS)
def test_defaults_are_those_of_the_system(system: str) -> None:
    init, interval, low, high, hysteresis = DEFAULTS[system]
    numbers: dict[str, Any] = {
        "init_scale": init,
        "growth_interval": interval,
        "min_scale": low,
        "max_scale": high,
        "hysteresis": hysteresis,
    }
    assert polyamp.Dynamic.like(system) == polyamp.Dynamic(**numbers, **SPECIAL.get(system, {}))


def test_presets_are_all_of_them() -> None:
    assert list(polyamp.presets()) == list(DEFAULTS)
    assert polyamp.presets() == {name: polyamp.Dynamic.like(name) for name in DEFAULTS}


@pytest.mark.parametrize("system", DEFAULTS)
def test_first_growth_comes_after_the_systems_window(system: str) -> None:
    rule = polyamp.Dynamic.like(system, growth_interval=5)
    scales = [state[0] for state in PYTHON.run(rule, [(True, True)] * 12)]
    late = {"flax": 6, "deepspeed-stage0": 6, "deepspeed-zero": 6}
    assert scales.index(rule.init_scale * 2) + 1 == late.get(system, 5)


def test_overrides_replace_the_systems_own_parameters() -> None:
    rule = polyamp.Dynamic.like("megatron", hysteresis=1, init_scale=256, min_scale=16)
    assert (rule.hysteresis, rule.init_scale, rule.min_scale) == (1, 256.0, 16.0)
    assert rule.growth_interval == 1000


def test_torch_and_polyamp_agree_with_torchs_own_kernel() -> None:
    torch = pytest.importorskip("torch", reason="compares with torch's own scaler")
    rule, dice = polyamp.Dynamic.like("torch", growth_interval=3), random.Random(5)
    overflows = [int(dice.random() < 0.2) for _ in range(400)]
    scale, tracker = torch.tensor(rule.init_scale), torch.tensor(0, dtype=torch.int32)
    for overflow, state in zip(overflows, PYTHON.run(rule, flags(overflows)), strict=True):
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 2.0, 0.5, 3)
        assert (scale.item(), tracker.item()) == state[:2]


@pytest.mark.parametrize("clean", [1, 1000])
def test_torch_grows_until_float32_ends(clean: int) -> None:
    rule = polyamp.Dynamic.like("torch", init_scale=2.0**126, growth_interval=1)
    assert PYTHON.run(rule, [(True, True)] * clean)[-1][0] == 2.0**127


@pytest.mark.parametrize(
    ("word", "hint"), [("megatorn", "megatron"), ("Torch", "torch"), ("deepspeed", "deepspeed-")]
)
def test_an_unknown_system_names_the_closest(word: str, hint: str) -> None:
    with pytest.raises(polyamp.RuleError, match=f"'{word}'.*did you mean '{hint}.*colossalai"):
        polyamp.Dynamic.like(word)


def test_an_unlike_system_gets_the_list() -> None:
    with pytest.raises(polyamp.RuleError, match=r"unknown system 'xyzzy'.*torch, keras, flax"):
        polyamp.Dynamic.like("xyzzy")


def test_an_unknown_parameter_names_the_closest() -> None:
    with pytest.raises(polyamp.RuleError, match=r"'growth_intervall'.*'growth_interval'"):
        polyamp.Dynamic.like("torch", growth_intervall=3)


@pytest.mark.parametrize("system", ["flax", "torch"])
@pytest.mark.parametrize("interval", [True, 2.0, "3", None])
def test_a_wrong_interval_is_refused_where_it_is_shifted_too(system: str, interval: Any) -> None:
    with pytest.raises(polyamp.RuleError, match="growth_interval must be an integer"):
        polyamp.Dynamic.like(system, growth_interval=interval)


def test_resolving_a_rule() -> None:
    mine, fallback = polyamp.Dynamic(init_scale=8.0), polyamp.Static(2.0)
    assert polyamp.resolve_rule(mine) is mine
    assert polyamp.resolve_rule(None) == polyamp.Dynamic()
    assert polyamp.resolve_rule(None, fallback) is fallback
    assert polyamp.resolve_rule("dynamic") == polyamp.Dynamic()
    assert polyamp.resolve_rule("static") == polyamp.Static(1.0)
    assert polyamp.resolve_rule("nemo") == polyamp.Dynamic.like("nemo")


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("megatorn", "did you mean 'megatron'"),
        (128.0, "got 128.0"),
        (polyamp.Dynamic, "Dynamic"),
        ([1], r"got \[1\]"),
    ],
)
def test_what_is_no_rule_is_refused(rule: Any, words: str) -> None:
    with pytest.raises(polyamp.RuleError, match=words):
        polyamp.resolve_rule(rule)


def test_every_parameter_is_used_by_some_preset_or_is_an_extra() -> None:
    used = {f.name for f in fields(polyamp.Dynamic)} - {
        "growth_factor",
        "backoff_factor",
        "tolerance",
        "threshold",
        "max_skips_in_a_row",
    }
    plain = polyamp.Dynamic()
    rules = polyamp.presets().values()
    differing = {f for f in used if any(getattr(r, f) != getattr(plain, f) for r in rules)}
    assert differing == used


def test_a_rule_that_is_not_known_is_told_with_all_that_are() -> None:
    with pytest.raises(polyamp.RuleError, match=r"did you mean .auto..*two-phase.*megatron"):
        polyamp.resolve_rule("autoo")


def test_a_rule_of_our_own_is_no_system() -> None:
    with pytest.raises(polyamp.RuleError, match=r"'autoo'; did you mean 'auto'.*two-phase"):
        polyamp.Dynamic.like("autoo")
    with pytest.raises(polyamp.RuleError, match=r"'auto' is a rule of polyamp's own.*give it as"):
        polyamp.Dynamic.like("auto")


def test_an_unlike_parameter_has_no_hint() -> None:
    with pytest.raises(polyamp.RuleError, match=r"no parameter 'foo'\. It has: init_scale"):
        polyamp.Dynamic.like("torch", foo=1)
