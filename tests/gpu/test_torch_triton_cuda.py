"""The Triton kernel on an accelerator: nothing that is not finite escapes, and nothing waits."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="these tests are about torch on an accelerator")
pytest.importorskip("triton", reason="these tests are about the Triton kernel")

import polyamp.torch as amp  # noqa: E402
from polyamp_torch import _triton  # noqa: E402
from polyamp_torch._inspect import amaxes  # noqa: E402

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def test_the_kernel_is_used() -> None:
    assert _triton.usable([torch.ones(3, device="cuda")])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(512, 512), (100_003,)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_entry_that_is_not_finite_is_found(shape: tuple, dtype: object, bad: float) -> None:
    for at in (0, 4095, 4096, 50_000, -1):
        x = torch.ones(shape, dtype=dtype, device="cuda")
        x.view(-1)[at] = bad
        found = _triton.one_pass([torch.ones(3, dtype=dtype, device="cuda"), x])
        assert not found.finite
        assert found.amax.isnan() if bad != bad else found.amax == bad
        assert not _triton.one_pass([x], torch.full((), 0.5, device="cuda")).finite


@pytest.mark.parametrize("dtype", DTYPES)
def test_unscaling_is_torchs_own(dtype: object) -> None:
    source = torch.Generator("cuda").manual_seed(0)
    ours = [
        torch.randn(n, generator=source, device="cuda").to(dtype) for n in (1, 5, 4096, 1_000_003)
    ]
    ours.append(ours[-1].clone()[1:])  # not aligned
    theirs = [x.clone() for x in ours]
    inverse, flag = torch.full((), 1 / 3000.0, device="cuda"), torch.zeros((), device="cuda")
    top = max(float(x.abs().max()) for x in ours)
    found = _triton.one_pass(ours, inverse)
    torch._amp_foreach_non_finite_check_and_unscale_(theirs, flag, inverse)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert (found.amax.item(), bool(found.finite)) == (top, True)


def test_amaxes_are_the_foreach_norms() -> None:
    group = [torch.randn(n, device="cuda") for n in (3, 100, 70_001)]
    want = torch.stack(torch._foreach_norm(group, float("inf"))).amax()
    assert torch.equal(next(iter(amaxes(group).values())), want)


@pytest.mark.parametrize("fused", [False, True])
def test_a_training_is_the_same_with_and_without(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> tuple[list, torch.Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)).cuda()
        optimizer = torch.optim.Adam(net.parameters(), fused=fused)
        scaler, states = amp.GradScaler("cuda", rule="auto"), []
        for step in range(8):
            optimizer.zero_grad()
            scaler.scale(net(torch.ones(4, 64, device="cuda")).square().mean()).backward()
            if step == 3:
                net[1].bias.grad.fill_(float("nan"))
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            states.append(scaler.state)
        return states, torch.cat([p.detach().flatten() for p in net.parameters()])

    got = trained()
    monkeypatch.setattr(_triton, "usable", lambda values: False)
    want = trained()
    assert got[0] == want[0]
    assert torch.equal(got[1], want[1])


def test_nothing_waits() -> None:
    group = [torch.randn(1000, device="cuda") for _ in range(3)]
    inverse = torch.full((), 0.5, device="cuda")
    _triton.one_pass(group, inverse)
    try:
        torch.cuda.set_sync_debug_mode("error")
        found = _triton.one_pass(group, inverse)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(found.finite)
