"""polyamp.torch.GradScaler under other rules: parameters, faults, portable state, policies."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch_scaler_cases import (
    OPTIMIZERS,
    backward,
    iterate,
    make_scaler,
    mlp,
    parameter,
    scales,
)

import polyamp
import polyamp.torch as amp
from polyamp import Dynamic, Static

both_kinds = pytest.mark.parametrize("kind", OPTIMIZERS)


@pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")
class TestRules:
    @both_kinds
    @pytest.mark.parametrize(
        ("refill", "trace", "expected"),
        [
            ("growth", "xx", [65536.0, 32768.0]),
            ("growth", "x.x", [65536.0, 65536.0, 32768.0]),
            ("clean", "x.x", [65536.0] * 3),
        ],
    )
    def test_hysteresis(self, make, kind, refill, trace, expected):
        rule = Dynamic(hysteresis=2, hysteresis_refill=refill)
        assert scales(make(rule=rule), trace, kind) == expected

    @pytest.mark.parametrize(
        ("tolerance", "expected"),
        [(0.4, [256.0] * 6), (0.0, [256.0, 256.0, 128.0, 128.0, 128.0, 64.0])],
    )
    def test_tolerance(self, make, tolerance, expected):
        rule = Dynamic(init_scale=256.0, growth_interval=3, tolerance=tolerance)
        assert scales(make(rule=rule), "..x..x") == expected

    @pytest.mark.parametrize(
        ("keywords", "trace", "expected"),
        [
            ({"init_scale": 4.0, "min_scale": 1.0}, "xxxx", [2.0, 1.0, 1.0, 1.0]),
            ({"init_scale": 3.0, "min_scale": 2.0}, "xx", [2.0, 2.0]),
            ({"init_scale": 4.0, "max_scale": 8.0, "growth_interval": 1}, "...", [8.0] * 3),
            ({"init_scale": 4.0, "hysteresis": 3}, "xxxx", [4.0, 4.0, 2.0, 1.0]),
        ],
        ids=str,
    )
    def test_keywords(self, make, keywords, trace, expected):
        scaler = make(**keywords)
        assert scales(scaler, trace) == expected
        assert list(scaler.state_dict())[5:] == ["polyamp"]
        assert scaler.rule == Dynamic.like("torch", **keywords)

    def test_a_ceiling_below_the_scale_never_shrinks_it(self, make):
        scaler = make(max_scale=8.0, growth_interval=1, init_scale=8.0)
        scaler.scale(torch.ones(()))
        scaler.update(64.0)
        assert scales(scaler, ".x.") == [64.0, 32.0, 32.0]

    def test_hold(self, make):
        rule = Dynamic(init_scale=3.0, min_scale=2.0, at_floor="hold")
        assert scales(make(rule=rule), "xx") == [3.0, 3.0]

    def test_static(self, make):
        scaler = make(rule=Static(64.0))
        assert scales(scaler, ".x..") == [64.0] * 4
        assert "polyamp" in scaler.state_dict()

    @pytest.mark.parametrize(("name", "scale"), [("megatron", 2.0**32), ("fairseq", 2.0**7)])
    def test_names(self, make, name, scale):
        scaler = make(rule=name)
        assert (scaler.get_scale(), scaler.rule) == (scale, Dynamic.like(name))
        assert (
            scales(scaler, ".xx.")
            == {
                "megatron": [scale, scale, scale / 2, scale / 2],
                "fairseq": [scale, scale / 2, scale / 4, scale / 4],
            }[name]
        )

    @pytest.mark.parametrize("wrong", ["megatorn", 3, Dynamic])
    def test_no_rules(self, wrong):
        with pytest.raises(polyamp.RuleError, match=r"rule|system"):
            amp.GradScaler("cpu", rule=wrong)

    def test_a_rule_and_its_parameters_are_too_much(self):
        with pytest.raises(polyamp.RuleError, match=r"init_scale"):
            amp.GradScaler("cpu", 8.0, rule=Dynamic())

    @both_kinds
    def test_growth_steps_unscale_with_the_scale_that_was_used(self, make, kind):
        scaler = make(init_scale=1024.0, growth_interval=2)
        p = parameter(0.0)
        optimizer = OPTIMIZERS[kind]([p])
        seen = []
        for _ in range(3):
            before = p.item()
            backward(scaler, p, slope=0.5)
            scaler.step(optimizer)
            scaler.update()
            seen.append((before - p.item(), p.grad.item()))
        assert seen == [(0.5, 0.5)] * 3
        assert scaler.get_scale() == 2048.0

    @pytest.mark.parametrize("init", [2.0**16, 1000.0, 3e-3])
    @both_kinds
    def test_scaling_changes_no_update(self, make, init, kind):
        results = []
        for scaler in (make(init_scale=init, growth_interval=2), make(enabled=False)):
            model, gen = mlp(), torch.Generator().manual_seed(0)
            optimizer = OPTIMIZERS[kind](model.parameters())
            for _ in range(4):
                optimizer.zero_grad()
                scaler.scale(model(torch.randn(5, 4, generator=gen)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
            results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")
class TestFaults:
    FLOOR = Dynamic(init_scale=4.0, min_scale=1.0, at_floor="fault")
    SKIPS = Dynamic(init_scale=64.0, max_skips_in_a_row=3)

    @both_kinds
    @pytest.mark.parametrize("rule", [FLOOR, SKIPS], ids=["floor", "skips"])
    def test_raised_on_the_third_overflow(self, kind, rule):
        scaler = make_scaler("host", rule=rule)
        p = parameter(1.0)
        optimizer = OPTIMIZERS[kind]([p])
        for _ in range(2):
            iterate(scaler, optimizer, p, "x")
        low = scaler.get_scale()
        with pytest.raises(polyamp.ScaleFloorError) as caught:
            iterate(scaler, optimizer, p, "x")
        assert (caught.value.skipped_in_a_row, caught.value.loss_scale) == (3, scaler.get_scale())
        assert (low, scaler.get_scale()) == ((1.0, 1.0) if rule is self.FLOOR else (16.0, 8.0))
        assert p.item() == 1.0
        iterate(scaler, optimizer, p)
        assert (p.item(), scaler.applied(optimizer)) == (0.0, True)

    @pytest.mark.parametrize("rule", [FLOOR, SKIPS], ids=["floor", "skips"])
    def test_on_a_device_it_is_raised_when_somebody_looks(self, rule):
        scaler = make_scaler("device", rule=rule)
        p = parameter(1.0)
        optimizer = OPTIMIZERS["fused"]([p])
        for _ in range(3):
            iterate(scaler, optimizer, p, "x")
        iterate(scaler, optimizer, p)
        assert scaler.state.fault != 0
        with pytest.raises(polyamp.ScaleFloorError):
            scaler.check()
        scaler.check()
        assert (p.item(), scaler.state.fault) == (0.0, 0)


class TestWarnings:
    def caught(self, scaler, count):
        p = parameter(0.0)
        optimizer = OPTIMIZERS["plain"]([p])
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(count):
                iterate(scaler, optimizer, p, "x")
        return [(w.category, str(w.message)) for w in seen]

    def test_at_1_10_100_in_a_row(self):
        seen = self.caught(make_scaler("host"), 120)
        assert [category for category, _ in seen] == [polyamp.SkippedStepWarning] * 3
        assert ["10 steps" in seen[1][1], "100 steps" in seen[2][1]] == [True, True]

    def test_again_after_an_applied_step(self):
        scaler = make_scaler("host")
        assert len(self.caught(scaler, 3)) == 1
        p = parameter(0.0)
        iterate(scaler, OPTIMIZERS["plain"]([p]), p)
        assert len(self.caught(scaler, 3)) == 1

    def test_torch_is_silent(self):
        assert self.caught(torch.amp.GradScaler("cpu"), 120) == []


@pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")
class TestSavedState:
    RULES = (
        Dynamic(init_scale=256.0, growth_interval=3),
        Dynamic(init_scale=256.0, growth_interval=3, hysteresis=3),
        Dynamic(init_scale=256.0, growth_interval=3, hysteresis=2, hysteresis_refill="clean"),
        Dynamic(init_scale=256.0, growth_interval=3, tolerance=0.3),
        Dynamic(init_scale=256.0, growth_interval=3, late_first_window=True),
        Dynamic(init_scale=256.0, growth_interval=4, window_follows_scale=True),
        Static(64.0),
    )
    TRACE = "...x..xx.x....xx...x"

    @pytest.mark.parametrize("way", ["state_dict", "to_dict", "copy into a running one"])
    @pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
    def test_saved_after_any_step_it_goes_on_as_if_never_stopped(self, make, rule, way):
        whole = scales(make(rule=rule), self.TRACE)
        for k in range(len(self.TRACE) + 1):
            first = make(rule=rule)
            begun = scales(first, self.TRACE[:k])
            if way == "to_dict":
                text = json.dumps(first.to_dict(), allow_nan=False)
                second = amp.GradScaler.from_dict(json.loads(text), device="cpu")
                second._force_device_mode = first._force_device_mode
            else:
                second = make(rule=rule)
                if way != "state_dict":
                    scales(second, "x.x")
                second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            assert begun + scales(second, self.TRACE[k:]) == whole

    def test_loaded_before_the_first_scale(self, make):
        first = make(hysteresis=2, init_scale=64.0)
        scales(first, "x")
        second = make(hysteresis=2)
        second.load_state_dict(first.state_dict())
        assert second._scale is None
        assert second.state == first.state
        assert scales(second, "xx") == [32.0, 16.0]

    def test_torch_loads_the_six_keys(self, make):
        scaler = make(hysteresis=2, init_scale=64.0, growth_interval=7)
        scales(scaler, "..")
        theirs = torch.amp.GradScaler("cpu")
        theirs.load_state_dict(scaler.state_dict())
        state = scaler.state_dict()
        state.pop("polyamp")
        assert theirs.state_dict() == state
        assert state["_growth_tracker"] == 2

    def test_counters_travel_in_the_portable_form(self, make):
        first = make(init_scale=64.0)
        scales(first, ".x.xx")
        second = amp.GradScaler.from_dict(first.to_dict(), device="cpu")
        assert second.state == first.state
        assert (second.state.step, second.state.skipped, second.state.skipped_in_a_row) == (5, 3, 2)

    def test_a_pickle_keeps_hysteresis_and_memory(self, make):
        import pickle

        first = make(rule=self.RULES[1])
        scales(first, "xx")
        second = pickle.loads(pickle.dumps(first))
        assert second.state == first.state
        assert scales(second, "x") == scales(first, "x") == [128.0]

    @pytest.mark.parametrize("wrong", [{"polyamp": 99}, {"polyamp": True}, {"rule": 1}, None, []])
    def test_from_dict_refuses(self, wrong):
        data = wrong if not isinstance(wrong, dict) else amp.GradScaler("cpu").to_dict() | wrong
        with pytest.raises(polyamp.StateError):
            amp.GradScaler.from_dict(data, device="cpu")


class TestPolicies:
    @pytest.mark.parametrize(
        ("policy", "scale"),
        [("16-mixed", 65536.0), ("bf16-mixed", 1.0), ("32-true", 1.0), ("mixed_bfloat16", 1.0)],
    )
    def test_only_float16_is_scaled_unless_asked(self, make, policy, scale):
        scaler = make(policy=policy)
        assert scaler.get_scale() == scale
        p = parameter(1.0)
        iterate(scaler, OPTIMIZERS["plain"]([p]), p)
        assert p.item() == 0.0

    def test_asked(self, make):
        rule = polyamp.Dynamic(init_scale=32.0)
        assert make(policy="bf16-mixed", rule=rule).get_scale() == 32.0


class TestAutocast:
    def test_region_and_decorator(self):
        left = torch.ones(2, 2)
        with amp.autocast("bf16-mixed", device_type="cpu"):
            assert (left @ left).dtype == torch.bfloat16

        @amp.autocast("16-mixed", device_type="cpu")
        def product():
            return left @ left

        assert product().dtype == torch.float16
        assert (left @ left).dtype == torch.float32

    def test_float32_switches_it_off_inside(self):
        left = torch.ones(2, 2)
        with amp.autocast("bf16-mixed", "cpu"), amp.autocast("32-true", "cpu"):
            assert (left @ left).dtype == torch.float32

    @both_kinds
    def test_with_the_scaler(self, make, kind):
        scaler = make(init_scale=1024.0)
        model = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = OPTIMIZERS[kind](model.parameters())
        with amp.autocast("16-mixed", device_type="cpu"):
            loss = model(torch.full((2, 4), 0.5)).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert model.weight.tolist() == [[-0.5] * 4]
