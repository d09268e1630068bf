"""polyamp.torch.GradScaler where torch.amp.GradScaler stood: interface, order, state, pickling."""

from __future__ import annotations

import io

import pytest
import torch
from torch_scaler_cases import INF, OPTIMIZERS, backward, iterate, parameter

import polyamp.torch as amp

KEYS = ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]


pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")


def problem(kind="plain", **kwargs):
    param = parameter(1.0, 2.0)
    return param, OPTIMIZERS[kind]([param], **kwargs)


class TestConstructor:
    def test_defaults_are_those_of_torch(self):
        ours, theirs = amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
        assert isinstance(ours, torch.amp.GradScaler)
        assert ours.state_dict() == theirs.state_dict()
        assert ours.state_dict() == dict(zip(KEYS, [65536.0, 2.0, 0.5, 2000, 0], strict=True))
        assert ours.is_enabled()

    def test_positional_order(self):
        scaler = amp.GradScaler("cpu", 8.0, 3.0, 0.25, 5, True)
        assert list(scaler.state_dict().values()) == [8.0, 3.0, 0.25, 5, 0]
        assert not amp.GradScaler("cpu", 8.0, 3.0, 0.25, 5, False).is_enabled()

    @pytest.mark.parametrize("wrong", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}])
    def test_factors_that_do_nothing_are_refused(self, wrong):
        with pytest.raises((AssertionError, ValueError), match=r"factor"):
            amp.GradScaler("cpu", **wrong)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="only where CUDA is missing")
    def test_cuda_is_the_default_and_disables_itself_where_there_is_none(self):
        with pytest.warns(UserWarning, match=r"CUDA"):
            scaler = amp.GradScaler()
        assert not scaler.is_enabled()
        assert scaler.get_scale() == 1.0

    def test_setters(self, make):
        scaler = make()
        scaler.set_growth_factor(4.0)
        scaler.set_backoff_factor(0.25)
        scaler.set_growth_interval(7)
        got = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        assert got == (4.0, 0.25, 7)
        assert list(scaler.state_dict().values()) == [65536.0, 4.0, 0.25, 7, 0]

    def test_setters_act_on_the_next_update(self, make):
        scaler = make(init_scale=16.0, growth_interval=50)
        param, optimizer = problem(lr=2.0**-10)
        iterate(scaler, optimizer, param)
        scaler.set_growth_interval(2)
        scaler.set_growth_factor(4.0)
        scaler.set_backoff_factor(0.125)
        iterate(scaler, optimizer, param)
        assert scaler.get_scale() == 64.0
        iterate(scaler, optimizer, param, "x")
        assert scaler.get_scale() == 8.0


class TestScale:
    def test_tensor(self, make):
        scaler = make(init_scale=8.0)
        loss = torch.tensor(3.0, requires_grad=True)
        scaled = scaler.scale(loss)
        assert scaled.item() == 24.0
        scaled.backward()
        assert loss.grad.item() == 8.0

    def test_nested_lists_and_tuples_keep_their_types(self, make):
        one = torch.ones(2)
        got = make(init_scale=4.0).scale([one, (one, [one]), []])
        assert [type(got), type(got[1]), type(got[1][1]), got[2]] == [list, tuple, list, []]
        for leaf in (got[0], got[1][0], got[1][1][0]):
            assert leaf.tolist() == [4.0, 4.0]

    def test_a_generator_gives_an_iterator(self, make):
        scaler = make(init_scale=2.0)
        for _ in range(2):
            got = scaler.scale(torch.tensor(value) for value in (1.0, 2.0))
            assert iter(got) is iter(got)
            assert [t.item() for t in got] == [2.0, 4.0]

    @pytest.mark.parametrize("wrong", [3.0, None, object()])
    def test_anything_else_is_a_value_error(self, make, wrong):
        scaler = make()
        with pytest.raises(ValueError, match=r"[Tt]ensor"):
            scaler.scale(wrong)
        with pytest.raises(ValueError, match=r"[Tt]ensor"):
            scaler.scale([torch.ones(1), wrong])

    def test_integer_scale_and_dtypes_promote_as_in_torch(self, make):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            scaled = make(init_scale=8).scale(torch.ones((), dtype=dtype))
            expected = torch.amp.GradScaler("cpu", init_scale=8).scale(torch.ones((), dtype=dtype))
            assert scaled.dtype == expected.dtype
            assert scaled.item() == 8.0


class TestOrder:
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    @pytest.mark.parametrize("call", ["unscale_", "step", "_check_inf_per_device"])
    def test_nothing_goes_before_scale(self, make, kind, call):
        _, optimizer = problem(kind)
        with pytest.raises(AssertionError, match=r"_scale"):
            getattr(make(), call)(optimizer)

    def test_update_before_scale(self, make):
        with pytest.raises(AssertionError, match=r"_scale"):
            make().update()

    def test_update_without_a_step(self, make):
        scaler = make(init_scale=16.0)
        scaler.scale(torch.ones(()))
        with pytest.raises(AssertionError, match=r"inf"):
            scaler.update()
        assert scaler.get_scale() == 16.0

    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_twice_is_an_error_until_update(self, make, kind):
        scaler = make(init_scale=16.0)
        param, optimizer = problem(kind)
        for _ in range(2):
            backward(scaler, param)
            scaler.unscale_(optimizer)
            with pytest.raises(RuntimeError, match=r"unscale_"):
                scaler.unscale_(optimizer)
            assert param.grad.tolist() == [1.0, 1.0]
            scaler.step(optimizer)
            with pytest.raises(RuntimeError, match=r"step"):
                scaler.step(optimizer)
            with pytest.raises(RuntimeError, match=r"unscale_"):
                scaler.unscale_(optimizer)
            scaler.update()
        assert param.tolist() == [-1.0, 0.0]

    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_keyword_closure_is_refused(self, make, kind):
        scaler = make()
        param, optimizer = problem(kind)
        backward(scaler, param)
        with pytest.raises(RuntimeError, match=r"[Cc]losure"):
            scaler.step(optimizer, closure=lambda: None)
        assert param.tolist() == [1.0, 2.0]

    def test_optimizer_without_gradients(self, make):
        scaler = make()
        _, optimizer = problem()
        scaler.scale(torch.ones(()))
        with pytest.raises(AssertionError, match=r"inf"):
            scaler.step(optimizer)

    def test_step_hands_arguments_through_and_returns_what_the_optimizer_returns(self, make):
        class Odd(torch.optim.SGD):
            def step(self, *args, **kwargs):
                return args, kwargs

        param = parameter(1.0)
        optimizer, scaler = Odd([param], lr=1.0), make()
        backward(scaler, param)
        assert scaler.step(optimizer, 1, word=2) == ((1,), {"word": 2})
        scaler.update()
        backward(scaler, param, bad=INF)
        assert scaler.step(optimizer, 1, word=2) is None


class TestUpdateByHand:
    @pytest.mark.parametrize("new", [32.0, torch.tensor(32.0)])
    def test_new_scale(self, make, new):
        scaler = make(init_scale=16.0, growth_interval=3)
        param, optimizer = problem()
        iterate(scaler, optimizer, param)
        backward(scaler, param)
        scaler.step(optimizer)
        scaler.update(new)
        assert scaler.get_scale() == 32.0
        assert scaler._get_growth_tracker() == 1
        assert param.grad.tolist() == [1.0, 1.0]
        iterate(scaler, optimizer, param)
        iterate(scaler, optimizer, param)
        assert scaler.get_scale() == 64.0
        assert param.tolist() == [-3.0, -2.0]

    def test_the_tensor_is_copied(self, make):
        scaler = make()
        scaler.scale(torch.ones(()))
        new = torch.tensor(4.0)
        scaler.update(new)
        new.fill_(9.0)
        assert scaler.get_scale() == 4.0

    @pytest.mark.parametrize("new", [torch.ones(2), torch.ones((), requires_grad=True)])
    def test_tensors_that_are_no_scale(self, make, new):
        scaler = make(init_scale=16.0)
        scaler.scale(torch.ones(()))
        with pytest.raises(AssertionError, match=r"new_scale"):
            scaler.update(new)
        assert scaler.get_scale() == 16.0


class TestDisabled:
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_everything_is_a_no_op(self, make, kind):
        scaler = make(enabled=False)
        param, optimizer = problem(kind)
        loss = param.sum()
        assert scaler.scale(loss) is loss
        loss.backward()
        assert scaler.unscale_(optimizer) is None
        assert param.grad.tolist() == [1.0, 1.0]
        assert scaler.step(optimizer) is None
        assert param.tolist() == [0.0, 1.0]
        assert scaler.step(optimizer, closure=lambda: torch.tensor(5.0)).item() == 5.0
        scaler.update()
        assert scaler.state_dict() == {}
        scaler.load_state_dict({"scale": 4.0})
        assert (scaler.get_scale(), scaler.is_enabled()) == (1.0, False)

    def test_infinite_gradients_go_through(self, make):
        param, optimizer = problem()
        iterate(make(enabled=False), optimizer, param, "x")
        assert param.tolist() == [-INF, 1.0]


class TestStateDict:
    def continued(self, scaler, trace="..x..."):
        param, optimizer = problem(lr=2.0**-10)
        out = []
        for symbol in trace:
            iterate(scaler, optimizer, param, symbol)
            out.append(scaler.state_dict())
        return out

    @pytest.mark.parametrize("lazy", [True, False])
    def test_torch_to_polyamp(self, make, lazy):
        theirs = torch.amp.GradScaler("cpu", 1024.0, 4.0, 0.25, 3)
        self.continued(theirs, ".x..")
        ours = make(init_scale=2.0)
        if not lazy:
            ours.scale(torch.ones(()))
        ours.load_state_dict(theirs.state_dict())
        assert ours.state_dict() == {
            "scale": 256.0,
            "growth_factor": 4.0,
            "backoff_factor": 0.25,
            "growth_interval": 3,
            "_growth_tracker": 2,
        }
        assert self.continued(ours) == self.continued(theirs)

    def test_polyamp_to_torch(self, make):
        ours = make(init_scale=1024.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
        self.continued(ours, ".x..")
        theirs = torch.amp.GradScaler("cpu")
        theirs.load_state_dict(ours.state_dict())
        assert theirs.state_dict() == ours.state_dict()
        assert list(ours.state_dict()) == KEYS
        assert self.continued(theirs) == self.continued(ours)

    def test_values_are_python_numbers_and_survive_a_safe_load(self, make):
        scaler = make()
        self.continued(scaler)
        state = scaler.state_dict()
        assert [type(v) for v in state.values()] == [float, float, float, int, int]
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert torch.load(file, weights_only=True) == state

    def test_empty_dict(self, make):
        with pytest.raises(RuntimeError, match=r"empty"):
            make().load_state_dict({})
