"""GradScaler where something else is unusual: reused gradients, dtypes, graphs of optimizers."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch_scaler_cases import OPTIMIZERS, HostReads, backward, iterate, make_scaler, parameter

import polyamp
import polyamp.torch

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")
both_kinds = pytest.mark.parametrize("kind", OPTIMIZERS)


class TestReusedGradients:
    @both_kinds
    def test_zeroed_in_place_and_accumulated_again_between_two_steps(self, make, kind):
        scaler, p = make(init_scale=1024.0), parameter(1.0)
        first, second = (OPTIMIZERS[kind]([p], lr=0.125) for _ in range(2))
        one, two = scaler.scale([p.sum(), 2.0 * p.sum()])
        one.backward()
        scaler.step(first)
        first.zero_grad(set_to_none=False)
        two.backward()
        scaler.step(second)
        scaler.update()
        assert p.item() == 1.0 - 0.125 - 0.25

    @both_kinds
    def test_of_two_dtypes(self, make, kind):
        scaler = make(init_scale=1024.0)
        wide, p = parameter(1.0, dtype=torch.float64), parameter(1.0)
        other = parameter(1.0, dtype=torch.float64)
        first = OPTIMIZERS[kind]([p, other, wide], lr=0.125)
        second = OPTIMIZERS["plain"]([wide, p], lr=0.125)
        one, two = scaler.scale([p.sum() + wide.sum() + other.sum(), 2.0 * wide.sum()])
        one.backward()
        scaler.step(first)
        wide.grad.zero_()
        two.backward()
        scaler.step(second)
        assert (p.item(), wide.item(), other.item()) == (0.75, 1.0 - 0.125 - 0.25, 0.875)

    @both_kinds
    def test_clipped_in_place_between_two_unscales(self, make, kind):
        scaler, p = make(init_scale=1024.0), parameter(1.0)
        first, second = (OPTIMIZERS[kind]([p], lr=1.0) for _ in range(2))
        backward(scaler, p, slope=8.0)
        scaler.unscale_(first)
        torch.nn.utils.clip_grad_value_([p], 0.5)
        scaler.step(first)
        scaler.step(second)
        assert p.item() == 0.0

    @both_kinds
    def test_are_not_kept_alive_once_another_optimizer_steps(self, make, kind):
        scaler, p, q = make(), parameter(1.0), parameter(1.0)
        first, second = OPTIMIZERS[kind]([p]), OPTIMIZERS[kind]([q])
        scaler.scale(p.sum() + q.sum()).backward()
        scaler.step(first)
        grad = weakref.ref(p.grad)
        first.zero_grad()
        scaler.step(second)
        gc.collect()
        assert grad() is None

    def test_scale_of_a_list_may_be_updated_before_backward(self, make):
        scaler, p = make(init_scale=4.0), parameter(1.0)
        (loss,) = scaler.scale([p.sum()])
        scaler.update(2.0)
        loss.backward()
        assert p.grad.item() == 4.0


class TestDtypes:
    @both_kinds
    def test_default_dtype_float64(self, make, kind):
        torch.set_default_dtype(torch.float64)
        try:
            scaler, p = make(init_scale=4.0), parameter(1.0, dtype=torch.float32)
            iterate(scaler, OPTIMIZERS[kind]([p]), p)
            assert (p.item(), scaler.get_scale()) == (0.0, 4.0)
        finally:
            torch.set_default_dtype(torch.float32)

    def test_lazily_conjugated_gradients(self, make):
        p = torch.nn.Parameter(torch.tensor([1.0 + 1.0j]))
        scaler, optimizer = make(init_scale=4.0), torch.optim.SGD([p], lr=1.0)
        scaler.scale((p.conj() * (2.0 + 1.0j)).real.sum()).backward()
        scaler.step(optimizer)
        assert p.grad.resolve_conj().tolist() == [2.0 + 1.0j]
        assert p.tolist() == [-1.0 + 0.0j]

    def test_numpy_numbers_as_parameters(self, make):
        numpy = pytest.importorskip("numpy", reason="numpy's scalars are passed in")
        scaler = make(init_scale=numpy.float32(8.0), growth_interval=numpy.int64(1))
        p = parameter(1.0)
        iterate(scaler, OPTIMIZERS["plain"]([p]), p)
        assert scaler.get_scale() == 16.0
        assert type(scaler.rule.growth_interval) is int


class TestReporting:
    def test_one_skip_is_reported_once(self):
        scaler, p = make_scaler("device"), parameter(1.0)
        iterate(scaler, OPTIMIZERS["fused"]([p]), p, "x")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                scaler.get_scale()
        assert [w.category for w in caught] == [polyamp.SkippedStepWarning]
        assert caught[0].filename == __file__

    def test_update_points_at_its_caller(self, make):
        scaler, p = make(), parameter(1.0)
        optimizer = OPTIMIZERS["plain"]([p])
        backward(scaler, p, bad=float("inf"))
        scaler.step(optimizer)
        with pytest.warns(polyamp.SkippedStepWarning) as caught:
            scaler.update()
        assert caught[0].filename == __file__

    def test_reading_the_whole_state_waits_three_times(self):
        scaler, p = make_scaler("device"), parameter(1.0)
        iterate(scaler, OPTIMIZERS["fused"]([p]), p)
        with HostReads() as reads:
            assert scaler.state.step == 1
        assert reads.count <= 3

    def test_a_warning_turned_into_an_error_leaves_the_decision_made(self, make):
        scaler, p = make(init_scale=4.0), parameter(1.0)
        optimizer = OPTIMIZERS["plain"]([p])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(polyamp.SkippedStepWarning):
                iterate(scaler, optimizer, p, "x")
        iterate(scaler, optimizer, p)
        assert (scaler.get_scale(), p.item(), scaler.state.skipped) == (2.0, 0.0, 1)


class TestConfiguration:
    def test_a_disabled_scaler_checks_nothing(self):
        assert make_scaler("host", enabled=False, growth_factor=1.0).is_enabled() is False

    @pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_useless_tensor_is_refused_on_the_host(self, make, bad):
        scaler = make(init_scale=4.0)
        scaler.scale(torch.ones(()))
        with pytest.raises(polyamp.RuleError, match="positive and finite"):
            scaler.update(torch.tensor(bad))
        assert scaler.get_scale() == 4.0

    def test_torchs_keys_win_over_the_sixth(self, make):
        saved = make(rule="megatron").state_dict()
        saved["scale"], saved["_growth_tracker"] = 8.0, 5
        scaler = make()
        scaler.load_state_dict(saved)
        assert (scaler.state.loss_scale, scaler.state.clean, scaler.rule.hysteresis) == (8.0, 5, 2)

    def test_the_users_own_grad_scale_comes_back_after_an_error(self, make):
        scaler, p = make(init_scale=4.0), parameter(1.0)
        optimizer = OPTIMIZERS["fused"]([p])
        backward(scaler, p)
        optimizer.grad_scale = torch.tensor(2.0)
        with pytest.raises(TypeError):
            scaler.step(optimizer, nonsense=1)
        assert optimizer.grad_scale.item() == 2.0
        assert not hasattr(optimizer, "found_inf")

    def test_a_disabled_scaler_saves_as_nothing_and_comes_back_disabled(self):
        saved = make_scaler("host", policy="bf16-mixed").to_dict()
        assert saved == {}
        assert polyamp.torch.GradScaler.from_dict(saved).is_enabled() is False

    def test_the_two_saved_forms_are_told_apart(self, make):
        scaler = make(rule="megatron", hysteresis=None)
        with pytest.raises(polyamp.StateError, match="load_state_dict"):
            polyamp.torch.GradScaler.from_dict(scaler.state_dict())
        other = make()
        other.load_state_dict(scaler.to_dict())
        assert (other.rule, other.state) == (scaler.rule, scaler.state)

    def test_lr_step_needs_our_scaler(self):
        with pytest.raises(polyamp.StateError, match="got str"):
            polyamp.torch.lr_step(None, "scaler")

    @pytest.mark.parametrize("wrong", ["cuda", "O3", "16-true", "O2", "params=float64"])
    def test_autocast_refuses_what_a_region_cannot_do(self, wrong):
        with pytest.raises(polyamp.PolicyError):
            polyamp.torch.autocast(wrong, "cpu")
