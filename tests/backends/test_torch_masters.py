"""MasterWeights: steps, applied and skipped."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch_masters_cases import (
    by_hand,
    everything,
    inners,
    low,
    sgd,
    trained,
)
from torch_scaler_cases import INF, HostReads, make_scaler, parameter, same_bits

import polyamp.torch as amp
from polyamp import BackendError

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")


class TestStepping:
    @low
    def test_ten_thousand_small_updates_add_up(self, dtype):
        p, plain = parameter(1.0, dtype=dtype), parameter(1.0, dtype=dtype)
        optimizer, other = sgd(p, lr=1e-4), torch.optim.SGD([plain], lr=1e-4)
        true = torch.tensor([1.0])
        for _ in range(10_000):
            p.grad = plain.grad = torch.tensor([-1.0], dtype=dtype)
            optimizer.step()
            other.step()
            true += 1e-4
        (master,) = optimizer.master_parameters()
        assert torch.equal(master.detach(), true)
        assert master.item() == pytest.approx(2.0, rel=1e-3)
        assert p.item() == master.to(dtype).item()
        assert plain.item() == 1.0

    @low
    @inners
    def test_equals_the_long_way(self, dtype, build):
        model, optimizer = trained(dtype, build, "." * 6)
        want = by_hand(dtype, build, "." * 6)
        got = everything(model, list(optimizer.master_parameters()), optimizer)
        assert same_bits(got, everything(*want))
        assert optimizer.param_groups is optimizer.inner.param_groups

    @low
    @inners
    @pytest.mark.parametrize("clip", [None, INF])
    @pytest.mark.parametrize("trace", ["......", "x..x.", "..x.xx."])
    def test_skips_under_a_scaler_never_were(self, make, dtype, build, trace, clip):
        scaler = make(init_scale=2.0**4, growth_interval=1000, backoff_factor=0.5)
        model, optimizer = trained(dtype, build, trace, scaler, clip)
        want = by_hand(dtype, build, trace)
        got = everything(model, list(optimizer.master_parameters()), optimizer)
        for have, true in zip(got, everything(*want), strict=True):
            # Unscaled, float16 gradients below 6e-5 have fewer digits than scaled.
            off = 0.0 if dtype == torch.bfloat16 else 2e-3
            torch.testing.assert_close(have.double(), true.double(), rtol=off, atol=off / 10)
        assert scaler.get_scale() == 2.0**4 * 0.5 ** trace.count("x")

    def test_a_skip_on_the_device_moves_nothing_and_reads_nothing(self):
        scaler = make_scaler("device", init_scale=8.0)
        p = parameter(1.0, 2.0, dtype=torch.float16)
        optimizer = sgd(p, lr=0.1, fused=True)
        for value, want in ((1.0, 0.9), (INF, 0.9), (1.0, 0.8)):
            optimizer.zero_grad()
            scaler.scale((p.float() * 1.0).sum()).backward()
            p.grad[0] *= value
            with HostReads() as reads:
                scaler.step(optimizer)
                scaler.update()
            assert reads.count == 0
            (master,) = optimizer.master_parameters()
            assert master.tolist() == pytest.approx([want, want + 1.0])
            assert torch.equal(p, master.to(torch.float16))

    def test_fused_is_the_inner_optimizers(self):
        p = parameter(1.0, dtype=torch.float16)
        assert sgd(p, fused=True)._step_supports_amp_scaling is True
        assert sgd(parameter(1.0), fused=False)._step_supports_amp_scaling is False

        class Old(torch.optim.SGD):
            _step_supports_amp_scaling = True

            def step(self, closure=None, *, grad_scaler=None):
                return super().step(closure)

        optimizer = amp.MasterWeights(Old([p], lr=1.0))
        assert optimizer._step_supports_amp_scaling is False

    def test_the_fused_attributes_are_taken_away_again(self, make):
        scaler = make(init_scale=8.0)
        p = parameter(1.0, dtype=torch.float16)
        optimizer = sgd(p, fused=True)
        scaler.scale(p.sum()).backward()
        scaler.step(optimizer)
        for owner in (optimizer, optimizer.inner):
            assert not hasattr(owner, "grad_scale")
            assert not hasattr(owner, "found_inf")
        assert p.item() == 0.0

    def test_clip_and_step(self, make):
        for fused in (False, True):
            scaler = make(init_scale=1024.0)
            p, q = parameter(1.0, dtype=torch.float16), parameter(1.0)
            optimizer = sgd(p, q, fused=fused)
            scaler.scale(3.0 * p.float() + 4.0 * q).backward()
            assert scaler.clip_and_step(optimizer, 1.0).item() == 5.0
            masters = [m.item() for m in optimizer.master_parameters()]
            assert masters == pytest.approx([0.4, 0.2], abs=1e-6)
            assert p.item() == torch.tensor(masters[0]).half().item()

    def test_torchs_own_scaler(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for fused in (False, True):
            p, q = parameter(1.0, dtype=torch.float16), parameter(1.0)
            optimizer = sgd(p, q, fused=fused)
            for value in (1.0, INF, 1.0):
                scaler.scale((p.float() + q) * 0.25).backward()
                p.grad *= value
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert (p.item(), q.item()) == (0.5, 0.5)

    def test_float32_parameters_are_themselves(self):
        p, q = parameter(1.0, dtype=torch.bfloat16), parameter(1.0)
        optimizer = sgd(p, q)
        masters = list(optimizer.master_parameters())
        assert masters[1] is q
        assert masters[0] is not p
        assert [m.dtype for m in masters] == [torch.float32] * 2
        version = q._version
        p.grad, q.grad = torch.ones(1, dtype=torch.bfloat16), torch.tensor([0.25])
        optimizer.step()
        assert (p.item(), q.item()) == (0.0, 0.75)
        assert q._version == version + 1  # the step alone: no copy

    def test_tied_parameters_have_one_master(self):
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)}).half()
        model["b"].weight = model["a"].weight
        optimizer = sgd(*model.parameters())
        assert len(list(optimizer.master_parameters())) == 3
        p = parameter(1.0, dtype=torch.float16)
        with pytest.warns(UserWarning, match="duplicate"):
            inner = torch.optim.SGD([p, p], lr=1.0)
        (group,) = amp.MasterWeights(inner).param_groups
        assert group["params"][0] is group["params"][1]

    def test_parameters_without_gradients_stay(self):
        p, q = parameter(1.0, dtype=torch.float16), parameter(1.0, dtype=torch.float16)
        optimizer = sgd(p, q, weight_decay=0.5)
        for _ in range(2):
            p.grad = torch.zeros(1, dtype=torch.float16)
            optimizer.step()
        assert (p.item(), q.item()) == (0.25, 1.0)

    def test_a_gradient_that_went_is_not_applied_again(self):
        p, q = parameter(1.0, dtype=torch.float16), parameter(1.0, dtype=torch.float16)
        optimizer = sgd(p, q, lr=0.5)
        p.grad, q.grad = torch.ones(1).half(), torch.ones(1).half()
        optimizer.step()
        q.grad = None
        optimizer.step()
        assert (p.item(), q.item()) == (0.0, 0.5)

    @pytest.mark.parametrize("how", ["positional", "keyword"])
    def test_a_closure_is_refused_unrun(self, how):
        calls = []
        p = parameter(1.0, dtype=torch.float16)
        optimizer = sgd(p)
        p.grad = torch.ones(1).half()
        run = partial(calls.append, 1)
        args, kwargs = ((run,), {}) if how == "positional" else ((), {"closure": run})
        with pytest.raises(BackendError, match="takes no closure"):
            optimizer.step(*args, **kwargs)
        assert (calls, p.item()) == ([], 1.0)

    def test_what_cannot_be_wrapped(self):
        p = parameter(1.0, dtype=torch.float16)
        with pytest.raises(BackendError, match=r"wraps a torch.optim.Optimizer, got list"):
            amp.MasterWeights([p])
        with pytest.raises(BackendError, match="has master weights already"):
            amp.MasterWeights(sgd(p))
        lbfgs = torch.optim.LBFGS([p])
        with pytest.raises(BackendError, match=r"LBFGS\.step calls a closure"):
            amp.MasterWeights(lbfgs)
        assert lbfgs.param_groups[0]["params"][0] is p

    def test_state_that_exists_moves_to_the_masters(self):
        p = parameter(1.0, dtype=torch.float16)
        inner = torch.optim.Adam([p], lr=0.1)
        p.grad = torch.ones(1).half()
        inner.step()
        assert inner.state[p]["exp_avg"].dtype == torch.float16
        optimizer = amp.MasterWeights(inner)
        (master,) = optimizer.master_parameters()
        assert list(optimizer.state) == [master]
        assert optimizer.state[master]["exp_avg"].dtype == torch.float32
        assert optimizer.state[master]["exp_avg"].item() == pytest.approx(0.1, rel=1e-3)
        assert optimizer.state[master]["step"].item() == 1.0

    def test_sparse_gradients(self, make):
        results = []
        for sparse in (True, False):
            table = torch.nn.Embedding(6, 2, sparse=sparse, dtype=torch.bfloat16)
            torch.nn.init.ones_(table.weight)
            optimizer = sgd(table.weight, lr=0.5)
            scaler = make(init_scale=16.0)
            for _ in range(2):
                optimizer.zero_grad()
                scaler.scale(table(torch.tensor([1, 4, 1])).float().sum()).backward()
                (master,) = optimizer.master_parameters()
                assert not sparse or master.grad.is_coalesced()
                scaler.step(optimizer)
                scaler.update()
            results.append([*optimizer.master_parameters(), table.weight])
        assert same_bits(*results)
        assert results[0][0][1].tolist() == [-1.0, -1.0]

    def test_is_an_optimizer_for_schedulers(self):
        p = parameter(1.0, dtype=torch.float16)
        optimizer = sgd(p, lr=1.0, momentum=0.5)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert "momentum" in optimizer.defaults
        assert repr(optimizer).startswith("MasterWeights(SGD (")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        rates = []
        for _ in range(3):
            p.grad = torch.ones(1).half()
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.inner.param_groups[0]["lr"])
        assert rates == [0.5, 0.25, 0.125]
        cycle = torch.optim.lr_scheduler.OneCycleLR(sgd(p, momentum=0.9), 0.1, 10)
        assert cycle.get_last_lr()[0] == pytest.approx(0.004)

    def test_hooks(self):
        p = parameter(1.0, dtype=torch.float16)
        optimizer, seen = sgd(p), []
        optimizer.register_step_pre_hook(lambda *a: seen.append("pre"))
        optimizer.register_step_post_hook(lambda *a: seen.append("post"))
        optimizer.register_state_dict_post_hook(lambda o, d: {**d, "mine": 1})
        p.grad = torch.ones(1).half()
        optimizer.step()
        assert seen == ["pre", "post"]
        assert optimizer.state_dict()["mine"] == 1

    def test_lr_step_waits_on_skips(self, make):
        scaler = make(init_scale=8.0)
        p = parameter(1.0, dtype=torch.float16)
        optimizer = sgd(p, fused=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        stepped = []
        for value in (1.0, INF, 1.0):
            optimizer.zero_grad()
            scaler.scale(p.sum()).backward()
            p.grad *= value
            scaler.step(optimizer)
            scaler.update()
            stepped.append(amp.lr_step(scheduler, scaler))
        assert stepped == [True, False, True]
