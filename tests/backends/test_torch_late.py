"""GradScaler(late=True): steps are decided on time, the state moves one step later."""

from __future__ import annotations

import copy
import json
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch_scaler_cases import INF, NAN, OPTIMIZERS, backward, parameter

import polyamp
import polyamp.torch as amp
from polyamp import Dynamic, Predictive, Signal

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")

RULES = {
    "auto": Predictive(sub_interval=4),
    "torch": Dynamic.like("torch", init_scale=256.0, growth_interval=3),
    "megatron": Dynamic.like("megatron", init_scale=256.0, growth_interval=3),
    "delayed": polyamp.DelayedScaling(history=20),
}
SLOPES = [1.0, 3.5, 0.0, 2.0**-20, INF, INF, 1e6, 0.25, INF, NAN, 7.0, 7.0, 7.0, 7.0, 2.0**30]


def late(mode: str = "host", **kwargs: Any) -> amp.GradScaler:
    scaler = amp.GradScaler("cpu", late=True, **kwargs)
    scaler._force_device_mode = mode == "device"
    return scaler


def one(scaler: amp.GradScaler, optimizer: Any, param: torch.Tensor, slope: float) -> None:
    finite = math.isfinite(slope)
    backward(scaler, param, slope if finite else 1.0, None if finite else slope)
    scaler.step(optimizer)
    scaler.update()


def delayed(rule: polyamp.Rule, slopes: list[float]) -> tuple[list[float], polyamp.ScalerState]:
    """The scale of each step, and the last state, where signals arrive a step late."""
    step, state, scales, arriving = polyamp.bind(rule), rule.init(), [], None
    for number, slope in enumerate([*slopes, None]):
        used = state.loss_scale
        if arriving is not None:
            was, at, due = arriving
            amax = INF
            if math.isfinite(was):
                true = polyamp.host.c(was * at, "f32") / at  # as the gradients carried it
                amax = polyamp.host.c(true * state.loss_scale, "f32")
            share = -1.0
            if due and math.isfinite(was) and was:
                share = float(abs(was * at) < 2.0**-14)
            state = step(state, Signal(math.isfinite(was), True, amax, share))
        if slope is not None:
            scales.append(used)
            interval = rule.sub_interval
            arriving = slope, used, interval and number % interval == 0
    return scales, state


@pytest.mark.parametrize("mode", ["host", "device"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_states_are_the_cores_own_one_step_late(rule, kind, mode):
    scaler, param = late(mode, rule=rule), parameter(0.0, 0.0, 0.0)
    optimizer = OPTIMIZERS[kind]([param], lr=2.0**-20)
    scales, last = delayed(rule, SLOPES)
    for slope, scale in zip(SLOPES, scales, strict=True):
        before = param.detach().clone()
        one(scaler, optimizer, param, slope)
        assert torch.equal(param, before) == (slope == 0.0 or not math.isfinite(slope))
        used = scaler._keeper._sent.used
        assert used == scale
    assert scaler.state == last
    assert scaler.state.step == len(SLOPES)
    assert scaler.get_scale() == last.loss_scale


def test_the_decision_is_that_of_the_step_before():
    scaler, param = late(rule=RULES["torch"]), parameter(0.0)
    optimizer = OPTIMIZERS["plain"]([param])
    one(scaler, optimizer, param, INF)
    assert scaler.last_decision is None
    one(scaler, optimizer, param, 1.0)
    assert (scaler.last_decision.applied, scaler.last_decision.scale_used) == (False, 256.0)
    assert scaler.applied(optimizer)
    assert scaler.last_decision.next_scale == 128.0
    assert scaler.state.step == 2
    assert (scaler.last_decision.applied, scaler.last_decision.scale_used) == (True, 256.0)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("how", ["state_dict", "to_dict", "pickle", "copy"])
def test_saved_and_gone_on_equals_saved_and_kept(how, rule):
    def saved(scaler: amp.GradScaler) -> amp.GradScaler:
        if how == "pickle":
            return pickle.loads(pickle.dumps(scaler))
        if how == "copy":
            return copy.deepcopy(scaler)
        again = late(rule=rule)
        data = scaler.state_dict() if how == "state_dict" else scaler.to_dict()
        again.load_state_dict(json.loads(json.dumps(data)))
        return again

    for cut in (1, 5, 6, 10):
        scaler, param = late(rule=rule), parameter(0.0, 0.0)
        optimizer = OPTIMIZERS["plain"]([param], lr=2.0**-20)
        for slope in SLOPES[:cut]:
            one(scaler, optimizer, param, slope)
        other = saved(scaler)
        for slope in SLOPES[cut:]:
            one(scaler, optimizer, param, slope)
            one(other, optimizer, param, slope)
            assert other._keeper._sent.used == scaler._keeper._sent.used
        known = 2 if how == "state_dict" else 9  # torch's keys have no counters
        assert other.state[:known] == scaler.state[:known]


def test_reading_while_gradients_carry_the_scale_moves_nothing():
    scaler, param = late(rule=RULES["torch"]), parameter(0.0)
    optimizer = OPTIMIZERS["plain"]([param])
    one(scaler, optimizer, param, INF)
    backward(scaler, param, 3.0)
    assert scaler.get_scale() == 256.0
    assert (scaler.state.step, scaler.state_dict()["scale"]) == (0, 256.0)
    scaler.step(optimizer)
    assert param.item() == -3.0
    scaler.update()
    assert (scaler.get_scale(), scaler.state.step) == (128.0, 2)


def test_a_scale_set_by_hand_and_a_fault():
    scaler, param = (
        late(rule=Dynamic(init_scale=4.0, min_scale=1.0, at_floor="fault")),
        parameter(0.0),
    )
    optimizer = OPTIMIZERS["plain"]([param])
    one(scaler, optimizer, param, 1.0)
    backward(scaler, param)
    scaler.step(optimizer)
    scaler.update(2.0)
    assert scaler.state.loss_scale == 2.0
    assert scaler.state.step == 1
    for _ in range(2):
        one(scaler, optimizer, param, INF)
    with pytest.raises(polyamp.ScaleFloorError):
        one(scaler, optimizer, param, 1.0)
    assert scaler.state.fault == 0


def test_skips_are_warned_about_one_step_late():
    scaler, param = late(rule=RULES["torch"]), parameter(0.0)
    optimizer = OPTIMIZERS["fused"]([param])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one(scaler, optimizer, param, INF)
        assert not caught
        one(scaler, optimizer, param, 1.0)
        assert [w.category for w in caught] == [polyamp.SkippedStepWarning]
        one(scaler, optimizer, param, INF)
        scaler.check()
        assert [w.category for w in caught] == [polyamp.SkippedStepWarning] * 2


def test_a_fused_step_launches_few_operations():
    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Count.calls += 1
            return function(*args, **(kwargs or {}))

    def operations(scaler: amp.GradScaler) -> int:
        scaler._force_device_mode = True
        param = parameter(0.0, 0.0)
        optimizer = OPTIMIZERS["fused"]([param])
        for _ in range(3):
            one(scaler, optimizer, param, 1.0)
        backward(scaler, param)
        scaler.step(optimizer)
        Count.calls = 0
        with Count():
            scaler.update()
        return Count.calls

    on_time, late_by_one = (
        operations(amp.GradScaler("cpu", rule="auto")),
        operations(late(rule="auto")),
    )
    assert late_by_one <= 16
    assert on_time >= 3 * late_by_one
