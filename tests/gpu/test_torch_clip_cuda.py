"""clip_and_step and MasterWeights where the gradients live on an accelerator."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="these tests are about torch on an accelerator")

import polyamp.torch as amp  # noqa: E402
from polyamp_torch import _norm  # noqa: E402
from polyamp_torch._sync_count import SyncCount  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning"),
]
INF = float("inf")
both_kinds = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])


@both_kinds
@pytest.mark.parametrize("size", [1.0, 1e20])
def test_three_four_five(fused, size):
    scaler = amp.GradScaler("cuda", init_scale=1024.0)
    p = torch.nn.Parameter(torch.zeros(2, device="cuda"))
    optimizer = torch.optim.SGD([p], lr=1.0, fused=fused)
    for symbol in ".x":
        p.grad = None
        scaler.scale((p * torch.tensor([3.0, 4.0], device="cuda") * size).sum()).backward()
        if symbol == "x":
            p.grad[0] = INF
        norm = scaler.clip_and_step(optimizer, 1.0)
        scaler.update()
        assert norm.item() == (INF if symbol == "x" else pytest.approx(5.0 * size))
        assert p.tolist() == pytest.approx([-0.6, -0.8], abs=1e-5)
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, 6.0, INF])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_are_those_of_the_cpu(order, dtype):
    grads = [torch.randn(n, generator=torch.Generator().manual_seed(n)) for n in (3, 1000)]
    totals = []
    for device in ("cpu", "cuda"):
        part = _norm.Part([g.to(device, dtype) for g in grads], torch.tensor(0.5))
        found = _norm.measure([part], order, torch.device(device), False)
        assert found.finite.item()
        totals.append(found.total.item())
    assert totals[1] == pytest.approx(totals[0], rel=1e-6)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_master_weights_skip_and_step_without_waiting(dtype, clip):
    p = torch.nn.Parameter(torch.ones(4, device="cuda", dtype=dtype))
    inner = torch.optim.AdamW([p], lr=1e-4, weight_decay=0.0, fused=True)
    optimizer = amp.MasterWeights(inner)
    scaler = amp.GradScaler("cuda", init_scale=1024.0)
    applied = 0
    for symbol in "..x.x.":
        optimizer.zero_grad()
        scaler.scale(p.float().sum()).backward()
        if symbol == "x":
            p.grad[0] = INF
        with SyncCount() as syncs:
            if clip:
                scaler.clip_and_step(optimizer, 1e6)
            else:
                scaler.step(optimizer)
            scaler.update()
        applied += symbol == "."
        (master,) = optimizer.master_parameters()
        assert master.tolist() == pytest.approx([1.0 - 1e-4 * applied] * 4, abs=1e-7)
        assert torch.equal(p, master.to(dtype))
    with SyncCount() as alone:
        inner.step()
    assert syncs.count <= alone.count
