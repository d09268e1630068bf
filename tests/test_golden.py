"""The scales that 17 real scaler configurations produce, reproduced by parameters of one rule.

`data/scaler_traces.json` was recorded by running the systems themselves: the scale after each step,
"ABORT" where the system raises. 1 in a sequence is an overflow.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from arithmetics import Arithmetic, flags

import polyamp

GOLDEN = json.loads((Path(__file__).parent / "data" / "scaler_traces.json").read_text())

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "torch.GradScaler": ("torch", {}),
    "DeepSpeed stage0 fused/unfused": ("deepspeed-stage0", {"min_scale": 16.0}),
    "DeepSpeed ZeRO h=1": ("deepspeed-zero", {"min_scale": 16.0, "hysteresis": 1}),
    "DeepSpeed ZeRO h=2": ("deepspeed-zero", {"min_scale": 16.0}),
    "DeepSpeed ZeRO h=2 consecutive": (
        "deepspeed-zero",
        {"min_scale": 16.0, "hysteresis_refill": "clean"},
    ),
    "Megatron-core h=1": ("megatron", {"min_scale": 16.0, "hysteresis": 1}),
    "Megatron-core h=2": ("megatron", {"min_scale": 16.0}),
    "ColossalAI h=1 max=512": (
        "colossalai",
        {"min_scale": 16.0, "hysteresis": 1, "max_scale": 512.0},
    ),
    "ColossalAI h=2 no max": ("colossalai", {"min_scale": 16.0, "max_scale": 2.0**126}),
    "fairseq tol=0": ("fairseq", {"min_scale": 16.0}),
    "fairseq tol=0.4": ("fairseq", {"min_scale": 16.0, "tolerance": 0.4}),
    "fairseq threshold=32 min=16": ("fairseq", {"min_scale": 16.0, "threshold": 32.0}),
    "metaseq tol=0 min=16": ("metaseq", {"min_scale": 16.0}),
    "NeMo(restated) h=2": ("nemo", {}),
    "flax.DynamicScale min=16": ("flax", {"min_scale": 16.0}),
    "jmp.DynamicLossScale min=16": ("jmp", {"min_scale": 16.0}),
    "keras.LossScaleOptimizer": ("keras", {}),
}


def rule_for(name: str) -> polyamp.Dynamic:
    system, overrides = CONFIGURATIONS[name]
    first = {"init_scale": GOLDEN["params"]["init"], "growth_interval": GOLDEN["params"]["window"]}
    return polyamp.Dynamic.like(system, **first, **overrides)


def trace(states: list[tuple[Any, ...]]) -> list[float | str]:
    """The scales, cut off by "ABORT" at the first fault."""
    out: list[float | str] = []
    for scale, *_, fault, _memory in states:
        if fault != polyamp.Fault.NONE:
            return [*out, "ABORT"]
        out.append(scale)
    return out


def test_every_recorded_configuration_is_restated() -> None:
    assert list(CONFIGURATIONS) == list(GOLDEN["traces"])
    assert sum(len(t) for t in GOLDEN["traces"].values()) == 119


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_traces_are_reproduced_exactly(name: str, arithmetic: Arithmetic) -> None:
    step = polyamp.bind(rule_for(name), arithmetic.xp)
    for sequence, overflows in GOLDEN["sequences"].items():
        states = arithmetic.run(rule_for(name), flags(overflows), step)
        assert trace(states) == GOLDEN["traces"][name][sequence], sequence


def test_only_the_systems_that_raise_fault() -> None:
    aborting = {
        n for n, runs in GOLDEN["traces"].items() if any("ABORT" in r for r in runs.values())
    }
    assert aborting == {
        "DeepSpeed ZeRO h=1",
        "DeepSpeed ZeRO h=2",
        "DeepSpeed ZeRO h=2 consecutive",
        "fairseq tol=0",
        "fairseq tol=0.4",
    }
    for name in CONFIGURATIONS:
        assert rule_for(name).can_fault() == (
            CONFIGURATIONS[name][0] in ("deepspeed-zero", "fairseq")
        )
