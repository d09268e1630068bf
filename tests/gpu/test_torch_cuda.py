"""GradScaler where it lives on an accelerator: same traces as on the host, and no waiting."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="these tests are about torch on an accelerator")

import polyamp.torch as amp  # noqa: E402
from polyamp import Dynamic, bind  # noqa: E402
from polyamp import Signal as HostSignal  # noqa: E402

pytestmark = pytest.mark.gpu

RULES = {
    "torch": Dynamic.like("torch", init_scale=256.0, growth_interval=3),
    "megatron": Dynamic.like("megatron", init_scale=256.0, growth_interval=3),
    "fairseq": Dynamic.like("fairseq", init_scale=256.0, growth_interval=3, tolerance=0.4),
    "metaseq": Dynamic.like("metaseq", init_scale=256.0, growth_interval=3),
}
OVERFLOWS = [0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0]


def optimizers() -> dict[str, object]:
    return {
        "plain": lambda p: torch.optim.SGD(p, lr=1.0),
        "fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    }


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_traces_equal_the_host(rule: str, kind: str) -> None:
    param = torch.nn.Parameter(torch.ones(8, device="cuda"))
    optimizer = optimizers()[kind]([param])
    scaler = amp.GradScaler("cuda", rule=RULES[rule])
    step, state = bind(RULES[rule]), RULES[rule].init()
    for overflow in OVERFLOWS:
        optimizer.zero_grad()
        scaler.scale(param.sum() * (float("inf") if overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        state = step(state, HostSignal(not overflow))
        assert scaler.state == state
        assert scaler.applied(optimizer) is not bool(overflow)
    assert torch.isfinite(param).all()


def test_late_is_the_host_one_step_late_and_never_waits() -> None:
    rule = RULES["torch"]
    param = torch.nn.Parameter(torch.ones(8, device="cuda"))
    optimizer = torch.optim.Adam([param], lr=0.1, fused=True)
    scaler = amp.GradScaler("cuda", rule=rule, late=True)
    step, state, arriving = bind(rule), rule.init(), None
    try:
        for number, overflow in enumerate(OVERFLOWS):
            torch.cuda.set_sync_debug_mode("error" if number else "default")
            optimizer.zero_grad()
            scaler.scale(param.sum() * (float("inf") if overflow else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            torch.cuda.set_sync_debug_mode("default")
            if arriving is not None:
                state = step(state, HostSignal(not arriving))
            arriving = overflow
            assert scaler._scale.item() == state.loss_scale
            assert scaler.applied(optimizer) is not bool(overflow)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scaler.state == step(state, HostSignal(not arriving))


def test_a_fused_step_never_waits() -> None:
    param = torch.nn.Parameter(torch.ones(8, device="cuda"))
    optimizer = torch.optim.Adam([param], lr=0.1, fused=True)
    scaler = amp.GradScaler("cuda")
    try:
        for step in range(3):
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            optimizer.zero_grad()
            scaler.scale(param.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scaler.state.step == 3


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_overflow_is_judged_after_unscaling(kind: str) -> None:
    param = torch.nn.Parameter(torch.ones(8, device="cuda"))
    optimizer = optimizers()[kind]([param])
    scaler = amp.GradScaler("cuda", init_scale=1e-6)
    scaler.scale(param.sum())
    param.grad = torch.full_like(param, 1e35)
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.applied(optimizer)
    assert param.tolist() == [1.0] * 8


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("shape", [(512, 512), (100_003,)])
def test_one_hidden_nan_is_found(kind: str, shape: tuple[int, ...]) -> None:
    param = torch.nn.Parameter(torch.ones(shape, device="cuda"))
    optimizer = optimizers()[kind]([param])
    scaler = amp.GradScaler("cuda")
    scaler.scale(param.sum())
    param.grad = torch.ones_like(param)
    param.grad.view(-1)[70_001] = float("nan")
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.applied(optimizer)
    assert bool((param == 1.0).all())


def test_parameters_on_two_devices_share_one_decision() -> None:
    here, there = (torch.nn.Parameter(torch.ones(4, device=d)) for d in ("cpu", "cuda"))
    optimizer = torch.optim.SGD([here, there], lr=1.0)
    scaler = amp.GradScaler("cuda", init_scale=4.0)
    for bad in (True, False):
        optimizer.zero_grad()
        scaler.scale(here.sum().cuda() + there.sum()).backward()
        if bad:
            there.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0
    assert here.tolist() == there.tolist() == [0.0] * 4


def test_fused_momentum_survives_an_overflow_on_its_first_step() -> None:
    param = torch.nn.Parameter(torch.zeros(8, device="cuda"))
    optimizer = torch.optim.SGD([param], lr=1.0, momentum=0.9, dampening=0.5, fused=True)
    scaler = amp.GradScaler("cuda")
    for overflow in (True, False, False):
        optimizer.zero_grad()
        scaler.scale(param.sum() * (float("inf") if overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(param.detach().cpu(), torch.full((8,), -1.0 - 1.4))


def test_a_captured_update_goes_on() -> None:
    scaler = amp.GradScaler("cuda", rule=RULES["megatron"])
    param = torch.nn.Parameter(torch.ones(8, device="cuda"))
    optimizer = torch.optim.Adam([param], lr=0.1, fused=True, capturable=True)
    param.grad = torch.full_like(param, float("inf"))
    scaler.scale(param.sum())

    def iteration() -> None:
        scaler.step(optimizer)
        scaler.update()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        iteration()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iteration()
    for _ in range(2):
        graph.replay()
    assert (scaler.state.skipped, scaler.state.loss_scale) == (3, 64.0)
