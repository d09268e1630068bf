"""MasterWeights: how gradients reach the masters, and clipping."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch_masters_cases import (
    sgd,
)
from torch_scaler_cases import INF, parameter

from polyamp import BackendError

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")


class TestGradients:
    def test_zero_grad_clears_model_and_masters(self):
        p, q = parameter(1.0, dtype=torch.float16), parameter(1.0)
        optimizer = sgd(p, q)
        p.grad, q.grad = torch.ones(1).half(), torch.ones(1)
        masters = list(optimizer.master_parameters())
        assert [m.grad.item() for m in masters] == [1.0, 1.0]
        optimizer.zero_grad(set_to_none=False)
        assert [t.grad.item() for t in (p, *masters)] == [0.0] * 3
        optimizer.zero_grad()
        assert [t.grad for t in (p, *masters)] == [None] * 3

    @pytest.mark.parametrize("clear", ["optimizer", "optimizer, zeros", "model", "model, zeros"])
    def test_any_way_of_clearing(self, make, clear):
        scaler = make(init_scale=8.0)
        model = torch.nn.Linear(1, 1, bias=False).half()
        torch.nn.init.ones_(model.weight)
        optimizer = sgd(model.weight, lr=0.25)
        values = []
        for symbol in "..x.":
            owner = optimizer if clear.startswith("optimizer") else model
            owner.zero_grad(set_to_none="zeros" not in clear)
            scaler.scale(model.weight.sum()).backward()
            if symbol == "x":
                model.weight.grad[0] = INF
            optimizer.param_groups[0]["lr"] = 0.25
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.param_groups[0]["lr"] = 0.25
            values.append(model.weight.item())
        assert values == [0.75, 0.5, 0.5, 0.25]

    @pytest.mark.parametrize("log", [False, True])
    def test_accumulate_in_the_model(self, make, log):
        scaler = make(init_scale=8.0)
        p = parameter(1.0, dtype=torch.float16)
        optimizer = sgd(p, lr=0.125)
        for want in (0.5, 0.0):
            optimizer.zero_grad()
            for slope in (1.0, 3.0):
                scaler.scale(p.sum() * slope).backward()
                if log:
                    assert optimizer.param_groups[0]["lr"] == 0.125
            scaler.step(optimizer)
            scaler.update()
            assert p.item() == want

    @pytest.mark.parametrize("last", [False, True])
    @pytest.mark.parametrize("clear", [False, True])
    def test_accumulate_in_float32(self, make, last, clear):
        scaler = make(init_scale=1.0, growth_interval=1000)
        p = parameter(0.0, dtype=torch.float16)
        optimizer = sgd(p, lr=1.0)
        total = 0.0
        for _ in range(2):
            if clear:
                optimizer.zero_grad()
            for i, slope in enumerate([2048.0, 1.0, 1.0, 1.0]):
                scaler.scale(p.sum() * slope).backward()
                if last or i < 3:
                    optimizer.accumulate()
                    assert p.grad is None
            scaler.step(optimizer)
            scaler.update()
            total -= 2051.0  # float16 would have made it 2048
            (master,) = optimizer.master_parameters()
            assert master.item() == total

    def test_the_sums_end_with_a_skipped_step(self, make):
        scaler = make(init_scale=8.0)
        p = parameter(0.0, dtype=torch.float16)
        optimizer = sgd(p)
        for slope in (INF, 1.0):
            for _ in range(2):
                scaler.scale(p.sum()).backward()
                p.grad *= slope
                optimizer.accumulate()
            scaler.step(optimizer)
            scaler.update()
        assert p.item() == -2.0

    def test_the_sums_are_not_applied_again(self):
        p = parameter(0.0, dtype=torch.float16)
        q = parameter(0.0, dtype=torch.float16)
        optimizer = sgd(p, q)
        p.grad, q.grad = torch.ones(1).half(), torch.ones(1).half()
        optimizer.accumulate()
        optimizer.step()
        p.grad = torch.ones(1).half()
        optimizer.step()
        assert (p.item(), q.item()) == (-2.0, -1.0)

    def test_accumulate_sparse(self):
        table = torch.nn.Embedding(6, 2, sparse=True, dtype=torch.float16)
        torch.nn.init.zeros_(table.weight)
        optimizer = sgd(table.weight)
        for _ in range(3):
            table(torch.tensor([1, 4, 1])).float().sum().backward()
            optimizer.accumulate()
        optimizer.step()
        assert table.weight[:, 0].tolist() == [0.0, -6.0, 0.0, 0.0, -3.0, 0.0]

    def test_accumulate_after_unscale_is_refused(self, make):
        scaler = make(init_scale=8.0)
        p = parameter(0.0, dtype=torch.float16)
        optimizer = sgd(p)
        scaler.scale(p.sum()).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(BackendError, match="between the scaler's unscale_ and step"):
            optimizer.accumulate()
        scaler.step(optimizer)
        assert p.item() == -1.0

    def test_after_a_fused_first_step_that_the_host_skipped(self, make):
        scaler = make(init_scale=8.0)
        p = parameter(1.0, dtype=torch.float16)
        optimizer = sgd(p, lr=0.25, momentum=0.5, fused=True)
        values = []
        for symbol in "x..":
            if p.grad is not None:
                p.grad.zero_()  # not by the optimizer
            scaler.scale(p.sum()).backward()
            if symbol == "x":
                p.grad[0] = INF
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            values.append(p.item())
        assert values == [1.0, 0.75, 0.375]

    def test_a_gradient_that_was_set_is_not_written_into(self):
        p = parameter(1.0, dtype=torch.float16)
        optimizer = sgd(p)
        p.grad = torch.ones(1).half()
        (master,) = optimizer.master_parameters()
        mine = master.grad = master.grad * 0.5
        optimizer.step()
        assert p.item() == 0.5
        p.grad = torch.ones(1).half()
        optimizer.step()
        assert (p.item(), mine.item()) == (-0.5, 0.5)

    def test_channels_last(self):
        p = torch.nn.Parameter(
            torch.ones(2, 3, 4, 4, dtype=torch.float16).to(memory_format=torch.channels_last)
        )
        optimizer = sgd(p, lr=0.5)
        p.grad = torch.ones_like(p)
        (master,) = optimizer.master_parameters()
        assert master.is_contiguous(memory_format=torch.channels_last)
        assert master.grad.is_contiguous(memory_format=torch.channels_last)
        optimizer.step()
        assert torch.equal(p.detach(), torch.full_like(p, 0.5))


class TestClipping:
    def pair(self, **options):
        p, q = parameter(1.0, dtype=torch.float16), parameter(1.0)
        p.grad, q.grad = torch.tensor([3.0]).half(), torch.tensor([4.0])
        return p, q, sgd(p, q, **options)

    def clip(self, params):
        return torch.nn.utils.clip_grad_norm_(params, 1.0)

    def test_the_masters_without_a_scaler(self):
        *_, optimizer = self.pair()
        assert self.clip(optimizer.master_parameters()).item() == pytest.approx(5.0)
        optimizer.step()
        assert [m.item() for m in optimizer.master_parameters()] == pytest.approx(
            [0.4, 0.2], abs=1e-6
        )

    @pytest.mark.parametrize("look", [False, True])
    def test_the_model_without_a_scaler(self, look):
        p, q, optimizer = self.pair()
        if look:
            assert optimizer.param_groups[0]["lr"] == 1.0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.clip([p, q])
            optimizer.step()
        assert [m.item() for m in optimizer.master_parameters()] == pytest.approx(
            [0.4, 0.2], abs=1e-3
        )

    @pytest.mark.parametrize("fused", [False, True])
    def test_the_masters_after_unscale(self, make, fused):
        scaler = make(init_scale=8.0)
        p, q = parameter(1.0, dtype=torch.float16), parameter(1.0)
        optimizer = sgd(p, q, fused=fused)
        scaler.scale(3 * p.float() + 4 * q).backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler.unscale_(optimizer)
            self.clip(optimizer.master_parameters())
            scaler.step(optimizer)
        assert [m.item() for m in optimizer.master_parameters()] == pytest.approx(
            [0.4, 0.2], abs=1e-6
        )

    @pytest.mark.parametrize("fused", [False, True])
    def test_the_model_after_unscale_warns(self, make, fused):
        scaler = make(init_scale=8.0)
        p = parameter(1.0, dtype=torch.float16)
        optimizer = sgd(p, fused=fused)
        scaler.scale(p.float() * 4.0).backward()
        scaler.unscale_(optimizer)
        self.clip([p])
        with pytest.warns(UserWarning, match=r"optimizer\.master_parameters\(\)"):
            scaler.step(optimizer)
        scaler.update()
        assert p.item() == -3.0  # unscaled, not clipped: never scaled
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler.scale(p.float() * 4.0).backward()
            scaler.step(optimizer)
        assert p.item() == -7.0

    def test_the_model_after_the_masters_warns(self):
        p, q, optimizer = self.pair()
        self.clip(optimizer.master_parameters())
        self.clip([p, q])
        with pytest.warns(UserWarning, match="too late"):
            optimizer.step()

    def test_gradients_freed_after_unscale(self, make):
        scaler = make(init_scale=8.0)
        p = parameter(1.0, dtype=torch.float16)
        optimizer = sgd(p)
        scaler.scale(p.float() * 4.0).backward()
        scaler.unscale_(optimizer)
        p.grad = None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler.step(optimizer)
        assert p.item() == -3.0
