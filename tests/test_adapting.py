"""What every Adaptive does alike."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polyamp import (
    Capabilities,
    ModuleScales,
    ModuleStatistics,
    PolyampError,
    Selector,
    StateError,
    Statistics,
)
from polyamp._adapting import RECOVERY, Adapting

GOOD = Statistics(amax=1.0, rms=0.1, size=100, nonfinite=0, nonzero=1.0, sub=0.0, bad=0, far=0)
FLUSHED = GOOD._replace(bad=1.0, far=1.0)


def adapting(selector: Any = Selector(patience=1), **changes: Any) -> Adapting:  # noqa: B008
    settings = {"capabilities": Capabilities(), "every": 10, "max_changes": 2, **changes}
    return Adapting({"a": None, "b": None}, selector=selector, **settings)


def sample(gradient: Statistics) -> dict[str, ModuleStatistics]:
    return {"a": ModuleStatistics(output=GOOD, gradient=gradient, weight_gradient=GOOD)}


def test_it_says_whether_a_decision_changed() -> None:
    one = adapting()
    assert not one.decide(sample(GOOD), gradients=True)
    assert not one.decide(sample(FLUSHED), gradients=False)
    assert one.decide(sample(FLUSHED), gradients=True)
    assert one.selection.choices["a"].format == "bfloat16"
    rules = one.rules(["", "a", "b"])
    assert [rules.policy_for(p).compute_dtype for p in "ab"] == ["bfloat16", "float16"]
    assert not one.decide(sample(FLUSHED), gradients=True)


def test_the_last_change_allowed_is_told() -> None:
    one = adapting()
    one.changed()
    with pytest.warns(UserWarning, match="changed 2 times"):
        one.changed()
    assert not one.decide(sample(FLUSHED), gradients=True)


def test_module_scales_leave_no_float16_between_powers_of_two() -> None:
    one = adapting(ModuleScales())
    far = {
        path: ModuleStatistics(output=GOOD, gradient=GOOD._replace(amax=2.0**level))
        for path, level in (("a", 0), ("b", -30))
    }
    assert one.decide(far, gradients=True)
    rules = one.rules(["", "a", "b", "act"])
    assert [rules.policy_for(p).shift for p in ("a", "b")] == [7, 37]
    assert rules.policy_for("act").compute_dtype == rules.default.compute_dtype == "float32"
    assert "not measured" not in one.selection.table()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"every": True}, "every must be a whole number from 1, got True"),
        ({"max_changes": 0}, "max_changes must be a whole number from 1, got 0"),
        ({"selector": Selector}, "selector must be"),
        ({"capabilities": "fp16"}, "capabilities must be"),
        ({"capabilities": Capabilities(frozenset({"fp99"}))}, "no low format 'fp99'"),
        ({"capabilities": Capabilities(slow=frozenset({"float32"}))}, "no low format 'float32'"),
    ],
)
def test_arguments(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(PolyampError, match=told):
        adapting(**changes)


def test_counting_begins_so_many_steps_before_a_sample() -> None:
    one = adapting()
    found = []
    for one.steps in range(20):
        found.append(one.is_to_count())
    assert [i for i, due in enumerate(found) if due] == [10 - RECOVERY, 20 - RECOVERY]
    assert not any(adapting(every=RECOVERY).is_to_count() for _ in range(3))


def test_dicts() -> None:
    one = adapting()
    one.decide(sample(FLUSHED), gradients=True)
    saved = json.loads(json.dumps(one.to_dict()))
    selection, counts = adapting().read_dict(saved)
    assert selection == one.selection
    assert counts == {"steps": 0, "changes": 0}
    half = Capabilities(frozenset({"float16"}))
    for changes, other, told in (
        ({"selector": "ModuleScales"}, {}, "saved under ModuleScales"),
        ({"steps": -1}, {}, "steps must be a count"),
        ({"kind": "scaler"}, {}, "kind"),
        ({}, {"capabilities": half}, "'a' was saved as bfloat16"),
    ):
        with pytest.raises(StateError, match=told):
            adapting(**other).read_dict({**saved, **changes})


def test_capabilities_from_times() -> None:
    times = {"float32": [2.0, 9.0, 3.0], "float16": [3.1, 3.1, 0.1], "bfloat16": [1.0, 1.0, 9.0]}
    expected = Capabilities(slow=frozenset({"float16"}), shifts=False)
    assert Capabilities.from_times(times, shifts=False) == expected
