"""The underscore names of GradScaler that others reach into, and its copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch_scaler_cases import INF, NAN, OPTIMIZERS, backward, iterate, parameter

import polyamp.torch as amp

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")


def problem(**kwargs):
    param = parameter(1.0, 2.0)
    return param, OPTIMIZERS["plain"]([param], **kwargs)


class TestUnderscoreNames:
    def test_lazy_tensors(self, make):
        scaler = make(init_scale=4.0)
        assert (scaler._scale, scaler._growth_tracker, scaler._get_scale_async()) == (None,) * 3
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (4.0, 0)
        scaler._init_growth_tracker = 3
        scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
        assert (scaler._scale.dtype, scaler._growth_tracker.dtype) == (torch.float32, torch.int32)
        assert (scaler._scale.shape, scaler._growth_tracker.shape) == ((), ())
        assert (scaler._scale.item(), scaler._growth_tracker.item()) == (4.0, 3)
        assert scaler._get_scale_async() is scaler._scale
        with pytest.raises(AssertionError, match=r"_growth_tracker"):
            scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def test_tensors_follow_the_state(self, make):
        scaler = make(init_scale=4.0, growth_interval=2)
        param, optimizer = problem()
        seen = []
        for symbol in "..x.":
            iterate(scaler, optimizer, param, symbol)
            seen.append((scaler._scale.item(), scaler._growth_tracker.item()))
        assert seen == [(4.0, 1), (8.0, 0), (4.0, 0), (4.0, 1)]

    def test_written_tensors_are_believed(self, make):
        scaler = make(init_scale=4.0, growth_interval=5)
        param, optimizer = problem()
        iterate(scaler, optimizer, param)
        scaler._scale.fill_(32.0)
        scaler._growth_tracker.fill_(4)
        assert scaler.scale(torch.ones(())).item() == 32.0
        iterate(scaler, optimizer, param)
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (64.0, 0)
        scaler._scale = torch.tensor(2.0)
        iterate(scaler, optimizer, param, "x")
        assert scaler.get_scale() == 1.0
        assert param.tolist() == [-1.0, 0.0]

    def test_stages(self, make):
        scaler = make()
        param, optimizer = problem()
        backward(scaler, param)
        states = scaler._per_optimizer_states
        assert states[id(optimizer)]["stage"] is OptState.READY
        scaler.unscale_(optimizer)
        assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
        scaler.step(optimizer)
        assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED
        scaler.update()
        assert len(scaler._per_optimizer_states) == 0
        assert scaler._per_optimizer_states["new"] == _refresh_per_optimizer_state()

    @pytest.mark.parametrize(("bad", "flag"), [(None, 0.0), (INF, 1.0), (-INF, 1.0), (NAN, 1.0)])
    def test_check_inf_leaves_gradients_alone(self, make, bad, flag):
        scaler = make(init_scale=8.0)
        param, optimizer = problem()
        assert scaler._found_inf_per_device(optimizer) == {}
        backward(scaler, param, bad=bad)
        found = scaler._check_inf_per_device(optimizer)
        assert {str(k): v.item() for k, v in found.items()} == {"cpu": flag}
        assert scaler._found_inf_per_device(optimizer) == found
        assert param.grad[1].item() == 8.0

    @pytest.mark.parametrize("where", range(4))
    @pytest.mark.parametrize("bad", [None, INF, NAN])
    def test_unscale_grads_over_dtypes_and_strides(self, make, where, bad):
        base = torch.full((4, 6), 4.0)
        grads = [base.clone(), base.clone()[:, ::2], base.double(), base.half()[:, 1:]]
        if bad is not None:
            grads[where][1, 1] = bad
        params = [torch.empty_like(g) for g in grads]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer = torch.optim.SGD(params, lr=1.0)
        found = make()._unscale_grads_(optimizer, torch.full((1,), 0.25), torch.zeros(1), True)
        assert sum(v.item() for v in found.values()) == (0.0 if bad is None else 1.0)
        if bad is None:
            assert all(torch.equal(g, torch.ones_like(g)) for g in grads)

    @pytest.mark.parametrize("flag", [0.25, 2.0])
    def test_any_positive_flag_is_an_overflow(self, flag):
        class Summed(amp.GradScaler):
            def _unscale_grads_(self, *args):
                return {k: v + flag for k, v in super()._unscale_grads_(*args).items()}

        scaler = Summed("cpu", init_scale=16.0)
        param, optimizer = problem()
        iterate(scaler, optimizer, param)
        assert (param.tolist(), scaler.get_scale()) == ([1.0, 2.0], 8.0)

    def test_overridden_hooks_are_called(self):
        calls = []

        class Sharded(amp.GradScaler):
            def _unscale_grads_(self, *args):
                calls.append("unscale")
                return super()._unscale_grads_(*args)

            def _maybe_opt_step(self, *args, **kwargs):
                calls.append("step")
                return super()._maybe_opt_step(*args, **kwargs)

        param, optimizer = problem()
        iterate(Sharded("cpu"), optimizer, param)
        assert calls == ["unscale", "step"]
        assert param.tolist() == [0.0, 1.0]


class TestCopies:
    COPIES = (lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy)

    @pytest.mark.parametrize("copied", COPIES, ids=["pickle", "deepcopy"])
    @pytest.mark.parametrize("done", ["", ".x."])
    def test_a_copy_goes_on_like_the_original_and_apart_from_it(self, make, copied, done):
        scaler = make(init_scale=3.0, growth_factor=4.0, growth_interval=2)
        param, optimizer = problem(lr=2.0**-10)
        for symbol in done:
            iterate(scaler, optimizer, param, symbol)
        other = copied(scaler)
        assert (type(other), other.state_dict()) == (amp.GradScaler, scaler.state_dict())
        assert other._per_optimizer_states["new"] == _refresh_per_optimizer_state()
        for symbol in ".x..":
            iterate(other, optimizer, param, symbol)
        alone = other.state_dict()
        for symbol in ".x..":
            iterate(scaler, optimizer, param, symbol)
        assert alone == scaler.state_dict()

    @pytest.mark.parametrize("copied", COPIES, ids=["pickle", "deepcopy"])
    def test_not_in_the_middle_of_an_iteration(self, make, copied):
        scaler = make()
        param, optimizer = problem()
        backward(scaler, param)
        scaler.unscale_(optimizer)
        with pytest.raises(AssertionError, match=r"iteration"):
            copied(scaler)
        scaler.step(optimizer)
        scaler.update()
        assert copied(scaler).get_scale() == 65536.0

    @pytest.mark.parametrize("copied", COPIES, ids=["pickle", "deepcopy"])
    def test_disabled(self, make, copied):
        assert not copied(make(enabled=False)).is_enabled()
