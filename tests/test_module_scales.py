"""Powers of two per module: when they are given, kept and given up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyamp import (
    Capabilities,
    ModuleScales,
    ModuleStatistics,
    Policy,
    PolicyMap,
    Predictive,
    RuleError,
    Statistics,
    rule_from_dict,
    rule_to_dict,
)
from polyamp._module_scales import module_shifts, with_shifts

ONE = Statistics(amax=1.0, rms=0.1, size=10, nonfinite=0, nonzero=1.0, sub=0, bad=0, far=0)


def decided(selection, **bits: float):
    statistics = {
        path: ModuleStatistics(output=ONE, gradient=ONE._replace(amax=2.0**level))
        for path, level in bits.items()
    }
    return ModuleScales().decide(statistics, selection)


def shifts(selection) -> list[int]:
    return [choice.shift for choice in selection.choices.values()]


def test_more_than_25_bits_and_less() -> None:
    selection = ModuleScales().start(dict.fromkeys("ab"))
    selection = decided(selection, a=0, b=-25)
    assert shifts(selection) == [0, 0]
    selection = decided(selection, a=0, b=-26)
    assert shifts(selection) == [7, 33]
    assert selection.choices["b"][2:] == ("span", 26.0, 25)
    selection = decided(selection, a=3, b=-22)
    assert shifts(selection) == [7, 33]
    selection = decided(selection, a=0, b=-21)
    assert shifts(selection) == [0, 0]


def test_an_overflow_and_zeros_change_nothing() -> None:
    selection = decided(ModuleScales().start(dict.fromkeys("ab")), a=0, b=-30)
    lost = ModuleStatistics(output=ONE, gradient=ONE._replace(nonfinite=0.1))
    assert ModuleScales().decide({"a": lost}, selection).choices == selection.choices
    zero = ModuleStatistics(output=ONE, gradient=ONE._replace(amax=0.0))
    assert ModuleScales().decide({"a": zero, "b": zero}, selection).choices == selection.choices


levels = st.dictionaries(st.sampled_from("abcdef"), st.floats(-100, 14), min_size=1)


@given(st.lists(levels, max_size=8))
def test_gradients_stay_in_reach(samples) -> None:
    selection = ModuleScales().start({**dict.fromkeys("abcdef"), "n": "norm"})
    for sample in samples:
        selection = decided(selection, **sample)
        for path, level in sample.items():
            choice = selection.choices[path]
            assert choice.level in (0, 1)
            if choice.level == 1:
                assert 1.0 <= math.ldexp(2.0**level, choice.shift) < 2.0**14
        assert selection.choices["n"].level == 3


names = st.sampled_from("abcdef")
amaxes = st.dictionaries(
    names, st.just(0.0) | st.just(math.inf) | st.just(math.nan) | st.floats(2.0**-140, 65504.0)
)


@given(amaxes, st.dictionaries(names, st.integers(-126, 126)))
def test_module_shifts(found, before) -> None:
    after = module_shifts(found, before)
    seen = {path: amax for path, amax in found.items() if 0 < amax < math.inf}
    if not seen:
        assert after == before
        return
    if after:
        assert set(before) | {p for p, amax in found.items() if math.isfinite(amax)} == set(after)
        for path, amax in seen.items():
            assert 1.0 <= math.ldexp(amax, after[path]) < 2.0**14 or after[path] == 126
        for path, shift in before.items():
            kept = path not in seen or 1.0 <= math.ldexp(seen[path], shift) < 2.0**14
            assert (after[path] == shift) or not kept or abs(shift) == 126
    else:
        assert math.log2(max(seen.values())) - math.log2(min(seen.values())) <= 25
    if set(seen) == set(found):  # a gradient of 0 counts as it was while it has a power of two
        assert module_shifts(found, after) == after


def test_module_shifts_enter_and_leave() -> None:
    assert module_shifts({"a": 1.0, "b": 2.0**-25}, {}) == {}
    held = module_shifts({"a": 1.0, "b": 2.0**-26}, {})
    assert held == {"a": 7, "b": 33}
    assert module_shifts({"a": 2.0**6, "b": 2.0**-22}, held) == held
    assert module_shifts({"a": 2.0**7, "b": 2.0**-22}, held) == {"a": 0, "b": 33}
    assert module_shifts({"a": 1.0, "b": 2.0**-21}, held) == {}
    assert module_shifts({"a": 1.0, "b": math.nan}, held) == held
    assert module_shifts({"a": 1.0}, held) == held
    assert module_shifts({"a": 1.0, "b": 0.0}, {}) == {"a": 7, "b": 33}
    assert module_shifts({"a": 0.0, "b": 0.0}, {}) == {}


def test_with_shifts() -> None:
    base = PolicyMap({"b": "float32", "op:softmax": "float32"}, default="mixed_float16")
    paths = ["", "a", "a.0", "a.1", "b", "c[0]"]
    assert with_shifts(base, paths, {}) is base
    found = with_shifts(base, paths, {"a.0": 7, "c[0]": -3})
    assert found.op_rules == base.op_rules
    assert [str(found.policy_for(p)) for p in ("a.0", "c[0]")] == [
        "params=float32,compute=float16,output=float32@2^7",
        "params=float32,compute=float16,output=float32@2^-3",
    ]
    assert {found.policy_for(p) for p in ("", "a", "a.1", "b")} == {Policy.parse("float32")}
    found.check(paths)


def test_the_rule_carries_the_wish_and_decides_as_without() -> None:
    rule = Predictive(per_module=True)
    assert rule_from_dict(rule_to_dict(rule)) == rule
    assert rule.init() == Predictive().init()
    with pytest.raises(RuleError, match="per_module must be a bool"):
        Predictive(per_module=1)  # type: ignore[arg-type]


def test_errors() -> None:
    with pytest.raises(RuleError, match="span must be a whole number from 5"):
        ModuleScales(span=2)
    with pytest.raises(RuleError, match="cannot give a module a power of two"):
        ModuleScales().start({"a": None}, Capabilities(shifts=False))
    assert math.isfinite(ModuleScales().span)
