"""An imported scaler goes on as the system that saved it would have: at every prefix of a run."""

from __future__ import annotations

import json
import random
import warnings
from typing import Any

import pytest
from foreign_scalers import SCALERS, WINDOW, DeepSpeedZero

import polyamp
from polyamp.testing._golden import golden, overflows

GOLDEN = golden()["traces"]
RECORDED = {
    "Torch": "torch.GradScaler",
    "DeepSpeedStage0": "DeepSpeed stage0 fused/unfused",
    "DeepSpeedZero": "DeepSpeed ZeRO h=2",
    "DeepSpeedZeroConsecutive": "DeepSpeed ZeRO h=2 consecutive",
    "Megatron": "Megatron-core h=2",
    "Fairseq": "fairseq tol=0",
    "FairseqTolerant": "fairseq tol=0.4",
    "FairseqThreshold": "fairseq threshold=32 min=16",
    "Metaseq": "metaseq tol=0 min=16",
    "Nemo": "NeMo(restated) h=2",
    "Flax": "flax.DynamicScale min=16",
    "Jmp": "jmp.DynamicLossScale min=16",
    "Keras": "keras.LossScaleOptimizer",
}
RANDOM = random.Random(20240607)
TRACES: list[list[int]] = [
    *overflows().values(),
    *([int(RANDOM.random() < share) for _ in range(40)] for share in (0.1, 0.25, 0.5, 0.75)),
]


def quiet(function: Any, *args: Any, **named: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **named)


def scales_of(native: Any, overflows: list[int]) -> list[Any]:
    """The scale after each step, "ABORT" and no more where the system raises."""
    seen: list[Any] = []
    for bad in overflows:
        if not native.step(bool(bad)):
            return [*seen, "ABORT"]
        seen.append(native.scale)
    return seen


def scales_here(rule: polyamp.Rule, state: polyamp.ScalerState, overflows: list[int]) -> list[Any]:
    step, seen = polyamp.bind(rule), []
    for bad in overflows:
        state = step(state, polyamp.Signal(not bad))
        if state.fault:
            return [*seen, "ABORT"]
        seen.append(state.loss_scale)
    return seen


@pytest.mark.parametrize("kind", SCALERS, ids=lambda k: k.__name__)
def test_the_judges_agree_with_the_recordings(kind: Any) -> None:
    if kind.__name__ not in RECORDED:
        assert kind.__name__ in (
            "Apex",
            "ColossalAI",
            "DeepSpeedZeroClamped",
            "DeepSpeedStage0Newer",
        )
        return
    for name, recorded in GOLDEN[RECORDED[kind.__name__]].items():
        assert scales_of(kind(), overflows()[name]) == recorded, name


@pytest.mark.parametrize("kind", SCALERS, ids=lambda k: k.__name__)
def test_it_goes_on_as_the_source_does_from_every_prefix(kind: Any) -> None:
    compared = 0
    for trace in TRACES:
        for cut in range(len(trace) + 1):
            native = kind()
            if "ABORT" in scales_of(native, trace[:cut]):
                break
            rule, state = quiet(polyamp.import_scaler, native.save(), kind.system, rule=kind.config)
            assert state.loss_scale == native.scale
            goes_on = native.load() if hasattr(native, "load") else native
            assert scales_here(rule, state, trace[cut:]) == scales_of(goes_on, trace[cut:]), cut
            compared += 1
    assert compared > 100


@pytest.mark.parametrize("kind", SCALERS, ids=lambda k: k.__name__)
def test_the_system_is_told_from_the_keys(kind: Any) -> None:
    if kind.system in ("fairseq", "metaseq"):
        with pytest.raises(polyamp.StateError, match="fairseq at the top; metaseq at the top"):
            polyamp.import_scaler(kind().save())
        return
    named = quiet(polyamp.import_scaler, kind().save(), kind.system, rule=kind.config)
    assert quiet(polyamp.import_scaler, kind().save(), rule=kind.config) == named


@pytest.mark.parametrize("kind", SCALERS, ids=lambda k: k.__name__)
def test_what_was_saved_survives_the_portable_form_and_the_way_back(kind: Any) -> None:
    native = kind()
    scales_of(native, [1, 0, 0, 0, 0, 1, 0])
    rule, state = quiet(polyamp.import_scaler, native.save(), kind.system, rule=kind.config)
    again = polyamp.scaler_from_dict(json.loads(json.dumps(polyamp.scaler_to_dict(rule, state))))
    assert again == (rule, state)
    written = quiet(polyamp.export_scaler, rule, state, kind.system)
    config = quiet(polyamp.export_scaler, rule, state, kind.system, part="config", lossy=True)
    given = None if kind.system in ("torch", "flax", "jmp", "keras", "deepspeed-zero") else config
    assert quiet(polyamp.import_scaler, written, kind.system, rule=given)[1] == state
    rest = [0, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
    read = quiet(polyamp.import_scaler, written, kind.system, rule=given)
    assert scales_here(*read, rest) == scales_here(rule, state, rest)


class DeepSpeedZeroOlder(DeepSpeedZero):
    """Its window is not late: grows after each `WINDOW` iterations since the last overflow."""

    def step(self, overflow: bool) -> bool:
        if overflow:
            return super().step(True)
        if (self.now - self.last_bad) % WINDOW == 0:
            self.scale, self.lives = self.scale * 2.0, self.spares
        self.now += 1
        return True


def test_an_older_deepspeed_is_a_rule_whose_window_is_not_late() -> None:
    given, compared = polyamp.Dynamic.like("deepspeed-zero", late_first_window=False), 0
    for trace in TRACES:
        for cut in range(len(trace) + 1):
            native = DeepSpeedZeroOlder()
            if "ABORT" in scales_of(native, trace[:cut]):
                break
            rule, state = polyamp.import_scaler(native.save(), rule=given)
            assert scales_here(rule, state, trace[cut:]) == scales_of(native, trace[cut:]), cut
            compared += 1
    assert compared > 100
