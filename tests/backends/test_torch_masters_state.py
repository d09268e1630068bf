"""MasterWeights: groups, parameters written by others, saving."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch_masters_cases import (
    INNER,
    everything,
    inners,
    loss_of,
    low,
    sgd,
)
from torch_scaler_cases import batches, mlp, parameter, same_bits

import polyamp.torch as amp
from polyamp import StateError
from polyamp_torch._masters import KEY

pytestmark = pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning")


class TestGroups:
    @pytest.mark.parametrize("named", [False, True])
    def test_added_later(self, make, named):
        scaler = make(init_scale=8.0)
        p = parameter(1.0, dtype=torch.float16)
        q, r = parameter(1.0, dtype=torch.bfloat16), parameter(1.0)
        if named:
            optimizer = amp.MasterWeights(torch.optim.SGD([("p", p)], lr=1.0))
            optimizer.add_param_group({"params": [("q", q), ("r", r)], "lr": 0.5})
        else:
            optimizer = sgd(p)
            optimizer.add_param_group({"params": [q, r], "lr": 0.5})
        scaler.scale(p.float() + q.float() + r).backward()
        scaler.step(optimizer)
        assert (p.item(), q.item(), r.item()) == (0.0, 0.5, 0.5)
        assert [m.dtype for m in optimizer.master_parameters()] == [torch.float32] * 3
        if named:
            assert optimizer.param_groups[1]["param_names"] == ["q", "r"]

    def test_a_single_tensor(self):
        p, q = parameter(1.0, dtype=torch.float16), parameter(1.0, dtype=torch.float16)
        optimizer = sgd(p)
        optimizer.add_param_group({"params": q})
        q.grad = torch.ones(1).half()
        optimizer.step()
        assert q.item() == 0.0

    def test_twice_the_same_parameter_is_refused(self):
        p, q = parameter(1.0, dtype=torch.float16), parameter(1.0, dtype=torch.float16)
        optimizer = sgd(p)
        with pytest.raises(ValueError, match="more than one parameter group"):
            optimizer.add_param_group({"params": [q, p]})
        assert len(optimizer.param_groups) == 1
        q.grad = torch.ones(1).half()
        optimizer.step()
        assert q.item() == 1.0

    def test_groups_keep_their_options(self):
        p, q = parameter(1.0, dtype=torch.float16), parameter(1.0, dtype=torch.float16)
        inner = torch.optim.SGD([{"params": [p]}, {"params": [q], "lr": 0.25}], lr=1.0)
        optimizer = amp.MasterWeights(inner)
        p.grad, q.grad = torch.ones(1).half(), torch.ones(1).half()
        optimizer.step()
        assert (p.item(), q.item()) == (0.0, 0.75)


class TestWrittenParameters:
    def test_loading_the_model_moves_the_masters(self):
        model = torch.nn.Linear(2, 1).half()
        optimizer = sgd(*model.parameters())
        model.load_state_dict({"weight": torch.tensor([[2.0, 3.0]]), "bias": torch.tensor([4.0])})
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert model.weight.tolist() == [[1.0, 2.0]]
        assert model.bias.item() == 3.0

    def test_only_entries_that_were_changed_lose_their_last_digits(self):
        p = parameter(1.0, 1.0, dtype=torch.float16)
        optimizer = sgd(p, lr=1e-5)
        p.grad = torch.ones(2).half()
        optimizer.step()
        (master,) = optimizer.master_parameters()
        with torch.no_grad():
            p[1] = 0.5
        optimizer.step()
        assert master.tolist() == pytest.approx([1.0 - 2e-5, 0.5 - 1e-5], abs=1e-7)
        assert p.tolist() == [1.0, 0.5]

    def test_a_saved_state_follows_the_model(self):
        p = parameter(1.0, dtype=torch.float16)
        optimizer = sgd(p)
        with torch.no_grad():
            p.fill_(3.0)
        assert optimizer.state_dict()[KEY][0].item() == 3.0

    def test_a_copy_follows_the_model(self):
        p = parameter(1.0, dtype=torch.float16)
        optimizer = sgd(p)
        with torch.no_grad():
            p.fill_(3.0)
        other, copied = copy.deepcopy((p, optimizer))
        copied.step()
        assert next(copied.master_parameters()).item() == other.item() == 3.0

    def test_write_back(self):
        p = parameter(1.0, dtype=torch.float16)
        optimizer = sgd(p)
        (master,) = optimizer.master_parameters()
        with torch.no_grad():
            master.fill_(2.0)
        optimizer.write_back()
        assert p.item() == 2.0


DTYPES = [torch.float16, torch.bfloat16, torch.float32]


class TestSaving:
    def run(self, model, optimizer, steps, start=0):
        for batch in batches(start + steps)[start:]:
            optimizer.zero_grad()
            loss_of(model, *batch).backward()
            optimizer.step()

    def reload(self, saved):
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)

    @low
    @inners
    def test_continuing_is_as_if_never_interrupted(self, dtype, build):
        model = mlp().to(dtype)
        optimizer = amp.MasterWeights(build(model.parameters()))
        self.run(model, optimizer, 3)
        saved = self.reload([model.state_dict(), optimizer.state_dict()])
        self.run(model, optimizer, 3, start=3)
        other = mlp(seed=9).to(dtype)
        resumed = amp.MasterWeights(build(other.parameters()))
        other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        self.run(other, resumed, 3, start=3)
        assert same_bits(
            everything(model, list(optimizer.master_parameters()), optimizer),
            everything(other, list(resumed.master_parameters()), resumed),
        )

    @pytest.mark.parametrize(
        ("dtype", "into", "model_first"),
        [(dtype, into, True) for dtype in DTYPES for into in DTYPES]
        + [(dtype, dtype, False) for dtype in DTYPES],
    )
    def test_loads_under_any_precision(self, dtype, into, model_first):
        build = INNER["adam"]
        model = mlp().to(dtype)
        optimizer = amp.MasterWeights(build(model.parameters()))
        self.run(model, optimizer, 3)
        saved = self.reload([model.state_dict(), optimizer.state_dict()])
        other = mlp(seed=9).to(into)
        resumed = amp.MasterWeights(build(other.parameters()))
        if model_first:
            other.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        if not model_first:
            other.load_state_dict(saved[0])
        masters = list(optimizer.master_parameters())
        assert same_bits(masters, list(resumed.master_parameters()))
        assert all(
            torch.equal(p, m.to(into)) for p, m in zip(other.parameters(), masters, strict=True)
        )
        for ours, theirs in zip(masters, resumed.master_parameters(), strict=True):
            got, want = resumed.state[theirs], optimizer.state[ours]
            assert same_bits([got["exp_avg"], got["step"]], [want["exp_avg"], want["step"]])

    def test_the_format(self):
        p, q = parameter(1.5, dtype=torch.float16), parameter(2.5)
        r = parameter(3.5, dtype=torch.float64)
        optimizer = sgd(p, q)
        optimizer.add_param_group({"params": [r]})
        saved = optimizer.state_dict()
        assert list(saved) == ["state", "param_groups", "master_weights"]
        weights = {k: (v.tolist(), v.dtype) for k, v in saved["master_weights"].items()}
        assert weights == {0: ([1.5], torch.float32), 1: ([2.5], torch.float32)}
        assert [g["params"] for g in saved["param_groups"]] == [[0, 1], [2]]

    @low
    def test_an_optimizers_own_state_dict_loads(self, dtype):
        model = mlp()
        plain = INNER["adam"](model.parameters())
        self.run(model, plain, 2)
        other = mlp(seed=9).to(dtype)
        resumed = amp.MasterWeights(INNER["adam"](other.parameters()))
        other.load_state_dict(model.state_dict())
        resumed.load_state_dict(plain.state_dict())
        masters = list(resumed.master_parameters())
        assert same_bits(masters, [p.float() for p in other.parameters()])
        assert all(resumed.state[m]["exp_avg"].dtype == torch.float32 for m in masters)

    def test_an_optimizer_without_masters_loads_ours(self):
        model = mlp().half()
        optimizer = amp.MasterWeights(INNER["adam"](model.parameters()))
        self.run(model, optimizer, 2)
        other = mlp()
        plain = INNER["adam"](other.parameters())
        plain.load_state_dict(optimizer.state_dict())
        for ours, theirs in zip(optimizer.master_parameters(), other.parameters(), strict=True):
            assert torch.equal(optimizer.state[ours]["exp_avg"], plain.state[theirs]["exp_avg"])

    @pytest.mark.parametrize(
        ("spoil", "match"),
        [
            (lambda w: [1, 2], "must be a dict of tensors, got list"),
            (lambda w: {**w, 7: torch.ones(1)}, r"\[7\] is not a tensor of a parameter"),
            (lambda w: {0: 3.0}, r"\[0\] is not a tensor"),
            (lambda w: {0: torch.ones(2)}, r"\[0\] has shape \(2,\), the parameter \(1,\)"),
        ],
    )
    def test_wrong_weights_change_nothing(self, spoil, match):
        p = parameter(1.0, dtype=torch.float16)
        optimizer = sgd(p, lr=0.5)
        saved = optimizer.state_dict()
        saved["param_groups"][0]["lr"] = 9.0
        saved[KEY] = spoil(saved[KEY])
        with pytest.raises(StateError, match=match):
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert p.item() == 1.0

    def test_wrong_groups_change_nothing(self):
        p, q = parameter(1.0, dtype=torch.float16), parameter(5.0, dtype=torch.float16)
        saved = sgd(q).state_dict()
        saved["param_groups"].append({**saved["param_groups"][0], "params": [1]})
        optimizer = sgd(p)
        with pytest.raises(ValueError, match="parameter groups"):
            optimizer.load_state_dict(saved)
        assert p.item() == 1.0
        assert next(optimizer.master_parameters()).item() == 1.0

    @pytest.mark.parametrize(
        "clone",
        [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))],
        ids=["deepcopy", "pickle"],
    )
    @inners
    def test_a_copy_goes_its_own_way(self, clone, build):
        model = mlp().half()
        optimizer = amp.MasterWeights(build(model.parameters()))
        self.run(model, optimizer, 2)
        before = [p.detach().clone() for p in model.parameters()]
        other, copied = clone((model, optimizer))
        self.run(other, copied, 2, start=2)
        assert same_bits(before, [p.detach() for p in model.parameters()])
        self.run(model, optimizer, 2, start=2)
        assert same_bits(
            everything(model, list(optimizer.master_parameters()), optimizer),
            everything(other, list(copied.master_parameters()), copied),
        )
