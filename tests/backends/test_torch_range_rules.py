"""GradScaler under rules that follow the gradients' range: amax measured on every path."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_scaler_cases import INF, NAN, OPTIMIZERS, HostReads, backward, parameter

import polyamp
import polyamp.torch as amp
from polyamp import DelayedScaling, LogMax, Predictive, Signal, TwoPhase

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")

RULES = {
    "predictive": Predictive(),
    "logmax": LogMax(),
    "delayed": DelayedScaling(history=20),
    "two-phase": TwoPhase(explore_steps=5, history=10),
}
SLOPES = [1.0, 3.5, 0.0, 2.0**-20, INF, NAN, 1e6, 0.25, INF, INF, 7.0, 7.0]


def unscaled_first(scaler: amp.GradScaler, optimizer: Any) -> None:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def clipped(scaler: amp.GradScaler, optimizer: Any) -> None:
    scaler.clip_and_step(optimizer, 1e9)


def together(scaler: amp.GradScaler, optimizer: Any) -> None:
    scaler.step_all([optimizer])


WAYS: dict[str, Callable[..., None]] = {
    "step": lambda scaler, optimizer: scaler.step(optimizer),
    "unscale_": unscaled_first,
    "clip_and_step": clipped,
    "step_all": together,
}


def expected(rule: polyamp.Rule, slopes: list[float]) -> list[polyamp.ScalerState]:
    """The core's own states for gradients of these unscaled maxima."""
    step, state, out = polyamp.bind(rule), rule.init(), []
    for slope in slopes:
        finite = math.isfinite(slope)
        amax = slope * state.loss_scale if finite else INF
        state = step(state, Signal(finite, True, polyamp.host.c(amax, "f32")))
        out.append(state)
    return out


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_states_are_the_cores_own(make, rule, kind, way):
    scaler, param = make(rule=rule), parameter(0.0, 0.0, 0.0)
    optimizer = OPTIMIZERS[kind]([param], lr=2.0**-20)
    for slope, want in zip(SLOPES, expected(rule, SLOPES), strict=True):
        finite = math.isfinite(slope)
        backward(scaler, param, slope if finite else 1.0, None if finite else slope)
        way(scaler, optimizer)
        scaler.update()
        assert scaler.state == want


def test_auto_is_the_predictive_rule(make):
    scaler = make(rule="auto")
    assert scaler.rule == Predictive(sub_interval=64)
    scaler.scale(torch.ones(()))
    assert scaler.get_scale() == 4096.0


def test_the_largest_of_two_optimizers_counts(make):
    scaler = make(rule="auto")
    first, second = parameter(0.0), parameter(0.0)
    optimizers = [torch.optim.SGD([first], 1.0), torch.optim.SGD([second], 1.0, fused=True)]
    scaler.scale(first.sum() * 0.5 + second.sum() * 64.0).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.state == expected(Predictive(), [64.0])[0]
    assert (first.item(), second.item()) == (-0.5, -64.0)


def test_a_shared_parameter_is_measured_with_its_scale(make):
    scaler, shared = make(rule="auto"), parameter(0.0)
    optimizers = [torch.optim.SGD([shared], 1.0), torch.optim.SGD([shared], 1.0)]
    backward(scaler, shared, 2.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.state == expected(Predictive(), [2.0])[0]
    assert shared.item() == -4.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_gradients_of_other_dtypes_are_measured(dtype):
    scaler = amp.GradScaler("cpu", rule="auto")
    param = parameter(0.0, 0.0, dtype=dtype)
    optimizer = torch.optim.SGD([param], 1.0)
    scaler.scale(param.real.sum() if dtype.is_complex else param.sum()).backward()
    scaler.clip_and_step(optimizer, INF)
    scaler.update()
    assert scaler.state == expected(Predictive(), [1.0])[0]


def test_a_state_goes_on_after_saving(make):
    rule, run = Predictive(), [1.0, 64.0, INF, 2.0, 2.0, 0.5]
    whole = expected(rule, run)
    for cut in range(1, len(run)):
        scaler = make(rule=rule)
        scaler.load_state_dict(polyamp.scaler_to_dict(rule, whole[cut - 1]))
        other = amp.GradScaler("cpu")
        other.load_state_dict(scaler.state_dict())
        for resumed in (scaler, other):
            param = parameter(0.0)
            optimizer = torch.optim.SGD([param], lr=0.0)
            for slope, want in zip(run[cut:], whole[cut:], strict=True):
                finite = math.isfinite(slope)
                backward(resumed, param, slope if finite else 1.0, None if finite else INF)
                resumed.step(optimizer)
                resumed.update()
                assert resumed.state == want


def test_the_device_decides_without_being_waited_for():
    scaler = amp.GradScaler("cpu", rule="auto")
    scaler._force_device_mode = True
    param = parameter(0.0, 0.0)
    optimizer = torch.optim.Adam([param], fused=True)
    backward(scaler, param)
    scaler.step(optimizer)
    scaler.update()
    backward(scaler, param)
    with HostReads() as reads:
        scaler.step(optimizer)
        scaler.update()
    assert reads.count == 0


def test_an_unmeasured_step_is_an_error():
    class Own(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            """Unscales by itself, in the old way."""
            record = grad_scaler._per_optimizer_states[id(self)]
            record["found_inf_per_device"] = {torch.device("cpu"): torch.zeros(())}

    scaler, param = amp.GradScaler("cpu", rule="auto"), parameter(0.0)
    optimizer = Own([param], 1.0)
    backward(scaler, param)
    with pytest.warns(FutureWarning, match="stop passing itself"):
        scaler.step(optimizer)
    with pytest.raises(polyamp.RuleError, match=r"needs Signal\.amax"):
        scaler.update()


def test_underflow_is_measured_on_the_steps_asked_for(make):
    scaler, param = make(rule=Predictive(sub_interval=2)), parameter(*[0.0] * 4)
    optimizer = torch.optim.SGD([param], 1.0, fused=True)
    step, want = polyamp.bind(scaler.rule), scaler.rule.init()
    for number in range(6):
        scale = want.loss_scale
        backward(scaler, param)
        param.grad.copy_(torch.tensor([1.0, 0.0, 2.0**-30, 2.0**-30]) * scale)
        scaler.step(optimizer)
        scaler.update()
        share = polyamp.host.c(2 / 3, "f32") if number % 2 == 0 else -1.0
        want = step(want, Signal(True, True, scale, share))
        assert scaler.state == want
    assert want.memory[1] == 2 * 65536 - 2 * (2 * 8 * 164)


@pytest.mark.parametrize("several", [False, True])
def test_a_forward_nan_leaves_the_scale_alone(make, several):
    scaler, param = make(rule=Predictive(max_skips_in_a_row=50)), parameter(0.0)
    optimizer = torch.optim.SGD([param], 1.0)
    for count in range(1, 101):
        param.grad = None
        loss = (param * NAN).sum()
        scaled = scaler.scale([loss, {"other": loss * 0.0}])[0] if several else scaler.scale(loss)
        scaled.backward()
        scaler.step(optimizer)
        if count >= 50 and not scaler._force_device_mode:
            with pytest.raises(polyamp.ScaleFloorError):
                scaler.update()
        else:
            scaler.update()
        assert (scaler.state.loss_scale, scaler.state.skipped) == (4096.0, count)
        assert scaler.state.reason == polyamp.Reason.LOSS_NOT_FINITE
    assert scaler.state.memory == scaler.rule.init().memory
    assert param.item() == 0.0
    backward(scaler, param)
    scaler.step(optimizer)
    scaler._keeper.clear_fault()
    scaler.update()
    assert (scaler.state.skipped, scaler.state.skipped_in_a_row) == (100, 0)


@pytest.mark.parametrize("kind", ["plain", "fused", "clipped", "together"])
def test_a_loss_that_is_not_finite_skips_even_with_finite_gradients(make, kind):
    scaler, param = make(rule="auto"), parameter(1.0)
    optimizer = torch.optim.SGD([param], 0.1, fused=kind == "fused")
    scaler.scale(param.sum() + NAN).backward()
    if kind == "clipped":
        scaler.clip_and_step(optimizer, 10.0)
    elif kind == "together":
        scaler.step_all([optimizer])
    else:
        scaler.step(optimizer)
    scaler.update()
    assert param.item() == 1.0
    assert scaler.applied(optimizer) is False
    assert bool(scaler.last_decision.applied) is False
    assert scaler.state.reason == polyamp.Reason.LOSS_NOT_FINITE
    backward(scaler, param)
    scaler.step(optimizer)
    scaler.update()
    assert param.item() < 1.0


def test_gradients_without_entries(make):
    scaler, param = make(rule="auto"), torch.nn.Parameter(torch.zeros(0, 4))
    optimizer = torch.optim.SGD([param], 0.1)
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.state.skipped == 0
    assert scaler.applied(optimizer)
