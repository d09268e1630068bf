"""clip_and_step: order of calls, host syncs, the norm, the bench."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_clip_cases import both_kinds, give, one
from torch_scaler_cases import (
    INF,
    NAN,
    OPTIMIZERS,
    HostReads,
    make_scaler,
    parameter,
)

import polyamp
import polyamp.torch as amp
from polyamp_torch import _bench_clip, _norm

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")


class TestOrderOfCalls:
    @both_kinds
    def test_before_scale(self, make, kind):
        p, optimizer = one(kind, 1.0)
        p.grad = torch.ones(1)
        with pytest.raises(AssertionError, match="clip_and_step"):
            make().clip_and_step(optimizer, 1.0)
        assert p.item() == 1.0

    @both_kinds
    @pytest.mark.parametrize("how", ["step", "clip_and_step", "unscale_"])
    def test_after_it(self, make, kind, how):
        scaler = make(init_scale=8.0)
        p, optimizer = one(kind, 1.0)
        give(scaler, p, 1.0)
        scaler.clip_and_step(optimizer, 10.0)
        call = getattr(scaler, how)
        with pytest.raises(RuntimeError, match=r"step\(\)|stepped since"):
            call(optimizer, 1.0) if how == "clip_and_step" else call(optimizer)
        assert p.item() == 0.0
        scaler.update()
        give(scaler, p, 1.0)
        scaler.clip_and_step(optimizer, 10.0)
        assert p.item() == -1.0

    @both_kinds
    @pytest.mark.parametrize("max_norm", [-1.0, NAN, True, "1", None, torch.ones(2)])
    def test_wrong_max_norm(self, make, kind, max_norm):
        scaler = make(init_scale=8.0)
        p, optimizer = one(kind, 1.0)
        give(scaler, p, 1.0)
        with pytest.raises(polyamp._errors.RuleError, match="max_norm must be a number, 0 or more"):
            scaler.clip_and_step(optimizer, max_norm)
        assert (p.item(), p.grad.item()) == (1.0, 8.0)

    @pytest.mark.parametrize("order", [0, -1.0, -INF, NAN, False, "two"])
    def test_wrong_norm_type(self, make, order):
        scaler = make(init_scale=8.0)
        p, optimizer = one("plain", 1.0)
        give(scaler, p, 1.0)
        with pytest.raises(polyamp._errors.RuleError, match="norm_type must be a number above 0"):
            scaler.clip_and_step(optimizer, 1.0, order)
        assert (p.item(), p.grad.item()) == (1.0, 8.0)

    def test_numbers_of_other_kinds(self, make):
        scaler = make(init_scale=8.0)
        p, optimizer = one("plain", 1.0, 1.0)
        give(scaler, p, 3.0, 4.0)
        assert scaler.clip_and_step(optimizer, torch.tensor(1), "inf").item() == 4.0
        assert p.tolist() == pytest.approx([0.25, 0.0], abs=1e-6)

    def test_an_optimizer_that_raises_leaves_it_usable(self, make):
        class Angry(torch.optim.SGD):
            angry = True

            def step(self, closure=None):
                if self.angry:
                    raise ValueError("angry")
                return super().step(closure)

        scaler = make(init_scale=8.0)
        p = parameter(1.0, 1.0)
        optimizer = Angry([p], lr=1.0, fused=True)
        give(scaler, p, 3.0, 4.0)
        with pytest.raises(ValueError, match="angry"):
            scaler.clip_and_step(optimizer, 1.0)
        assert not hasattr(optimizer, "grad_scale")
        optimizer.angry = False
        scaler.step(optimizer)
        scaler.update()
        assert p.tolist() == [-2.0, -3.0]

    def test_step_all_beside_it(self, make):
        scaler = make(init_scale=8.0)
        p, a = one("plain", 1.0)
        q, b = one("fused", 1.0)
        give(scaler, p, 1.0)
        give(scaler, q, INF)
        scaler.clip_and_step(a, 10.0)
        scaler.step_all([b])
        scaler.update()
        assert (p.item(), q.item(), scaler.get_scale()) == (0.0, 1.0, 4.0)

    @both_kinds
    def test_lr_step(self, make, kind):
        scaler = make(init_scale=8.0)
        p, optimizer = one(kind, 1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        stepped = []
        for value in (1.0, INF, 1.0):
            give(scaler, p, value)
            scaler.clip_and_step(optimizer, 1.0)
            scaler.update()
            stepped.append(amp.lr_step(scheduler, scaler))
        assert stepped == [True, False, True]

    def test_a_subclass_sees_the_step(self, make):
        seen = []

        class Own(amp.GradScaler):
            def step(self, optimizer, *args, **kwargs):
                seen.append(optimizer)
                return super().step(optimizer, *args, **kwargs)

        for kind in OPTIMIZERS:
            scaler = Own("cpu", init_scale=8.0)
            p, optimizer = one(kind, 1.0)
            give(scaler, p, 1.0)
            scaler.clip_and_step(optimizer, 1.0)
            assert seen.pop() is optimizer
            assert p.item() == pytest.approx(0.0, abs=1e-5)


class TestSyncs:
    def test_none_on_a_device_with_a_fused_optimizer(self):
        scaler = make_scaler("device")
        p, optimizer = one("fused", 1.0, 1.0)
        for value in (1.0, INF, 1.0):
            give(scaler, p, value, 2.0)
            with HostReads() as reads:
                scaler.clip_and_step(optimizer, 1.0)
                scaler.update()
            assert reads.count == 0

    def test_one_with_a_plain_optimizer(self):
        scaler = make_scaler("device")
        p, optimizer = one("plain", 1.0, 1.0)
        give(scaler, p, 1.0, 2.0)
        with HostReads() as reads:
            scaler.clip_and_step(optimizer, 1.0)
            scaler.update()
        assert reads.count == 1

    def test_the_bench_counts_them(self):
        row = _bench_clip.sync_row("sgd-fused")
        assert (row.value, row.limit, row.ok) == (0, 0, True)
        assert _bench_clip.sync_row("adam").ok


class TestBench:
    def test_rows(self):
        rows = _bench_clip.measure("sgd-fused", 5, [(8, 3), (8,)])
        assert [row.name.removeprefix("sgd-fused ") for row in rows] == [
            "time, torch", "time, no scaler", "over torch", "over torch, high",
            "over no scaler", "over no scaler, high", "host syncs",
        ]  # fmt: skip
        limits = {row.name: row.limit for row in rows if row.limit is not None}
        assert limits == {
            "sgd-fused over torch": 0.65,
            "sgd-fused over no scaler": 1.0,
            "sgd-fused host syncs": 0,
        }
        assert _bench_clip.TORCH_LIMITS["adam-fused"] == 0.75
        assert all(row.value > 0 for row in rows[:-1])

    def test_all_ways_come_to_the_same(self):
        found = {}
        for who in ("polyamp", "torch", "alone"):
            problem = _bench_clip.Problem(_bench_clip.OPTIMIZERS["sgd-fused"], [(80, 30), (8,)])
            scale = 1.0 if who == "alone" else _bench_clip.SCALE
            way = _bench_clip.ways(problem, "cpu")[who]
            assert _bench_clip.timed(problem, way, scale)() > 0
            found[who] = problem.optimizer.state[problem.params[0]]["momentum_buffer"]
        torch.testing.assert_close(found["polyamp"], found["torch"])
        torch.testing.assert_close(found["polyamp"], found["alone"])


def numbers(low, high):
    return st.floats(low, high, width=32, allow_nan=False, allow_subnormal=True)


class TestNorm:
    @given(
        st.lists(st.lists(numbers(-(2.0**127), 2.0**127), min_size=1, max_size=5), min_size=1),
        st.sampled_from([0.5, 1.0, 2.0, 3.0, 20.0, INF]),
        st.integers(-60, 60),
    )
    def test_is_right_on_host_and_device(self, rows, order, exponent):
        scale = 2.0**exponent
        grads = [torch.tensor(row) for row in rows]
        part = _norm.Part(grads, torch.tensor(1 / scale, dtype=torch.float64))
        values = [abs(x) for row in rows for x in row]
        top = max(values)
        shares = [(x / top if top else 0.0) for x in values]
        if order == INF:
            want = top / scale
        else:
            want = top * math.fsum(x**order for x in shares) ** (1 / order) / scale
        finite = math.isfinite((torch.tensor(top) * torch.tensor(1 / scale)).item())
        for host in (True, False):
            found = _norm.measure([part], order, torch.device("cpu"), host)
            assert found.finite.item() is finite
            assert found.total.item() == pytest.approx(want, rel=1e-5, abs=0.0)

    @pytest.mark.parametrize("bad", [INF, NAN])
    @pytest.mark.parametrize("order", [1.0, 2.0, 3.0, 6.0, INF])
    @pytest.mark.parametrize("host", [True, False])
    def test_what_is_not_finite_comes_through(self, host, order, bad):
        grads = [torch.ones(3), torch.tensor([1.0, bad])]
        found = _norm.measure(
            [_norm.Part(grads, torch.tensor(0.5))], order, torch.device("cpu"), host
        )
        assert found.finite.item() is False
        assert math.isnan(found.total.item()) if math.isnan(bad) else found.total.item() == INF

    @pytest.mark.parametrize("value", [0.1, 1e-3])
    def test_long_sums_keep_their_digits(self, value):
        """torch's norm of as many is off by some per cent."""
        grads = [torch.full((30_000_000,), value)]
        found = _norm.measure([_norm.Part(grads, torch.ones(()))], 2.0, torch.device("cpu"), True)
        assert found.total.item() == pytest.approx(value * 30_000_000**0.5, rel=1e-4)

    @pytest.mark.parametrize(
        "make",
        [
            lambda t: t,
            lambda t: t.to(memory_format=torch.channels_last),
            lambda t: t.transpose(0, 1),
            lambda t: t[:, ::2],
        ],
        ids=["contiguous", "channels last", "transposed", "with gaps"],
    )
    def test_any_layout(self, make):
        grad = make(torch.randn(4, 6, 3, 5, generator=torch.Generator().manual_seed(0)))
        found = _norm.measure([_norm.Part([grad], torch.ones(()))], 2.0, torch.device("cpu"), True)
        assert found.total.item() == pytest.approx(grad.double().norm().item(), rel=1e-6)

    def test_without_float64(self, monkeypatch):
        monkeypatch.setattr(_norm, "widest", lambda device: torch.float32)
        part = _norm.Part([torch.tensor([3e30, 4e30])], torch.tensor(2.0**-10))
        for order, want in ((1.0, 7e30), (2.0, 5e30), (INF, 4e30)):
            found = _norm.measure([part], order, torch.device("cpu"), False)
            assert found.total.dtype == torch.float32
            assert found.total.item() == pytest.approx(want / 1024, rel=1e-6)

    @pytest.mark.parametrize(
        ("norms", "order", "want"),
        [
            ([3e200, 4e200], 2.0, 5e200),
            ([1e-200, 0.0], 2.0, 1e-200),
            ([1e30, 1e30], 20.0, 1.0353e30),
        ],
    )
    def test_combining_never_leaves_the_range(self, norms, order, want):
        total = _norm.combine(torch.tensor(norms, dtype=torch.float64), order)
        assert total.item() == pytest.approx(want, rel=1e-4, abs=0.0)

    def test_of_nothing(self):
        found = _norm.measure([], 2.0, torch.device("cpu"), True)
        assert (found.total.item(), found.finite.item()) == (0.0, True)
