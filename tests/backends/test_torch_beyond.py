"""What torch.amp.GradScaler gets wrong and polyamp.torch.GradScaler right.

Where it is cheap, a `test_torch_...` beside the test shows the fault in torch's own class.
"""

from __future__ import annotations

import collections
from functools import partial

import pytest
import torch
from torch_scaler_cases import (
    INF,
    NAN,
    OPTIMIZERS,
    backward,
    iterate,
    parameter,
)

import polyamp

both_kinds = pytest.mark.parametrize("kind", OPTIMIZERS)
pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")


def torch_scaler(**kwargs):
    return torch.amp.GradScaler("cpu", **kwargs)


class TestTheScaleNeverReachesZero:
    def after_400_overflows(self, scaler, kind):
        p = parameter(1.0, 1.0)
        optimizer = OPTIMIZERS[kind]([p], lr=2.0**-10)
        for _ in range(400):
            iterate(scaler, optimizer, p, "x")
        low = scaler.get_scale()
        iterate(scaler, optimizer, p)
        return low, p.tolist()

    @both_kinds
    def test_after_400_overflows_one_good_step_is_finite(self, make, kind):
        low, values = self.after_400_overflows(make(), kind)
        assert low == 2.0**-126
        assert values == [1.0 - 2.0**-10] * 2

    @both_kinds
    def test_torch_collapses(self, kind):
        low, values = self.after_400_overflows(torch_scaler(), kind)
        assert low == 0.0
        assert all(v != v for v in values)

    @pytest.mark.parametrize("lazy", [True, False])
    def test_a_collapsed_checkpoint_is_lifted_with_a_warning(self, make, lazy):
        scaler = make()
        if not lazy:
            scaler.scale(torch.ones(()))
        with pytest.warns(UserWarning, match=r"0"):
            scaler.load_state_dict(torch_scaler().state_dict() | {"scale": 0.0})
        assert scaler.get_scale() == 2.0**-126
        p = parameter(1.0)
        iterate(scaler, OPTIMIZERS["plain"]([p]), p)
        assert p.item() == 0.0

    def test_torch_stays_at_a_loaded_zero(self):
        scaler = torch_scaler(growth_interval=1)
        scaler.load_state_dict(scaler.state_dict() | {"scale": 0.0})
        p = parameter(1.0)
        iterate(scaler, OPTIMIZERS["plain"]([p]), p)
        assert (scaler.get_scale(), p.isnan().item()) == (0.0, True)

    @pytest.mark.parametrize("new", [0.0, -1.0, NAN, INF])
    def test_update_takes_no_useless_scale(self, make, new):
        scaler = make(init_scale=16.0)
        scaler.scale(torch.ones(()))
        with pytest.raises((ValueError, polyamp.PolyampError)):
            scaler.update(new)
        assert scaler.get_scale() == 16.0

    @pytest.mark.parametrize("new", [0.0, -1.0, NAN, INF])
    def test_torch_takes_any_scale(self, new):
        scaler = torch_scaler()
        scaler.scale(torch.ones(()))
        scaler.update(new)
        assert not 0.0 < scaler.get_scale() < INF

    def test_update_takes_whole_numbers_and_one_element_tensors(self, make):
        scaler = make()
        scaler.scale(torch.ones(()))
        scaler.update(4)
        assert scaler.get_scale() == 4.0
        scaler.update(torch.tensor([8.0]))
        assert scaler.get_scale() == 8.0

    @pytest.mark.parametrize("new", [1.0, torch.tensor(1.0), 1e-42])
    def test_update_lifts_to_the_floor(self, make, new):
        scaler = make(min_scale=4.0)
        scaler.scale(torch.ones(()))
        scaler.update(new)
        assert scaler.get_scale() == 4.0

    def test_torch_takes_neither(self):
        scaler = torch_scaler()
        scaler.scale(torch.ones(()))
        with pytest.raises(AttributeError):
            scaler.update(4)
        with pytest.raises(RuntimeError, match=r"shape"):
            scaler.update(torch.tensor([8.0]))


class TestOverflowIsJudgedAfterUnscaling:
    def small_scale(self, scaler, kind, explicit):
        p = parameter(1.0, 1.0)
        optimizer = OPTIMIZERS[kind]([p])
        scaler.scale(p.sum()).backward()
        p.grad.fill_(1e35)
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return p.tolist(), scaler.get_scale()

    @both_kinds
    @pytest.mark.parametrize("explicit", [True, False])
    def test_scaled_1e35_at_scale_1e_6_is_skipped(self, make, kind, explicit):
        values, scale = self.small_scale(make(init_scale=1e-6), kind, explicit)
        assert values == [1.0, 1.0]
        assert scale == pytest.approx(5e-7, rel=1e-6)

    @both_kinds
    def test_torch_applies_it(self, kind):
        values, scale = self.small_scale(torch_scaler(init_scale=1e-6), kind, False)
        assert values == [-INF, -INF]
        assert scale == pytest.approx(1e-6, rel=1e-6)

    @both_kinds
    @pytest.mark.parametrize("values", [(3e38, 3e38), (3e38, -3e38), (-3e38, 1e-38)])
    def test_large_but_finite_is_no_overflow(self, make, kind, values):
        scaler = make(init_scale=1.0)
        p = parameter(0.0, 0.0)
        optimizer = OPTIMIZERS[kind]([p], lr=2.0**-126)
        scaler.scale(p.sum()).backward()
        p.grad = torch.tensor(values)
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale(), scaler.applied(optimizer)) == (1.0, True)
        assert p.tolist() == pytest.approx([-v * 2.0**-126 for v in values], rel=1e-6)

    @both_kinds
    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    @pytest.mark.parametrize("where", [0, 131_071, 262_143])
    def test_one_bad_entry_in_a_large_array(self, make, kind, bad, where):
        scaler = make(init_scale=4.0)
        p = torch.nn.Parameter(torch.ones(512, 512))
        optimizer = OPTIMIZERS[kind]([p])
        backward(scaler, p)
        p.grad.view(-1)[where] = bad
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.applied(optimizer), scaler.get_scale()) == (False, 2.0)
        assert torch.equal(p, torch.ones(512, 512))


class TestErrorsLeaveEverythingUsable:
    def failing(self, kind):
        fused = kind == "fused"

        class Fails(torch.optim.SGD):
            broken = True

            def step(self, closure=None):
                if self.broken:
                    raise KeyError("out of order")
                return super().step(closure)

        p = parameter(1.0)
        return p, Fails([p], lr=1.0, fused=fused)

    @both_kinds
    def test_after_an_error_inside_the_optimizer(self, make, kind):
        scaler = make(init_scale=8.0, growth_interval=1)
        p, optimizer = self.failing(kind)
        backward(scaler, p)
        with pytest.raises(KeyError):
            scaler.step(optimizer)
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
        optimizer.broken = False
        scaler.step(optimizer)
        scaler.update()
        assert (p.item(), scaler.get_scale()) == (0.0, 16.0)

    def test_torch_leaves_its_attributes_behind(self):
        scaler = torch_scaler(init_scale=8.0)
        p, optimizer = self.failing("fused")
        backward(scaler, p)
        with pytest.raises(KeyError):
            scaler.step(optimizer)
        optimizer.broken = False
        scaler.step(optimizer)
        assert p.item() != 0.0

    BAD = (
        {"scale": NAN},
        {"scale": INF},
        {"scale": -1.0},
        {"scale": True},
        {"scale": "8"},
        {"growth_factor": 0.5},
        {"backoff_factor": NAN},
        {"growth_interval": "3"},
        {"_growth_tracker": NAN},
        {"_growth_tracker": None},
    )

    @pytest.mark.parametrize("wrong", BAD, ids=str)
    @pytest.mark.parametrize("lazy", [True, False])
    def test_a_bad_checkpoint_changes_nothing(self, make, wrong, lazy):
        scaler = make(init_scale=8.0, growth_interval=5)
        if not lazy:
            scaler.scale(torch.ones(()))
        before = scaler.state_dict()
        with pytest.raises((polyamp.StateError, polyamp.RuleError), match=next(iter(wrong))):
            scaler.load_state_dict(torch_scaler().state_dict() | wrong)
        assert scaler.state_dict() == before

    @pytest.mark.parametrize("missing", ["scale", "backoff_factor", "_growth_tracker"])
    def test_a_missing_key_changes_nothing(self, make, missing):
        scaler = make(init_scale=8.0)
        state = torch_scaler(growth_factor=4.0).state_dict()
        del state[missing]
        before = scaler.state_dict()
        with pytest.raises((polyamp.StateError, KeyError), match=missing):
            scaler.load_state_dict(state)
        assert scaler.state_dict() == before

    def test_torch_is_half_changed_by_a_missing_key(self):
        scaler = torch_scaler(init_scale=8.0)
        state = torch_scaler().state_dict()
        del state["_growth_tracker"]
        with pytest.raises(KeyError):
            scaler.load_state_dict(state)
        assert scaler.get_scale() == 65536.0


class TestOutputs:
    def test_a_dict_is_scaled_as_a_dict(self, make):
        one = torch.ones(1)
        outputs = {"loss": one, "parts": [one, {"deep": one}]}
        got = make(init_scale=4.0).scale(outputs)
        assert type(got) is dict
        assert list(got) == ["loss", "parts"]
        assert (got["loss"].item(), got["parts"][0].item()) == (4.0, 4.0)
        assert got["parts"][1]["deep"].item() == 4.0
        assert outputs["loss"].item() == 1.0

    def test_other_mappings_keep_their_type(self, make):
        scaler = make(init_scale=4.0)
        for kind in (collections.OrderedDict, partial(collections.defaultdict, list)):
            outputs = kind({"b": torch.ones(()), "a": torch.ones(())})
            got = scaler.scale(outputs)
            assert (type(got), list(got)) == (type(outputs), ["b", "a"])
            assert got["a"].item() == 4.0

    def test_torch_loses_the_tensors(self):
        got = torch_scaler().scale({"loss": torch.ones(1)})
        assert not isinstance(got, dict)
        assert not any(isinstance(leaf, torch.Tensor) for leaf in got)

    def test_a_named_tuple_stays_one(self, make):
        pair = collections.namedtuple("pair", "left right")
        got = make(init_scale=4.0).scale(pair(torch.ones(()), [torch.ones(())]))
        assert (type(got), got.left.item(), got.right[0].item()) == (pair, 4.0, 4.0)
        with pytest.raises(TypeError):
            torch_scaler().scale(pair(torch.ones(()), torch.ones(())))

    @pytest.mark.parametrize("shape", [(), (1,), (3,)])
    def test_a_float16_loss_stays_finite(self, make, shape):
        loss = torch.full(shape, 2.0, dtype=torch.float16, requires_grad=True)
        scaled = make().scale(loss)
        assert scaled.flatten().tolist() == [131072.0] * max(loss.numel(), 1)
        weight = torch.full(shape, 2.0, requires_grad=True)
        make(init_scale=2.0**14).scale(weight.half()).sum().backward()
        assert weight.grad.flatten().tolist() == [2.0**14] * max(weight.numel(), 1)

    def test_torch_overflows_in_one_dimension(self):
        assert torch_scaler().scale(torch.full((1,), 2.0, dtype=torch.float16)).item() == INF


class TestGrowthInterval:
    def lowered(self, scaler):
        p = parameter(0.0)
        optimizer = OPTIMIZERS["plain"]([p], lr=2.0**-20)
        for _ in range(5):
            iterate(scaler, optimizer, p)
        scaler.set_growth_interval(3)
        out = []
        for _ in range(4):
            iterate(scaler, optimizer, p)
            out.append(scaler.get_scale())
        return out

    def test_lowered_below_the_count_still_grows(self, make):
        scaler = make(init_scale=8.0, growth_interval=10)
        assert self.lowered(scaler) == [16.0, 16.0, 16.0, 32.0]

    def test_torch_never_grows_again(self):
        assert self.lowered(torch_scaler(init_scale=8.0, growth_interval=10)) == [8.0] * 4
