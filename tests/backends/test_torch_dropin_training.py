"""polyamp.torch.GradScaler where torch.amp.GradScaler stood: what training with it does."""

from __future__ import annotations

import pytest
import torch
from torch_scaler_cases import (
    INF,
    NAN,
    OPTIMIZERS,
    backward,
    iterate,
    parameter,
    same_bits,
    tensors_of,
    train,
)

import polyamp.torch as amp

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")


BUILDERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, fused=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "two-groups-fused": lambda p: torch.optim.SGD(
        [{"params": [q]} for q in p], lr=0.1, maximize=True, fused=True
    ),
}


class TestTrajectories:
    """Every parameter, every optimizer state and every scale, bit for bit those of torch."""

    @pytest.mark.parametrize("name", BUILDERS)
    @pytest.mark.parametrize(
        "scaling",
        [
            {"init_scale": 256.0, "growth_interval": 2},
            {"init_scale": 1000.0, "growth_interval": 1, "growth_factor": 1.5},
            {"init_scale": 3.0, "growth_interval": 3, "backoff_factor": 0.75},
        ],
        ids=["two", "1.5", "0.75"],
    )
    def test_equal_those_of_torch(self, make, name, scaling):
        ours, theirs = make(**scaling), torch.amp.GradScaler("cpu", **scaling)
        logs: tuple[list, list] = ([], [])
        trace = "...x..n...xx....."
        got = train(ours, BUILDERS[name], trace, lambda: logs[0].append(ours.state_dict()))
        want = train(theirs, BUILDERS[name], trace, lambda: logs[1].append(theirs.state_dict()))
        assert logs[0] == logs[1]
        assert same_bits(tensors_of(*got), tensors_of(*want))
        assert all(torch.isfinite(t).all() for t in tensors_of(*got))

    @pytest.mark.parametrize("name", [n for n in BUILDERS if not n.startswith("sgd-fused")])
    def test_overflow_on_the_first_steps(self, make, name):
        ours, theirs = make(init_scale=64.0), torch.amp.GradScaler("cpu", init_scale=64.0)
        got = train(ours, BUILDERS[name], "xn...x.")
        want = train(theirs, BUILDERS[name], "xn...x.")
        assert ours.get_scale() == theirs.get_scale() == 8.0
        assert same_bits(tensors_of(*got), tensors_of(*want))

    @pytest.mark.parametrize("name", ["sgd", "sgd-fused", "adam-fused"])
    def test_a_power_of_two_changes_no_bit(self, make, name):
        got = train(make(init_scale=2.0**12), BUILDERS[name], "........")
        want = train(make(enabled=False), BUILDERS[name], "........")
        pairs = zip(tensors_of(*got), tensors_of(*want), strict=True)
        if name == "sgd":
            assert same_bits(tensors_of(*got), tensors_of(*want))
        assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in pairs)


class TestSeveral:
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_two_losses_two_models_two_optimizers(self, make, kind):
        scaler = make(init_scale=128.0, growth_interval=1)
        a, b = parameter(1.0), parameter(2.0)
        opt_a, opt_b = OPTIMIZERS[kind]([a]), OPTIMIZERS[kind]([b])
        rows = []
        for bad in (None, INF, None):
            opt_a.zero_grad()
            opt_b.zero_grad()
            scaler.scale((a * b).sum()).backward(retain_graph=True)
            scaler.scale((a + 3 * b).sum()).backward()
            if bad is not None:
                b.grad.fill_(bad)
            scaler.unscale_(opt_a)
            scaler.step(opt_a)
            scaler.step(opt_b)
            scaler.update()
            rows.append((a.item(), b.item(), scaler.get_scale()))
        # gradients: a: b + 1, b: a + 3; b's second step is skipped, the scale is cut once
        assert rows == [(-2.0, -2.0, 256.0), (-1.0, -2.0, 128.0), (0.0, -4.0, 256.0)]

    def test_one_loss_each_scale_call_uses_the_same_scale(self, make):
        scaler = make(init_scale=4.0, growth_interval=1)
        p = parameter(0.0)
        optimizer = OPTIMIZERS["plain"]([p])
        losses = scaler.scale([p.sum(), (2 * p).sum()])
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        assert p.grad.item() == 12.0
        scaler.step(optimizer)
        scaler.update()
        assert (p.item(), scaler.get_scale()) == (-3.0, 8.0)

    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_an_optimizer_left_out_counts_for_nothing(self, make, kind):
        scaler = make(init_scale=16.0)
        a, b = parameter(0.0), parameter(0.0)
        opt_a, opt_b = OPTIMIZERS[kind]([a]), OPTIMIZERS[kind]([b])
        backward(scaler, b, bad=NAN)
        backward(scaler, a)
        scaler.step(opt_a)
        scaler.update()
        assert (a.item(), b.item(), scaler.get_scale()) == (-1.0, 0.0, 16.0)
        b.grad = torch.ones(1) * 16
        scaler.scale(a.sum())
        scaler.step(opt_b)
        scaler.update()
        assert b.item() == -1.0

    def test_accumulation(self, make):
        scaler = make(init_scale=8.0, growth_interval=1)
        p = parameter(0.0, 0.0)
        optimizer = OPTIMIZERS["plain"]([p])
        for slope in (1.0, 3.0, 5.0, 7.0):
            scaler.scale((p * slope).sum() / 2).backward()
            if slope in (3.0, 7.0):
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert p.tolist() == [-8.0, -8.0]
        assert scaler.get_scale() == 32.0

    @pytest.mark.parametrize("at", [0, 1])
    def test_one_bad_micro_batch_spoils_the_window(self, make, at):
        scaler = make(init_scale=8.0)
        p = parameter(0.0, 0.0)
        optimizer = OPTIMIZERS["plain"]([p])
        for micro in range(2):
            scaler.scale((p * (INF if micro == at else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (p.tolist(), scaler.get_scale()) == ([0.0, 0.0], 4.0)


class TestUnscaledGradients:
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_clipping_after_unscale(self, make, kind):
        scaler = make(init_scale=1024.0, growth_interval=1)
        p = parameter(0.0, 0.0)
        optimizer = OPTIMIZERS[kind]([p])
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale((p * torch.tensor([3.0, 4.0])).sum()).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_([p], 1.0)
            assert norm.item() == 5.0
            scaler.step(optimizer)
            scaler.update()
        assert p.tolist() == pytest.approx([-1.2, -1.6], rel=1e-6)
        assert scaler.get_scale() == 4096.0

    def test_clipping_without_unscale(self, make):
        scaler = make(init_scale=1024.0)
        p = parameter(0.0, 0.0)
        optimizer = OPTIMIZERS["plain"]([p])
        scaler.scale((p * torch.tensor([3.0, 4.0])).sum()).backward()
        torch.nn.utils.clip_grad_norm_([p], 1.0 * scaler.get_scale())
        scaler.step(optimizer)
        assert p.tolist() == pytest.approx([-0.6, -0.8], rel=1e-6)

    def test_an_overflow_found_by_unscale_is_remembered_after_clipping(self, make):
        scaler = make(init_scale=16.0)
        p = parameter(0.0, 0.0)
        optimizer = OPTIMIZERS["plain"]([p])
        backward(scaler, p, bad=INF)
        scaler.unscale_(optimizer)
        p.grad.zero_()
        scaler.step(optimizer)
        scaler.update()
        assert (p.tolist(), scaler.get_scale()) == ([0.0, 0.0], 8.0)

    def test_gradients_spoilt_after_unscale_are_the_users_business(self, make):
        scaler = make(init_scale=16.0)
        p = parameter(0.0)
        optimizer = OPTIMIZERS["plain"]([p])
        backward(scaler, p)
        scaler.unscale_(optimizer)
        p.grad.fill_(NAN)
        scaler.step(optimizer)
        scaler.update()
        assert torch.isnan(p).all()
        assert scaler.get_scale() == 16.0

    def test_gradient_penalty(self, make):
        scaler = make(init_scale=64.0, growth_interval=1)
        p = parameter(3.0)
        optimizer = OPTIMIZERS["plain"]([p], lr=0.25)
        for _ in range(2):
            optimizer.zero_grad()
            loss = p.pow(2).sum()
            (slope,) = torch.autograd.grad(scaler.scale(loss), [p], create_graph=True)
            penalty = (slope / scaler.get_scale()).norm()
            scaler.scale(loss + penalty).backward()
            scaler.step(optimizer)
            scaler.update()
        # d(p^2 + |2p|) = 2p + 2 = 8, then 4
        assert (p.item(), scaler.get_scale()) == (0.0, 256.0)


class TestKindsOfGradients:
    @pytest.mark.parametrize("bad", [None, INF, NAN])
    def test_sparse(self, make, bad):
        scaler = make(init_scale=32.0)
        table = torch.nn.Embedding(4, 2, sparse=True)
        torch.nn.init.zeros_(table.weight)
        optimizer = OPTIMIZERS["plain"](table.parameters())
        scaler.scale(table(torch.tensor([1, 1, 3])).sum()).backward()
        assert table.weight.grad.is_sparse
        if bad is not None:
            table.weight.grad._values()[2, 0] = bad
        scaler.step(optimizer)
        scaler.update()
        moved = [[0.0, 0.0], [-2.0, -2.0], [0.0, 0.0], [-1.0, -1.0]]
        assert table.weight.tolist() == (moved if bad is None else [[0.0, 0.0]] * 4)
        assert scaler.get_scale() == (32.0 if bad is None else 16.0)

    def test_sparse_half_overflows_where_duplicates_add_up(self, make):
        p = torch.zeros(3, dtype=torch.float16).to_sparse()
        index, values = torch.tensor([[1, 1]]), torch.tensor([6e4, 6e4]).half()
        p.grad = torch.sparse_coo_tensor(index, values, (3,), check_invariants=True)
        optimizer = torch.optim.SGD([p], lr=1.0)
        found = make()._unscale_grads_(optimizer, torch.full((1,), 0.5), torch.zeros(1), True)
        assert sum(v.item() for v in found.values()) == 1.0

    def test_bfloat16(self, make):
        scaler = make(init_scale=8.0)
        p = parameter(1.0, 2.0, dtype=torch.bfloat16)
        optimizer = OPTIMIZERS["plain"]([p])
        iterate(scaler, optimizer, p, slope=0.5)
        assert (p.tolist(), p.grad.dtype) == ([0.5, 1.5], torch.bfloat16)
        iterate(scaler, optimizer, p, "x")
        assert (p.tolist(), scaler.get_scale()) == ([0.5, 1.5], 4.0)

    def test_float64_and_a_mixture(self, make):
        scaler = make(init_scale=8.0)
        ps = [parameter(0.0, dtype=t) for t in (torch.float32, torch.float64, torch.bfloat16)]
        optimizer = OPTIMIZERS["plain"](ps)
        scaler.scale(sum(p.sum() for p in ps)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert [p.item() for p in ps] == [-1.0, -1.0, -1.0]

    @pytest.mark.parametrize("call", ["unscale_", "step"])
    def test_float16_gradients_are_refused_before_anything_is_touched(self, make, call):
        scaler = make(init_scale=8.0)
        full, half = parameter(0.0), parameter(0.0, dtype=torch.float16)
        optimizer = OPTIMIZERS["plain"]([full, half])
        scaler.scale(full.sum() + half.sum().float()).backward()
        with pytest.raises(ValueError, match=r"(?i)fp16|float16"):
            getattr(scaler, call)(optimizer)
        assert (full.grad.item(), half.grad.item()) == (8.0, 8.0)
        half.grad = None
        scaler.step(optimizer)
        scaler.update()
        assert (full.item(), half.item(), scaler.get_scale()) == (-1.0, 0.0, 8.0)

    def test_float16_gradients_of_a_fused_optimizer(self, make):
        scaler = make(init_scale=8.0)
        p = parameter(1.0, 2.0, dtype=torch.float16)
        optimizer = OPTIMIZERS["fused"]([p])
        iterate(scaler, optimizer, p)
        iterate(scaler, optimizer, p, "x")
        assert (p.tolist(), scaler.get_scale()) == ([0.0, 1.0], 4.0)

    def test_parameters_without_gradient_are_passed_over(self, make):
        scaler = make(init_scale=8.0)
        used, unused = parameter(0.0), parameter(5.0)
        for kind in OPTIMIZERS:
            iterate(scaler, OPTIMIZERS[kind]([used, unused]), used)
        assert (used.item(), unused.item()) == (-2.0, 5.0)

    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_empty_parameters(self, make, kind):
        scaler = make(init_scale=8.0)
        empty, full = torch.nn.Parameter(torch.zeros(0, 3)), parameter(0.0)
        optimizer = OPTIMIZERS[kind]([empty, full])
        scaler.scale(empty.sum() + full.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (empty.shape, full.item(), scaler.get_scale()) == ((0, 3), -1.0, 8.0)

    def test_the_last_float32_scale_is_not_left(self, make):
        for start, seen in ((2.0**127, [2.0**127] * 2), (2.0**126, [2.0**127] * 2)):
            scaler = make(init_scale=start, growth_interval=1)
            p = parameter(0.0)
            optimizer = OPTIMIZERS["plain"]([p], lr=1e-3)
            got = []
            for _ in range(2):
                scaler.scale(p.sum()).backward()
                p.grad = torch.ones(1)
                scaler.step(optimizer)
                scaler.update()
                got.append(scaler.get_scale())
            assert got == seen


class TestOptimizersThatScaleThemselves:
    def optimizer(self, step):
        kind = type("Own", (torch.optim.SGD,), {"step": step, "_step_supports_amp_scaling": True})
        param = parameter(0.0)
        return param, kind([param], lr=1.0)

    def test_attributes(self, make):
        seen = []

        def step(self, closure=None):
            own = self.grad_scale
            seen.append((own if own is None else own.item(), self.found_inf.item()))
            return 7

        scaler = make(init_scale=4.0)
        param, optimizer = self.optimizer(step)
        for bad, unscaled in ((None, False), (INF, False), (None, True)):
            backward(scaler, param, bad=bad)
            if unscaled:
                scaler.unscale_(optimizer)
            assert scaler.step(optimizer) == 7
            assert not hasattr(optimizer, "grad_scale")
            assert not hasattr(optimizer, "found_inf")
            scaler.update()
        assert seen == [(4.0, 0.0), (4.0, 1.0), (None, 0.0)]

    def test_keyword(self, make):
        seen = []

        def step(self, closure=None, *, grad_scaler=None):
            seen.append((grad_scaler, hasattr(self, "grad_scale")))

        scaler = make()
        param, optimizer = self.optimizer(step)
        backward(scaler, param)
        with pytest.warns(FutureWarning, match=r"grad_scale"):
            scaler.step(optimizer)
        assert seen == [(scaler, False)]
        assert isinstance(seen[0][0], amp.GradScaler)

    def test_a_grad_scale_set_by_the_user_is_multiplied_in(self, make):
        results = []
        for scaler in (make(init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=8.0)):
            p = parameter(1.0, 1.0)
            optimizer = OPTIMIZERS["fused"]([p])
            scaler.scale(p.sum()).backward()
            optimizer.grad_scale = torch.tensor(2.0)
            scaler.step(optimizer)
            scaler.update()
            results.append((p.tolist(), hasattr(optimizer, "grad_scale")))
        assert results == [([0.5, 0.5], False)] * 2
