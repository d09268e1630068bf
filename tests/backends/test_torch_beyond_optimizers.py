"""What torch.amp.GradScaler gets wrong with optimizers, and polyamp.torch.GradScaler right."""

from __future__ import annotations

import pytest
import torch
from torch_scaler_cases import (
    INF,
    NAN,
    OPTIMIZERS,
    HostReads,
    backward,
    iterate,
    make_scaler,
    parameter,
    same_bits,
)

import polyamp
import polyamp.torch as amp

both_kinds = pytest.mark.parametrize("kind", OPTIMIZERS)
pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")


def torch_scaler(**kwargs):
    return torch.amp.GradScaler("cpu", **kwargs)


class TestSharedParameters:
    def shared(self, scaler, first, second, explicit=False):
        p = parameter(1.0)
        a, b = OPTIMIZERS[first]([p]), OPTIMIZERS[second]([p])
        for _ in range(2):
            backward(scaler, p)
            if explicit:
                scaler.unscale_(a)
                scaler.unscale_(b)
            scaler.step(a)
            scaler.step(b)
            scaler.update()
        return p.item()

    @pytest.mark.parametrize("explicit", [True, False])
    @pytest.mark.parametrize("first", OPTIMIZERS)
    @pytest.mark.parametrize("second", OPTIMIZERS)
    def test_are_unscaled_once(self, make, first, second, explicit):
        scaler = make(init_scale=1024.0, growth_interval=1)
        assert self.shared(scaler, first, second, explicit) == -3.0

    @both_kinds
    def test_torch_unscales_them_twice(self, kind):
        assert self.shared(torch_scaler(init_scale=1024.0), kind, kind) != -3.0

    def test_the_overflow_counts_for_both(self, make):
        scaler = make(init_scale=1024.0)
        p = parameter(1.0)
        a, b = OPTIMIZERS["plain"]([p]), OPTIMIZERS["plain"]([p])
        backward(scaler, p, bad=INF)
        scaler.step(a)
        scaler.step(b)
        scaler.update()
        assert (p.item(), scaler.get_scale()) == (1.0, 512.0)
        assert (scaler.applied(a), scaler.applied(b)) == (False, False)


class TestClosures:
    @both_kinds
    def test_a_positional_closure_is_refused_unrun(self, make, kind):
        scaler, calls = make(init_scale=8.0), []
        p = parameter(1.0)
        optimizer = OPTIMIZERS[kind]([p])
        backward(scaler, p)
        with pytest.raises(RuntimeError, match=r"[Cc]losure"):
            scaler.step(optimizer, lambda: calls.append(1))
        assert (calls, p.item(), p.grad.item()) == ([], 1.0, 8.0)
        scaler.step(optimizer)
        scaler.update()
        assert p.item() == 0.0

    def test_torch_applies_the_scaled_gradients_of_the_closure(self):
        scaler = torch_scaler(init_scale=8.0)
        p = parameter(1.0)
        backward(scaler, p)
        scaler.step(OPTIMIZERS["plain"]([p]), lambda: backward(scaler, p))
        assert p.item() == -7.0


class TestFusedMomentum:
    OPTIONS = ({"dampening": 0.5}, {"nesterov": True}, {})

    def run(self, scaler, trace, options):
        p = parameter(1.0, -2.0)
        optimizer = torch.optim.SGD([p], lr=0.25, momentum=0.9, fused=True, **options)
        for step, symbol in enumerate(trace):
            iterate(scaler, optimizer, p, symbol, slope=1.0 + step)
        return [p.detach(), optimizer.state[p]["momentum_buffer"]]

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    @pytest.mark.parametrize("skips", ["x", "n", "xx"])
    def test_an_overflow_on_the_first_step_never_was(self, make, options, skips):
        scaler = make(init_scale=64.0)
        quiet = torch.amp.GradScaler("cpu", enabled=False)
        got = self.run(scaler, skips + "...x.", options)
        p = parameter(1.0, -2.0)
        optimizer = torch.optim.SGD([p], lr=0.25, momentum=0.9, fused=True, **options)
        for step in (0, 1, 2, 4):
            iterate(quiet, optimizer, p, slope=1.0 + step + len(skips))
        assert same_bits(got, [p.detach(), optimizer.state[p]["momentum_buffer"]])

    def test_a_momentum_loaded_from_a_checkpoint_is_kept(self, make):
        p, q = parameter(1.0), parameter(1.0)
        first = torch.optim.SGD([p], lr=0.25, momentum=0.5, fused=True)
        iterate(make(init_scale=64.0), first, p)
        second = torch.optim.SGD([q], lr=0.25, momentum=0.5, fused=True)
        second.load_state_dict(first.state_dict())
        scaler = make(init_scale=64.0)
        iterate(scaler, second, q, "x")
        iterate(scaler, second, q)
        assert second.state[q]["momentum_buffer"].item() == 1.5

    def test_torch_starts_from_memory_it_never_wrote(self):
        scaler = torch_scaler(init_scale=64.0)
        p = parameter(1.0)
        optimizer = torch.optim.SGD([p], lr=0.25, momentum=0.9, dampening=0.5, fused=True)
        iterate(scaler, optimizer, p, "x")
        assert "momentum_buffer" in optimizer.state[p]
        iterate(scaler, optimizer, p)
        assert optimizer.state[p]["momentum_buffer"].item() != 1.0


class TestComplex:
    @pytest.mark.parametrize("bad", [None, complex(0, INF), complex(NAN, 0)])
    def test_gradients(self, make, bad):
        scaler = make(init_scale=8.0)
        p = parameter(1 + 1j, 2.0)
        optimizer = OPTIMIZERS["plain"]([p])
        scaler.scale((p.real * 3 + p.imag * 4).sum()).backward()
        if bad is not None:
            p.grad[1] = bad
        scaler.step(optimizer)
        scaler.update()
        assert p.tolist() == ([-2 - 3j, -1 - 4j] if bad is None else [1 + 1j, 2.0])
        assert scaler.get_scale() == (8.0 if bad is None else 4.0)

    def test_torch_has_no_kernel_for_them_on_a_cpu(self):
        scaler = torch_scaler()
        p = parameter(1 + 1j)
        scaler.scale(p.real.sum()).backward()
        with pytest.raises(NotImplementedError):
            scaler.step(OPTIMIZERS["plain"]([p]))


class TestAppliedOrSkipped:
    @both_kinds
    def test_each_optimizer_knows(self, make, kind):
        scaler = make(init_scale=16.0)
        a, b = parameter(0.0), parameter(0.0)
        opt_a, opt_b = OPTIMIZERS[kind]([a]), OPTIMIZERS[kind]([b])
        seen = []
        for bad_a, bad_b in ((None, None), (None, INF), (NAN, None), (None, None)):
            backward(scaler, a, bad=bad_a)
            backward(scaler, b, bad=bad_b)
            scaler.step(opt_a)
            scaler.step(opt_b)
            scaler.update()
            seen.append((scaler.applied(opt_a), scaler.applied(opt_b)))
        assert seen == [(True, True), (True, False), (False, True), (True, True)]
        assert (a.item(), b.item(), scaler.get_scale()) == (-3.0, -3.0, 4.0)

    def test_of_an_optimizer_never_stepped(self, make):
        with pytest.raises(polyamp.StateError, match=r"step"):
            make().applied(OPTIMIZERS["plain"]([parameter(0.0)]))

    def test_of_an_optimizer_that_scales_itself_the_old_way(self, make):
        class Old(torch.optim.SGD):
            _step_supports_amp_scaling = True

            def step(self, closure=None, *, grad_scaler=None):
                grad_scaler.unscale_(self)
                if not any(f.item() for f in grad_scaler._found_inf_per_device(self).values()):
                    super().step()

        scaler = make(init_scale=16.0)
        p = parameter(0.0)
        optimizer, seen = Old([p], lr=1.0), []
        for bad in (None, INF):
            backward(scaler, p, bad=bad)
            with pytest.warns(FutureWarning, match=r"grad_scale"):
                scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.applied(optimizer))
        assert (seen, p.item(), scaler.get_scale()) == ([True, False], -1.0, 8.0)

    def test_where_a_subclass_steps_in_its_own_way(self):
        class Own(amp.GradScaler):
            def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
                if not any(f.item() for f in optimizer_state["found_inf_per_device"].values()):
                    return optimizer.step(*args, **kwargs)
                return None

        scaler = Own("cpu")
        p = parameter(0.0)
        optimizer = OPTIMIZERS["plain"]([p])
        seen = []
        for symbol in ".x.":
            iterate(scaler, optimizer, p, symbol)
            seen.append(scaler.applied(optimizer))
        assert seen == [True, False, True]

    def test_disabled_always_applies(self, make):
        scaler = make(enabled=False)
        p = parameter(0.0)
        optimizer = OPTIMIZERS["plain"]([p])
        iterate(scaler, optimizer, p, "x")
        assert scaler.applied(optimizer) is True

    @both_kinds
    def test_last_decision(self, make, kind):
        scaler = make(init_scale=16.0, growth_interval=2)
        p = parameter(0.0)
        optimizer = OPTIMIZERS[kind]([p])
        assert scaler.last_decision is None
        rows = []
        for symbol in "..x.":
            iterate(scaler, optimizer, p, symbol)
            used, applied, after, reason = scaler.last_decision
            rows.append((float(used), bool(applied), float(after), int(reason)))
        assert rows == [
            (16.0, True, 16.0, polyamp.Reason.CLEAN),
            (16.0, True, 32.0, polyamp.Reason.GREW),
            (32.0, False, 16.0, polyamp.Reason.OVERFLOW),
            (16.0, True, 16.0, polyamp.Reason.CLEAN),
        ]

    @both_kinds
    def test_state_counts(self, make, kind):
        scaler = make(init_scale=16.0)
        p = parameter(0.0)
        optimizer = OPTIMIZERS[kind]([p])
        for symbol in ".xx.xxx":
            iterate(scaler, optimizer, p, symbol)
        state = scaler.state
        assert (state.step, state.skipped, state.skipped_in_a_row) == (7, 5, 3)
        assert (state.loss_scale, state.clean, state.fault) == (0.5, 0, 0)


class TestHostReads:
    """On a device nothing waits for the host; forced here on CPU tensors."""

    MAKERS = {  # noqa: RUF012
        "sgd": (lambda p: torch.optim.SGD(p, lr=1.0), 1),
        "sgd-foreach": (lambda p: torch.optim.SGD(p, lr=1.0, foreach=True), 1),
        "sgd-fused": (lambda p: torch.optim.SGD(p, lr=1.0, fused=True), 0),
        "sgd-fused-momentum": (lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, fused=True), 0),
        "adam-fused": (lambda p: torch.optim.Adam(p, lr=1.0, fused=True), 0),
    }

    @pytest.mark.parametrize("name", MAKERS)
    @pytest.mark.parametrize("symbol", [".", "x"])
    def test_per_iteration(self, name, symbol):
        build, allowed = self.MAKERS[name]
        scaler = make_scaler("device", init_scale=16.0, growth_interval=1)
        p = parameter(0.0, 0.0)
        optimizer = build([p])
        iterate(scaler, optimizer, p)
        for _ in range(2):
            with HostReads() as reads:
                iterate(scaler, optimizer, p, symbol)
            assert reads.count <= allowed
        assert scaler.get_scale() == (128.0 if symbol == "." else 8.0)

    @both_kinds
    def test_asking_costs_at_most_the_one_wait_of_the_step(self, kind):
        scaler = make_scaler("device", init_scale=16.0)
        p = parameter(0.0)
        optimizer = OPTIMIZERS[kind]([p])
        with HostReads() as reads:
            iterate(scaler, optimizer, p)
            answers = {scaler.applied(optimizer), scaler.applied(optimizer)}
        assert (answers, reads.count) == ({True}, 1)

    def test_the_count_sees_a_read(self):
        with HostReads() as reads:
            torch.ones(()).item()
            bool(torch.ones(()) > 0)
        assert reads.count == 2


class TestStepAll:
    def two(self, kind):
        a, b = parameter(0.0), parameter(0.0)
        return (a, b), [OPTIMIZERS[kind]([a]), OPTIMIZERS["plain"]([b])]

    @both_kinds
    @pytest.mark.parametrize("bad", [(INF, None), (None, NAN)])
    def test_both_skip(self, make, kind, bad):
        scaler = make(init_scale=16.0)
        (a, b), optimizers = self.two(kind)
        for spoilt in (bad, (None, None)):
            backward(scaler, a, bad=spoilt[0])
            backward(scaler, b, bad=spoilt[1])
            scaler.step_all(optimizers)
            scaler.update()
            applied = [scaler.applied(o) for o in optimizers]
            assert applied == [spoilt == (None, None)] * 2
        assert (a.item(), b.item(), scaler.get_scale()) == (-1.0, -1.0, 8.0)

    @both_kinds
    def test_step_alone_does_as_torch(self, make, kind):
        rows = []
        for scaler in (make(init_scale=16.0), torch_scaler(init_scale=16.0)):
            (a, b), optimizers = self.two(kind)
            backward(scaler, a)
            backward(scaler, b, bad=INF)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            rows.append((a.item(), b.item(), scaler.get_scale()))
        assert rows == [(-1.0, 0.0, 8.0)] * 2

    def test_after_unscale_and_before_step(self, make):
        scaler = make(init_scale=16.0)
        (a, b), optimizers = self.two("fused")
        backward(scaler, a, slope=3.0)
        backward(scaler, b, slope=5.0)
        scaler.unscale_(optimizers[0])
        scaler.step_all(optimizers)
        assert (a.item(), b.item()) == (-3.0, -5.0)
        with pytest.raises(RuntimeError, match=r"step"):
            scaler.step(optimizers[1])
        with pytest.raises(RuntimeError, match=r"step"):
            scaler.step_all(optimizers)
        scaler.update()
        assert scaler.get_scale() == 16.0

    def test_one_already_stepped_stops_all(self, make):
        scaler = make(init_scale=16.0)
        (a, b), optimizers = self.two("plain")
        backward(scaler, a)
        backward(scaler, b)
        scaler.step(optimizers[1])
        with pytest.raises(RuntimeError, match=r"step"):
            scaler.step_all(optimizers)
        assert (a.item(), b.item()) == (0.0, -1.0)

    def test_disabled(self, make):
        scaler = make(enabled=False)
        (a, b), optimizers = self.two("plain")
        backward(scaler, a)
        backward(scaler, b)
        scaler.step_all(optimizers)
        assert (a.item(), b.item()) == (-1.0, -1.0)


class TestLearningRate:
    def halved(self, scaler, trace, advance, kind="plain"):
        p = parameter(0.0)
        optimizer = OPTIMIZERS[kind]([p])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        stepped = []
        for symbol in trace:
            iterate(scaler, optimizer, p, symbol)
            stepped.append(advance(scheduler, scaler))
        return scheduler.get_last_lr(), stepped

    @both_kinds
    @pytest.mark.parametrize("trace", [".x..", "x...", "...n", "xx...x"])
    def test_waits_on_skips(self, make, kind, trace):
        lr, stepped = self.halved(make(), trace, amp.lr_step, kind)
        assert lr == [1 / 8]
        assert stepped == [symbol == "." for symbol in trace]

    def test_passes_a_metric_on(self, make):
        scaler = make()
        p = parameter(0.0)
        optimizer = OPTIMIZERS["plain"]([p])
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        for metric, symbol in ((1.0, "."), (2.0, "x"), (3.0, ".")):
            iterate(scaler, optimizer, p, symbol)
            amp.lr_step(plateau, scaler, metric)
        assert optimizer.param_groups[0]["lr"] == 0.5

    def test_torch_counts_the_skipped_step(self):
        lr, _ = self.halved(torch_scaler(), ".x..", lambda scheduler, _: scheduler.step())
        assert lr == [1 / 16]
