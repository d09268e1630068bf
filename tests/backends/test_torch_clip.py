"""clip_and_step: right values and overflows."""

from __future__ import annotations

import math

import pytest
import torch
from torch_clip_cases import both_kinds, give, one
from torch_scaler_cases import (
    INF,
    NAN,
    OPTIMIZERS,
    backward,
    parameter,
    same_bits,
)

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")


class TestRightValues:
    @both_kinds
    def test_three_four_five(self, make, kind):
        scaler = make(init_scale=1024.0)
        p, optimizer = one(kind, 1.0, 1.0)
        scaler.scale(loss := (p * torch.tensor([3.0, 4.0])).sum())
        scaler.scale(loss).backward()
        assert p.grad.tolist() == [3072.0, 4096.0]
        norm = scaler.clip_and_step(optimizer, 1.0)
        scaler.update()
        assert (norm.item(), norm.dtype, norm.shape) == (5.0, torch.float32, ())
        assert p.tolist() == pytest.approx([0.4, 0.2], abs=1e-6)
        assert p.grad.tolist() == pytest.approx([0.6, 0.8], abs=1e-6)
        assert (scaler.get_scale(), scaler.applied(optimizer)) == (1024.0, True)

    @both_kinds
    def test_below_the_limit_it_is_step(self, make, kind):
        results = []
        for clipped in (True, False):
            scaler = make(init_scale=3.0, growth_interval=1)
            p, optimizer = one(kind, 1.0, 0.1)
            for _ in range(3):
                backward(scaler, p, 0.3)
                if clipped:
                    scaler.clip_and_step(optimizer, 100.0)
                else:
                    scaler.step(optimizer)
                scaler.update()
            results.append(p.detach())
        torch.testing.assert_close(*results, rtol=1e-7, atol=0.0)

    @both_kinds
    def test_a_norm_of_zero_changes_nothing(self, make, kind):
        scaler = make(init_scale=8.0)
        p, optimizer = one(kind, 1.0, -1.0)
        give(scaler, p, 0.0, 0.0)
        assert scaler.clip_and_step(optimizer, 1.0).item() == 0.0
        scaler.update()
        assert p.tolist() == [1.0, -1.0]
        assert p.grad.tolist() == [0.0, 0.0]
        assert scaler.applied(optimizer)

    @both_kinds
    @pytest.mark.parametrize("size", [1e20, 1e38])
    def test_a_norm_whose_squares_overflow_is_no_overflow(self, make, kind, size):
        scaler = make(init_scale=1.0)
        p, optimizer = one(kind, 0.0, 0.0)
        give(scaler, p, 3 * size, -0.5 * size)
        norm = scaler.clip_and_step(optimizer, 1.0)
        scaler.update()
        assert norm.item() == pytest.approx(math.hypot(3, 0.5) * size, rel=1e-6)
        assert p.tolist() == pytest.approx(
            [-3 / math.hypot(3, 0.5), 0.5 / math.hypot(3, 0.5)], rel=1e-5
        )
        assert (scaler.applied(optimizer), scaler.get_scale()) == (True, 1.0)

    @both_kinds
    def test_a_norm_beyond_float32_is_told_as_inf_and_clipped_all_the_same(self, make, kind):
        scaler = make(init_scale=1.0)
        p, optimizer = one(kind, *[0.0] * 4)
        give(scaler, p, *[3e38] * 4)
        assert scaler.clip_and_step(optimizer, 100.0).item() == INF
        scaler.update()
        assert p.tolist() == pytest.approx([-50.0] * 4, rel=1e-5)
        assert scaler.applied(optimizer)

    @both_kinds
    def test_the_fold_itself_overflows(self, make, kind):
        """scale / coefficient is beyond float32: exact on the host, never NaN on a device."""
        scaler = make(init_scale=1.0)
        p, optimizer = one(kind, *[0.0] * 4)
        give(scaler, p, *[3e38] * 4)
        scaler.clip_and_step(optimizer, 1.0)
        scaler.update()
        want = 0.0 if kind == "fused" and scaler._force_device_mode else -0.5
        assert p.tolist() == pytest.approx([want] * 4, rel=1e-5)
        assert scaler.applied(optimizer)

    @both_kinds
    def test_small_gradients_have_a_true_norm(self, make, kind):
        scaler = make(init_scale=1.0)
        p, optimizer = one(kind, 0.0, 0.0)
        give(scaler, p, 3e-25, 4e-25)
        assert scaler.clip_and_step(optimizer, 1.0).item() == pytest.approx(
            5e-25, rel=1e-5, abs=0.0
        )

    @both_kinds
    def test_max_norm_zero_and_infinite(self, make, kind):
        scaler = make(init_scale=8.0)
        p, optimizer = one(kind, 1.0, 1.0)
        give(scaler, p, 3.0, 4.0)
        assert scaler.clip_and_step(optimizer, 0.0).item() == 5.0
        scaler.update()
        assert p.tolist() == [1.0, 1.0]
        give(scaler, p, 3.0, 4.0)
        assert scaler.clip_and_step(optimizer, INF).item() == 5.0
        scaler.update()
        assert p.tolist() == [-2.0, -3.0]


class TestOverflow:
    @both_kinds
    @pytest.mark.parametrize("bad", [INF, -INF, NAN])
    def test_skips_and_leaves_everything(self, make, kind, bad):
        scaler = make(init_scale=1024.0)
        p, optimizer = one(kind, 1.0, 1.0)
        give(scaler, p, 3.0, bad)
        before = p.grad.clone()
        norm = scaler.clip_and_step(optimizer, 1.0).item()
        scaler.update()
        assert norm == INF if abs(bad) == INF else math.isnan(norm)
        assert p.tolist() == [1.0, 1.0]
        assert torch.equal(p.grad.nan_to_num(), before.nan_to_num())
        assert (scaler.applied(optimizer), scaler.get_scale()) == (False, 512.0)
        give(scaler, p, 3.0, 4.0)
        scaler.clip_and_step(optimizer, INF)
        scaler.update()
        assert p.tolist() == [-2.0, -3.0]

    @both_kinds
    @pytest.mark.parametrize("order", [1.0, 2.0, 3.0, INF])
    def test_is_judged_on_the_unscaled_values(self, make, kind, order):
        scaler = make(init_scale=2.0**-20)
        p, optimizer = one(kind, 1.0, 1.0)
        scaler.scale(torch.ones(()))
        p.grad = torch.tensor([1e33, 1.0])  # 1e39 unscaled
        scaler.clip_and_step(optimizer, 1.0, order)
        scaler.update()
        assert p.tolist() == [1.0, 1.0]
        assert (scaler.applied(optimizer), scaler.get_scale()) == (False, 2.0**-21)

    @both_kinds
    def test_is_judged_even_where_the_norm_is_easy(self, make, kind):
        scaler = make(init_scale=2.0**-70)
        p, optimizer = one(kind, 1.0, 1.0)
        scaler.scale(torch.ones(()))
        p.grad = torch.tensor([1e18, 1.0])  # 1e39 unscaled; its square is within float32
        scaler.clip_and_step(optimizer, 1.0)
        scaler.update()
        assert p.tolist() == [1.0, 1.0]
        assert scaler.applied(optimizer) is False

    @both_kinds
    def test_is_not_what_only_the_norm_of_unscaled_values_does(self, make, kind):
        scaler = make(init_scale=2.0**-20)
        p, optimizer = one(kind, *[0.0] * 4)
        give(scaler, p, *[3e38] * 4)
        scaler.clip_and_step(optimizer, 100.0)
        scaler.update()
        assert p.tolist() == pytest.approx([-50.0] * 4, rel=1e-5)
        assert scaler.applied(optimizer)

    @both_kinds
    def test_found_by_unscale_still_counts(self, make, kind):
        scaler = make(init_scale=8.0)
        p, optimizer = one(kind, 1.0, 1.0)
        give(scaler, p, INF, 4.0)
        scaler.unscale_(optimizer)
        p.grad[0] = 0.0
        scaler.clip_and_step(optimizer, 1.0)
        scaler.update()
        assert (p.tolist(), scaler.get_scale()) == ([1.0, 1.0], 4.0)

    @both_kinds
    def test_made_after_unscale_counts(self, make, kind):
        scaler = make(init_scale=8.0)
        p, optimizer = one(kind, 1.0, 1.0)
        give(scaler, p, 3.0, 4.0)
        scaler.unscale_(optimizer)
        p.grad[0] = NAN
        scaler.clip_and_step(optimizer, 1.0)
        scaler.update()
        assert (p.tolist(), scaler.get_scale()) == ([1.0, 1.0], 4.0)

    def test_on_the_first_step_with_momentum_never_was(self, make):
        results = []
        for trace in ("x..", ".."):
            scaler = make(init_scale=64.0)
            p = parameter(1.0, -2.0)
            optimizer = torch.optim.SGD([p], lr=0.25, momentum=0.9, dampening=0.5, fused=True)
            for symbol in trace:
                backward(scaler, p, 2.0, INF if symbol == "x" else None)
                scaler.clip_and_step(optimizer, 0.5)
                scaler.update()
            results.append([p.detach(), optimizer.state[p]["momentum_buffer"]])
        assert same_bits(*results)

    @both_kinds
    @pytest.mark.parametrize("bad", [INF, NAN])
    def test_error_if_nonfinite_changes_nothing(self, make, kind, bad):
        scaler = make(init_scale=1024.0)
        p, optimizer = one(kind, 1.0, 1.0)
        give(scaler, p, bad, 4.0)
        before = p.grad.clone()
        with pytest.raises(RuntimeError, match=r"not finite.*cannot be clipped.*error_if_nonf"):
            scaler.clip_and_step(optimizer, 1.0, error_if_nonfinite=True)
        assert p.tolist() == [1.0, 1.0]
        assert torch.equal(p.grad.nan_to_num(), before.nan_to_num())
        scaler.clip_and_step(optimizer, 1.0)
        scaler.update()
        assert (scaler.get_scale(), scaler.applied(optimizer)) == (512.0, False)
        give(scaler, p, 3.0, 4.0)
        norm = scaler.clip_and_step(optimizer, INF, error_if_nonfinite=True)
        assert (norm.item(), p.tolist()) == (5.0, [-2.0, -3.0])

    def test_error_if_nonfinite_changes_no_shared_gradient(self, make):
        scaler = make(init_scale=8.0)
        p, q = parameter(1.0), parameter(1.0)
        a, b = OPTIMIZERS["plain"]([p]), OPTIMIZERS["plain"]([p, q])
        give(scaler, p, 3.0)
        q.grad = torch.tensor([INF])
        scaler.unscale_(a)
        with pytest.raises(RuntimeError, match="not finite"):
            scaler.clip_and_step(b, 1.0, error_if_nonfinite=True)
        assert (p.grad.item(), p.item()) == (3.0, 1.0)
