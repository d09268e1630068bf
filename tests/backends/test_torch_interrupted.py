"""GradScaler after something went wrong in the middle, or reached past it."""

from __future__ import annotations

import pytest
import torch
from torch_scaler_cases import INF, OPTIMIZERS, backward, iterate, make_scaler, parameter

import polyamp

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")
both_kinds = pytest.mark.parametrize("kind", OPTIMIZERS)


def fail(*args):
    raise RuntimeError("a hook")


class TestAnErrorInTheOptimizer:
    @both_kinds
    @pytest.mark.parametrize("explicit", [True, False])
    def test_the_next_batch_is_unscaled(self, make, kind, explicit):
        scaler, p = make(init_scale=1024.0), parameter(1.0)
        optimizer = OPTIMIZERS[kind]([p], lr=0.5)
        hook = optimizer.register_step_pre_hook(fail)
        backward(scaler, p)
        if explicit:
            scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="a hook"):
            scaler.step(optimizer)
        hook.remove()
        backward(scaler, p)
        scaler.step(optimizer)
        scaler.update()
        assert p.item() == 0.5

    @both_kinds
    def test_the_next_bad_batch_is_skipped(self, make, kind):
        scaler, p = make(init_scale=1024.0), parameter(1.0)
        optimizer = OPTIMIZERS[kind]([p])
        hook = optimizer.register_step_pre_hook(fail)
        backward(scaler, p)
        with pytest.raises(RuntimeError, match="a hook"):
            scaler.step(optimizer)
        hook.remove()
        backward(scaler, p, bad=INF)
        scaler.step(optimizer)
        scaler.update()
        assert (p.item(), scaler.get_scale()) == (1.0, 512.0)

    @both_kinds
    def test_the_same_batch_can_be_stepped_again(self, make, kind):
        scaler, p = make(init_scale=1024.0), parameter(1.0)
        optimizer = OPTIMIZERS[kind]([p], lr=0.5)
        hook = optimizer.register_step_pre_hook(fail)
        backward(scaler, p)
        with pytest.raises(RuntimeError, match="a hook"):
            scaler.step(optimizer)
        hook.remove()
        scaler.step(optimizer)
        assert p.item() == 0.5


class TestARefusedGradient:
    def test_leaves_the_others_alone(self, make):
        scaler, p = make(init_scale=4.0), parameter(1.0)
        odd = torch.nn.Parameter(torch.ones(2).to(torch.float8_e5m2), requires_grad=False)
        odd.grad = torch.ones(2).to(torch.float8_e5m2)
        optimizer = torch.optim.SGD([p, odd], lr=0.5)
        backward(scaler, p)
        for _ in range(2):
            with pytest.raises(ValueError, match="float8_e5m2"):
                scaler.step(optimizer)
        odd.grad = None
        scaler.step(optimizer)
        assert p.item() == 0.5

    def test_a_retry_does_not_divide_twice(self, make):
        scaler, p, q = (
            make(init_scale=4.0),
            parameter(1.0),
            parameter(1.0, 1.0, dtype=torch.float64),
        )
        optimizer = torch.optim.SGD([p, q], lr=0.5)
        backward(scaler, p)
        q.grad = torch.ones(1, dtype=torch.float64).expand(2)
        with pytest.raises(RuntimeError):
            scaler.step(optimizer)
        q.grad = None
        scaler.step(optimizer)
        assert p.item() == 0.5

    def test_refused_outputs_forget_nothing(self, make):
        scaler, p = make(init_scale=4.0), parameter(1.0)
        first, second = (torch.optim.SGD([p], lr=0.25) for _ in range(2))
        backward(scaler, p)
        scaler.step(first)
        with pytest.raises(ValueError, match="float"):
            scaler.scale(3.0)
        scaler.step(second)
        assert p.item() == 0.5


class TestReachingPast:
    def test_writes_that_no_version_counts_are_seen(self, make):
        scaler, p = make(init_scale=1024.0), parameter(1.0)
        iterate(scaler, OPTIMIZERS["plain"]([p]), p)
        scaler._scale.data.fill_(8.0)
        assert (scaler.state.loss_scale, scaler.state_dict()["scale"]) == (8.0, 8.0)
        iterate(scaler, OPTIMIZERS["plain"]([p]), p, "x")
        assert scaler.get_scale() == 4.0

    @both_kinds
    def test_inference_mode(self, make, kind):
        scaler, p = make(init_scale=4.0), parameter(1.0)
        optimizer = OPTIMIZERS[kind]([p], lr=0.25)
        with torch.inference_mode():
            scaler.scale(torch.ones(()))
            p.grad = torch.full((1,), 4.0)
            scaler.step(optimizer)
            scaler.update()
        iterate(scaler, optimizer, p)
        assert (p.item(), scaler.state.step) == (0.5, 2)

    def test_an_optimizer_that_takes_no_weak_reference(self, make):
        class Slim:
            __slots__ = ("inner",)
            __hash__ = None

            def __init__(self, inner):
                self.inner = inner

            def __eq__(self, other):
                return self is other

            @property
            def param_groups(self):
                return self.inner.param_groups

            def step(self):
                return self.inner.step()

        scaler, p = make(init_scale=4.0), parameter(1.0)
        optimizer = Slim(torch.optim.SGD([p], lr=0.5))
        iterate(scaler, optimizer, p)
        assert (p.item(), scaler.applied(optimizer)) == (0.5, True)

    def test_a_default_given_by_hand_is_given(self):
        with pytest.raises(polyamp.RuleError, match="init_scale"):
            make_scaler("host", rule="megatron", init_scale=2.0**16)


class TestLoadingInTheMiddle:
    def test_the_first_skip_after_it_is_warned_of(self, make):
        scaler, p = make(), parameter(1.0)
        optimizer, saved = OPTIMIZERS["plain"]([p]), make().state_dict()
        for _ in range(2):
            with pytest.warns(polyamp.SkippedStepWarning, match="a step was skipped"):
                iterate(scaler, optimizer, p, "x")
            scaler.load_state_dict(saved)

    @pytest.mark.parametrize("tracker", [-1, -5, 1.5, True, "3"])
    def test_a_count_no_rule_gives_is_refused(self, make, tracker):
        with pytest.raises(polyamp.StateError, match="_growth_tracker"):
            make().load_state_dict(make().state_dict() | {"_growth_tracker": tracker})

    def test_skips_nobody_was_told_of_are_told_at_the_next_look(self):
        scaler, p = make_scaler("device"), parameter(1.0)
        optimizer = OPTIMIZERS["fused"]([p])
        for _ in range(11):
            iterate(scaler, optimizer, p, "x")
        with pytest.warns(polyamp.SkippedStepWarning, match="11 steps were skipped"):
            scaler.check()
