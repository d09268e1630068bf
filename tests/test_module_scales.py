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
    Predictive,
    RuleError,
    Statistics,
    rule_from_dict,
    rule_to_dict,
)

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
