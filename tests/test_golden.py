"""The scales that 17 real scaler configurations produce, reproduced by parameters of one rule."""

from __future__ import annotations

from typing import Any

import pytest
from arithmetics import Arithmetic, flags

import polyamp
from polyamp.testing._golden import ABORT, golden, golden_rule, overflows, scales

CONFIGURATIONS = golden()["configurations"]
TRACES = golden()["traces"]


def states(rows: list[tuple[Any, ...]]) -> list[polyamp.ScalerState]:
    return [polyamp.ScalerState(*row) for row in rows]


def test_every_recorded_configuration_is_restated() -> None:
    assert list(CONFIGURATIONS) == list(TRACES)
    assert len(TRACES) == 17
    assert sum(len(t) for t in TRACES.values()) == 119
    assert all(len(found["why"]) > 20 for found in golden()["sequences"].values())


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_traces_are_reproduced_exactly(name: str, arithmetic: Arithmetic) -> None:
    rule = golden_rule(name)
    step = polyamp.bind(rule, arithmetic.xp)
    for sequence, bad in overflows().items():
        rows = arithmetic.run(rule, flags(bad), step)
        assert scales(states(rows)) == TRACES[name][sequence], sequence


def test_only_the_systems_that_raise_fault() -> None:
    aborting = {n for n, runs in TRACES.items() if any(ABORT in r for r in runs.values())}
    assert aborting == {
        "DeepSpeed ZeRO h=1",
        "DeepSpeed ZeRO h=2",
        "DeepSpeed ZeRO h=2 consecutive",
        "fairseq tol=0",
        "fairseq tol=0.4",
    }
    for name, found in CONFIGURATIONS.items():
        faults = found["like"] in ("deepspeed-zero", "fairseq")
        assert golden_rule(name).can_fault() == faults
