"""clip_and_step beside torch's three calls, and many kinds of gradients."""

from __future__ import annotations

import pytest
import torch
from torch_clip_cases import both_kinds, give, one
from torch_scaler_cases import (
    INF,
    NAN,
    OPTIMIZERS,
    mlp,
    parameter,
    tensors_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")


def torchs_way(optimizer, params, max_norm, order, scaler=None):
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm, order)
    scaler.step(optimizer) if scaler is not None else optimizer.step()
    return norm


class TestLikeTorch:
    @pytest.mark.parametrize("order", [0.5, 1.0, 2.0, 3.0, 7.0, INF])
    @pytest.mark.parametrize("max_norm", [0.01, 0.5, 1e4])
    @pytest.mark.parametrize(
        "build",
        [
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
            lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
            lambda p: torch.optim.Adagrad(p, lr=0.1),
        ],
        ids=["sgd", "fused sgd", "fused adam", "adagrad"],
    )
    def test_training(self, make, build, max_norm, order):
        results = []
        for ours in (True, False):
            scaler = make(growth_interval=2) if ours else torch.amp.GradScaler("cpu")
            model = mlp()
            optimizer = build(model.parameters())
            norms = []
            for seed in range(3):
                optimizer.zero_grad()
                inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
                scaler.scale(model(inputs).square().sum()).backward()
                if ours:
                    norms.append(scaler.clip_and_step(optimizer, max_norm, order))
                else:
                    norms.append(torchs_way(optimizer, model.parameters(), max_norm, order, scaler))
                scaler.update()
            results.append([*norms, *tensors_of(model, optimizer)])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)

    @both_kinds
    def test_with_scaling_disabled(self, make, kind):
        scaler = make(enabled=False)
        p, optimizer = one(kind, 1.0, 1.0)
        p.grad = torch.tensor([3.0, 4.0])
        assert scaler.clip_and_step(optimizer, 1.0).item() == 5.0
        scaler.update()
        assert p.tolist() == pytest.approx([0.4, 0.2], abs=1e-6)
        p.grad = torch.tensor([3.0, 4.0])
        assert scaler.clip_and_step(optimizer, 10.0).item() == 5.0
        assert p.tolist() == pytest.approx([-2.6, -3.8], abs=1e-6)
        assert not hasattr(optimizer, "grad_scale")

    @both_kinds
    @pytest.mark.parametrize("bad", [INF, NAN])
    def test_disabled_it_skips_nothing(self, make, kind, bad):
        results = []
        for ours in (True, False):
            p, optimizer = one(kind, 1.0, 1.0)
            p.grad = torch.tensor([bad, 4.0])
            if ours:
                make(enabled=False).clip_and_step(optimizer, 1.0)
            else:
                torchs_way(optimizer, [p], 1.0, 2.0)
            results.append(str(p.tolist()))
        assert results[0] == results[1]

    @both_kinds
    def test_disabled_a_norm_whose_squares_overflow(self, make, kind):
        p, optimizer = one(kind, 0.0, 0.0)
        p.grad = torch.tensor([1e20, 0.0])
        assert make(enabled=False).clip_and_step(optimizer, 1.0).item() == pytest.approx(1e20)
        assert p.tolist() == pytest.approx([-1.0, 0.0])

    @both_kinds
    def test_after_unscale_it_only_clips(self, make, kind):
        scaler = make(init_scale=1024.0)
        p, optimizer = one(kind, 1.0, 1.0)
        give(scaler, p, 3.0, 4.0)
        scaler.unscale_(optimizer)
        p.grad.mul_(2.0)
        assert scaler.clip_and_step(optimizer, 5.0).item() == 10.0
        scaler.update()
        assert p.tolist() == pytest.approx([-2.0, -3.0], abs=1e-5)

    @both_kinds
    def test_after_unscale_without_clipping(self, make, kind):
        scaler = make(init_scale=1024.0)
        p, optimizer = one(kind, 1.0, 1.0)
        give(scaler, p, 3.0, 4.0)
        scaler.unscale_(optimizer)
        assert scaler.clip_and_step(optimizer, 50.0).item() == 5.0
        assert p.tolist() == [-2.0, -3.0]

    def test_a_grad_scale_of_the_users(self, make):
        scaler = make(init_scale=8.0)
        p, optimizer = one("fused", 1.0, 1.0)
        give(scaler, p, 6.0, 8.0)
        optimizer.grad_scale = torch.tensor(2.0)
        assert scaler.clip_and_step(optimizer, 1.0).item() == 5.0
        assert p.tolist() == pytest.approx([0.4, 0.2], abs=1e-6)


class TestManyGradients:
    @both_kinds
    def test_groups_are_clipped_together(self, make, kind):
        scaler = make(init_scale=16.0)
        p, q = parameter(0.0), parameter(0.0)
        optimizer = OPTIMIZERS[kind]([{"params": [p]}, {"params": [q], "lr": 10.0}])
        give(scaler, p, 3.0)
        give(scaler, q, 4.0)
        assert scaler.clip_and_step(optimizer, 1.0).item() == 5.0
        assert (p.item(), q.item()) == pytest.approx((-0.6, -8.0), abs=1e-5)

    @both_kinds
    def test_dtypes_together(self, make, kind):
        scaler = make(init_scale=16.0)
        p = parameter(0.0, dtype=torch.float32)
        q = parameter(0.0, dtype=torch.float64)
        r = parameter(0.0, dtype=torch.bfloat16)
        optimizer = OPTIMIZERS[kind]([p, q, r])
        for param, value in ((p, 2.0), (q, 4.0), (r, 4.0)):
            give(scaler, param, value)
        norm = scaler.clip_and_step(optimizer, 3.0)
        assert (norm.item(), norm.dtype) == (6.0, torch.float64)
        assert (p.item(), q.item(), r.item()) == pytest.approx((-1.0, -2.0, -2.0), rel=1e-2)
        assert q.item() == pytest.approx(-2.0, rel=1e-6)

    def test_a_float16_gradient_norm_may_pass_float16(self, make):
        scaler = make(init_scale=1.0)
        p = parameter(0.0, 0.0, dtype=torch.float16)
        optimizer = OPTIMIZERS["fused"]([p])
        give(scaler, p, 48000.0, 64000.0)
        assert scaler.clip_and_step(optimizer, 1.0).item() == pytest.approx(80000.0, rel=1e-3)
        assert p.tolist() == pytest.approx([-0.6, -0.8], rel=2e-3)

    def test_float16_gradients_need_a_fused_optimizer(self, make):
        scaler = make()
        p = parameter(1.0, dtype=torch.float16)
        optimizer = OPTIMIZERS["plain"]([p])
        give(scaler, p, 0.5)
        with pytest.raises(ValueError, match="float16"):
            scaler.clip_and_step(optimizer, 1.0)
        assert p.item() == 1.0

    def test_bfloat16_products_are_rounded_once(self, make):
        scaler = make(init_scale=2.0**20)
        p = parameter(0.0, 0.0, dtype=torch.bfloat16)
        optimizer = OPTIMIZERS["plain"]([p])
        give(scaler, p, 3.0, 4.0)
        scaler.clip_and_step(optimizer, 1.0)
        want = (torch.tensor([3.0, 4.0]) / (5.0 + 1e-6)).to(torch.bfloat16)
        assert p.grad.tolist() == want.tolist()

    @pytest.mark.parametrize("order", [1.0, 2.0, INF])
    def test_complex(self, make, order):
        scaler = make(init_scale=16.0)
        p = parameter(0j, 0j)
        optimizer = OPTIMIZERS["plain"]([p])
        give(scaler, p, 3 + 4j, 12j)
        want = {1.0: 17.0, 2.0: 13.0, INF: 12.0}[order]
        assert scaler.clip_and_step(optimizer, 1.0, order).item() == pytest.approx(want)
        assert p[1].item() == pytest.approx(-12j / want, rel=1e-5)

    def test_double_gradients_whose_squares_overflow(self, make):
        scaler = make(init_scale=1.0)
        p = parameter(0.0, 0.0, dtype=torch.float64)
        optimizer = OPTIMIZERS["plain"]([p])
        give(scaler, p, 3e200, 4e200)
        assert scaler.clip_and_step(optimizer, 1.0).item() == pytest.approx(5e200)
        assert p.tolist() == pytest.approx([-0.6, -0.8])

    @pytest.mark.parametrize("order", [1.0, 2.0, 3.0, INF])
    def test_sparse_with_duplicates(self, make, order):
        results = []
        for sparse in (True, False):
            scaler = make(init_scale=64.0)
            table = torch.nn.Embedding(5, 2, sparse=sparse)
            torch.nn.init.ones_(table.weight)
            optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
            index = torch.tensor([1, 1, 3, 1])
            scaler.scale((table(index) * torch.tensor([1.0, 2.0])).sum()).backward()
            norm = scaler.clip_and_step(optimizer, 0.5, order)
            scaler.update()
            results.append([norm, table.weight.detach()])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want)
        assert results[0][0].item() > 3.0

    def test_sparse_shared_and_already_unscaled(self, make):
        scaler = make(init_scale=64.0)
        table = torch.nn.Embedding(5, 1, sparse=True)
        a = torch.optim.SGD(table.parameters(), lr=0.0)
        b = torch.optim.SGD(table.parameters(), lr=1.0)
        with torch.no_grad():
            table.weight.zero_()
        scaler.scale(table(torch.tensor([1, 1])).sum()).backward()
        scaler.step(a)
        assert scaler.clip_and_step(b, 10.0).item() == 2.0
        scaler.update()
        assert table.weight[1].item() == -2.0

    @both_kinds
    @pytest.mark.parametrize("first", OPTIMIZERS)
    def test_shared_with_an_optimizer_that_has_unscaled_it(self, make, kind, first):
        scaler = make(init_scale=1024.0)
        p, q = parameter(1.0), parameter(1.0)
        a, b = OPTIMIZERS[first]([p]), OPTIMIZERS[kind]([p, q])
        for _ in range(2):
            give(scaler, p, 3.0)
            give(scaler, q, 4.0)
            scaler.step(a)
            assert scaler.clip_and_step(b, 1.0).item() == 5.0
            scaler.update()
        assert p.item() == pytest.approx(1.0 - 2 * 3.6, abs=1e-5)
        assert q.item() == pytest.approx(1.0 - 2 * 0.8, abs=1e-5)

    @both_kinds
    @pytest.mark.parametrize("second", OPTIMIZERS)
    def test_unscaled_for_the_next_optimizer(self, make, kind, second):
        scaler = make(init_scale=1024.0)
        p, a = one(kind, 1.0, 1.0)
        b = OPTIMIZERS[second]([p])
        give(scaler, p, 3.0, 4.0)
        scaler.clip_and_step(a, 1.0)
        scaler.step(b)
        scaler.update()
        assert p.tolist() == pytest.approx([-0.2, -0.6], abs=1e-5)

    @both_kinds
    @pytest.mark.parametrize("second", OPTIMIZERS)
    def test_a_skip_leaves_a_shared_gradient_scaled(self, make, kind, second):
        scaler = make(init_scale=1024.0)
        p, q = parameter(1.0), parameter(1.0)
        a, b = OPTIMIZERS[kind]([p, q]), OPTIMIZERS[second]([p])
        give(scaler, p, 3.0)
        give(scaler, q, NAN)
        scaler.clip_and_step(a, 1.0)
        assert scaler.clip_and_step(b, 1.5).item() == 3.0
        scaler.update()
        assert (p.item(), q.item()) == (pytest.approx(-0.5, abs=1e-5), 1.0)

    @both_kinds
    def test_no_gradients(self, make, kind):
        scaler = make(init_scale=8.0)
        p, optimizer = one(kind, 1.0)
        scaler.scale(torch.ones(()))
        if kind == "plain":
            with pytest.raises(AssertionError, match="No inf checks"):
                scaler.clip_and_step(optimizer, 1.0)
        else:
            assert scaler.clip_and_step(optimizer, 1.0).item() == 0.0
        assert p.item() == 1.0

    def test_empty_gradients(self, make):
        scaler = make(init_scale=8.0)
        p, q = torch.nn.Parameter(torch.ones(0)), parameter(1.0)
        optimizer = OPTIMIZERS["plain"]([p, q])
        give(scaler, q, 2.0)
        p.grad = torch.ones(0)
        assert scaler.clip_and_step(optimizer, 10.0).item() == 2.0
        assert q.item() == -1.0

    def test_of_tensors_spread_over_processes(self, make, tmp_path):
        dist = pytest.importorskip("torch.distributed", reason="needs a torch built with it")
        tensor = pytest.importorskip("torch.distributed.tensor", reason="needs DTensor")
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
        )
        try:
            mesh = tensor.init_device_mesh("cpu", (1,))
            p = torch.nn.Parameter(
                tensor.distribute_tensor(torch.zeros(2), mesh, [tensor.Shard(0)])
            )
            scaler = make(init_scale=16.0)
            optimizer = torch.optim.SGD([p], lr=1.0)
            scaler.scale(torch.ones(()))
            p.grad = tensor.distribute_tensor(torch.tensor([48.0, 64.0]), mesh, [tensor.Shard(0)])
            norm = scaler.clip_and_step(optimizer, 1.0)
            scaler.update()
            assert norm.item() == pytest.approx(5.0)
            assert p.to_local().tolist() == pytest.approx([-0.6, -0.8], abs=1e-5)
        finally:
            dist.destroy_process_group()
