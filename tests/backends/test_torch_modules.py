"""Policies on a model's modules: what runs in which dtype, and that nothing else changes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import polyamp
import polyamp.torch as amp

nn = torch.nn
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
HEAD32 = polyamp.PolicyMap({"head": "float32"}, default="fp16")


class Spy(nn.Linear):
    """A Linear that notes the dtypes of its input and of its product."""

    def forward(self, x):
        out = super().forward(x)
        if not torch.compiler.is_compiling():
            self.__dict__["seen"] = (x.dtype, out.dtype)
        return out


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.proj = Spy(8, 8)

    def forward(self, x):
        return x + self.proj(F.softmax(self.norm(x), -1))


class Model(nn.Module):
    """A stem, checkpointed blocks if asked, and a head."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.reentrant = reentrant
        self.stem = Spy(8, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.mid = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(-1))
        self.head = Spy(8, 8)
        self.tail = Spy(8, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in (*self.blocks, self.mid):
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.tail(self.head(x))


def make(policy=None, reentrant=None):
    torch.manual_seed(0)
    model = Model(reentrant)
    return model if policy is None else amp.apply_policy(model, policy)


def batch():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def gradients(model, run=None):
    model.zero_grad()
    x = batch().requires_grad_()
    out = (model if run is None else run)(x)
    (out.float() ** 2).sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]


def same(left, right):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(left, right, strict=True))


def snapshot(model):
    out = model(batch())
    keys = {path: list(m.__dict__) for path, m in model.named_modules()}
    dtypes = {name: v.dtype for name, v in model.state_dict().items()}
    return keys, dtypes, out


class ByHand(Model):
    """HEAD32 written with torch.autocast; the families widened by hand."""

    def block(self, block, x):
        norm = F.layer_norm(x.float(), (8,), block.norm.weight, block.norm.bias)
        return x + block.proj(F.softmax(norm, -1))

    def forward(self, x):
        with torch.autocast("cpu", dtype=F16):
            x = self.stem(x.half())
            for block in self.blocks:
                x = self.block(block, x)
            norm, linear, _ = self.mid
            x = F.layer_norm(x.float(), (8,), norm.weight, norm.bias)
            x = F.softmax(linear(x).float(), -1)
            with torch.autocast("cpu", enabled=False):
                x = self.head(x)
            return self.tail(x).float()


class TestARegionOfItsOwn:
    def test_dtypes_of_the_matmuls(self):
        model = make(HEAD32)
        out = model(batch())
        assert model.head.seen == (F32, F32)
        assert model.stem.seen[1] == model.tail.seen[1] == model.blocks[0].proj.seen[1] == F16
        assert out.dtype == F32
        assert {p.dtype for p in model.parameters()} == {F32}

    def test_equals_the_model_written_by_hand(self):
        torch.manual_seed(0)
        byhand = ByHand()
        assert same(gradients(make(HEAD32)), gradients(byhand))

    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("policy", [HEAD32, "bf16", "bf16-true"], ids=str)
    def test_checkpointed_equals_plain(self, reentrant, policy):
        assert same(gradients(make(policy, reentrant)), gradients(make(policy)))

    @pytest.mark.parametrize("policy", [HEAD32, "bf16", "bf16-true"], ids=str)
    def test_compiled_equals_eager(self, policy, fresh_compiler):
        model = make(policy)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert same(gradients(model, compiled), gradients(model))

    @pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
    def test_a_compiled_part_of_an_eager_model(self, fresh_compiler):
        model, other = make(HEAD32), make(HEAD32)
        other.blocks[0] = torch.compile(other.blocks[0], fullgraph=True, backend="aot_eager")
        assert same(gradients(other), gradients(model))

    def test_float32_in_float16_in_float32(self):
        rules = polyamp.PolicyMap({"blocks.0.proj": "float32", "blocks": "float16"}, "float32")
        model = make(rules)
        model(batch())
        assert model.blocks[0].proj.seen == (F32, F32)
        assert model.blocks[1].proj.seen[1] == F16
        assert model.stem.seen == model.head.seen == (F32, F32)
        assert model.blocks[1].proj.weight.dtype == F16
        assert model.blocks[1].norm.weight.dtype == model.blocks[0].proj.weight.dtype == F32

    @pytest.mark.parametrize("make_list", [nn.ModuleList, lambda m: nn.ModuleDict({"0": m[0]})])
    def test_rules_of_containers_reach_their_children(self, make_list):
        class Holder(nn.Module):
            def __init__(self):
                super().__init__()
                self.parts, self.last = make_list([Spy(4, 4)]), Spy(4, 4)

            def forward(self, x):
                return self.last(
                    (self.parts["0" if "dict" in str(type(self.parts)).lower() else 0])(x)
                )

        rules = polyamp.PolicyMap({"parts": "float32"}, default="bf16")
        model = amp.apply_policy(Holder(), rules)
        model(torch.ones(1, 4))
        (part,) = [m for path, m in model.named_modules() if path == "parts.0"]
        assert (part.seen, model.last.seen[1]) == ((F32, F32), BF16)

    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
    def test_recurrent(self, kind):
        model = amp.apply_policy(kind(4, 4), "bf16")
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([3, 2]))
        out, _ = model(packed)
        assert out.data.dtype == F32
        assert torch.equal(out.data, out.data.bfloat16().float())


class TestCopies:
    def test_a_deep_copy_runs_its_own_weights(self):
        model = make(HEAD32)
        twin = copy.deepcopy(model)
        before = model(batch())
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        assert torch.equal(model(batch()), before)
        assert torch.equal(twin(batch()), torch.zeros(4, 2))
        assert "forward" not in amp.remove_policy(twin).__dict__
        assert "forward" in model.__dict__

    def test_pickle(self):
        model = make(HEAD32)
        twin = pickle.loads(pickle.dumps(model))
        assert same(gradients(twin), gradients(model))
        assert twin.head.seen == (F32, F32)

    @pytest.mark.parametrize("inner", [lambda: Spy(8, 2), lambda: nn.LSTM(8, 8)])
    def test_replicas_run_their_own_weights(self, inner):
        model = amp.apply_policy(inner(), "fp16")
        replica = model._replicate_for_data_parallel()
        for name, p in model.named_parameters(recurse=False):
            setattr(replica, name, torch.zeros_like(p))
        out, own = replica(batch()), model(batch())
        out, own = (out[0], own[0]) if isinstance(out, tuple) else (out, own)
        assert torch.equal(out, torch.zeros_like(out))
        assert own.abs().sum() > 0

    def test_wrappers_are_looked_through(self, tmp_path, fresh_compiler):
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            model = make()
            ddp = nn.parallel.DistributedDataParallel(model)
            wrapped = torch.compile(ddp, backend="eager")
            assert amp.apply_policy(wrapped, HEAD32) is wrapped
            expected = gradients(make(HEAD32))
            assert same(gradients(model, ddp), expected)
            assert same(gradients(model, wrapped), expected)
            assert amp.policy_tree(wrapped) == amp.policy_tree(model)
            assert amp.remove_policy(wrapped) is wrapped
            assert "forward" not in model.__dict__
        finally:
            torch.distributed.destroy_process_group()

    def test_data_parallel(self):
        model = make()
        wrapped = amp.apply_policy(nn.DataParallel(model), HEAD32)
        assert torch.equal(wrapped(batch()), make(HEAD32)(batch()))


class TestReversal:
    @pytest.mark.parametrize(
        "policy", [HEAD32, "bf16", "fp16", "float64", "bf16-true", "O2"], ids=str
    )
    def test_remove_leaves_the_original(self, policy):
        model, (keys, dtypes, out) = make(), snapshot(make())
        model(batch())
        amp.remove_policy(amp.apply_policy(model, policy))
        with torch.no_grad():
            for p, q in zip(model.parameters(), make().parameters(), strict=True):
                p.copy_(q)
        again = snapshot(model)
        assert (again[0], again[1]) == (keys, dtypes)
        assert torch.equal(again[2], out)

    def test_a_forward_of_the_users_stays(self):
        model = make()
        model.head.forward = mine = lambda x: F.linear(x, model.head.weight) + 1
        plain = model(batch())
        amp.apply_policy(model, HEAD32)
        assert model(batch()).dtype == F32
        assert model.head.forward is not mine
        amp.remove_policy(model)
        assert model.head.forward is mine
        assert torch.equal(model(batch()), plain)

    def test_applying_twice_replaces(self):
        model = amp.apply_policy(make("bf16-true"), HEAD32)
        fresh = make("bf16-true")
        assert amp.policy_tree(model) == amp.policy_tree(make(HEAD32))
        assert model.stem.weight.dtype == F32
        assert torch.equal(model.stem.weight, fresh.stem.weight.float())
        model(batch())
        assert model.stem.seen[1] == F16
        assert "forward" not in amp.remove_policy(model).stem.__dict__

    def test_remove_without_a_policy(self):
        model = make()
        assert amp.remove_policy(model) is model

    def test_tied_parameters_come_back(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        amp.remove_policy(amp.apply_policy(model, "bf16-true"))
        assert [p.dtype for p in model.parameters()] == [F32] * 3

    @pytest.mark.parametrize("saved", [None, HEAD32, "bf16", "fp16", "bf16-true"], ids=str)
    @pytest.mark.parametrize("loaded", [None, HEAD32, "bf16", "16-true"], ids=str)
    def test_state_dicts_load_under_any_policy(self, saved, loaded):
        state, target = make(saved).state_dict(), make(loaded)
        assert list(state) == list(make().state_dict())
        dtypes = [p.dtype for p in target.parameters()]
        target.load_state_dict({k: v + 1 for k, v in state.items()})
        assert [p.dtype for p in target.parameters()] == dtypes
        value = state["head.weight"] + 1
        assert torch.equal(target.head.weight, value.to(target.head.weight.dtype))


class TestTrueHalf:
    def test_parameters_are_cast_in_place(self):
        model = make()
        before = list(model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        amp.apply_policy(model, "bf16-true")
        assert all(p is q for p, q in zip(model.parameters(), before, strict=True))
        assert model.stem.weight.dtype == BF16
        assert model.mid[0].weight.dtype == model.blocks[0].norm.bias.dtype == F32
        old = model.stem.weight.clone()
        gradients(model)
        assert model.stem.weight.grad.dtype == BF16
        optimizer.step()
        assert torch.equal(model.stem.weight, old.add(model.stem.weight.grad, alpha=-0.5))

    def test_gradients_are_cast_too(self):
        model = nn.Linear(2, 2)
        model.weight.grad = torch.ones(2, 2)
        amp.apply_policy(model, "16-true")
        assert model.weight.grad.dtype == F16
        amp.remove_policy(model)
        assert model.weight.grad.dtype == F32

    def test_batch_norm_statistics(self):
        model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
        out = amp.apply_policy(model, "16-true")(torch.randn(4, 1, 3, 3))
        assert (out.dtype, model[0].weight.dtype) == (F16, F16)
        assert model[1].running_mean.dtype == model[1].weight.dtype == F32


class TestRefusals:
    def refuse(self, model, policy, match):
        before = [(p, p.dtype) for p in model.parameters()]
        keys = {path: list(m.__dict__) for path, m in model.named_modules()}
        with pytest.raises(polyamp.PolicyError, match=match):
            amp.apply_policy(model, policy)
        assert [p.dtype for p, _ in before] == [dtype for _, dtype in before]
        assert keys == {path: list(m.__dict__) for path, m in model.named_modules()}

    @pytest.mark.parametrize("applied", [None, "bf16-true"])
    def test_a_shared_module_with_two_policies(self, applied):
        shared = nn.Linear(4, 4)
        model = nn.Sequential(shared, nn.ReLU(), shared)
        if applied:
            amp.apply_policy(model, applied)
        rules = polyamp.PolicyMap({"2": "float32"}, default="fp16")
        self.refuse(model, rules, "0 and 2 are one shared module with two policies")

    def test_a_shared_module_below_two_policies_has_its_own(self):
        shared = Spy(4, 4)
        model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
        rules = polyamp.PolicyMap({"*.0": "fp16", "1": "float32"}, default="fp16")
        amp.apply_policy(model, rules)
        assert model(torch.ones(1, 4)).dtype == F32
        assert shared.seen[1] == F16

    @pytest.mark.parametrize("applied", [None, "bf16-true"])
    def test_a_tied_parameter_with_two_dtypes(self, applied):
        model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        if applied:
            amp.apply_policy(model, applied)
        rules = polyamp.PolicyMap({"1": "float32"}, default="16-true")
        self.refuse(model, rules, "0.weight and 1.weight are one tied parameter, wanted in torch.f")

    def test_an_unknown_pattern(self):
        self.refuse(make(), polyamp.PolicyMap({"haed": "fp16"}), "no module matches 'haed'.*'head'")

    @pytest.mark.parametrize(
        ("policy", "match"),
        [
            ("tf32", "'torch' cannot apply compute_dtype='tfloat32'"),
            ("c=bf16,store=f16", "store_dtype='float16'"),
            ("p=f16,c=bf16", "cannot compute in bfloat16 with float16 parameters"),
            ("p=f32,c=f64", "cannot compute in float64 with float32 parameters"),
            ("p=bf16,c=f32", "cannot compute in float32 with bfloat16 parameters"),
            ("mixd", "mixd"),
        ],
    )
    def test_policies(self, policy, match):
        self.refuse(make("bf16"), policy, match)

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    def test_script_modules(self):
        model = nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))
        self.refuse(model, "fp16", "0 is a script module of torch.jit")

    def test_what_is_no_module(self):
        with pytest.raises(polyamp.PolicyError, match=r"needs a torch.nn.Module, got function"):
            amp.apply_policy(batch, "fp16")


def test_float64_reaches_norms_and_their_statistics():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    amp.apply_policy(model, "64-true")
    floating = [v.dtype for v in model.state_dict().values() if v.is_floating_point()]
    assert floating == [torch.float64] * 6
    assert model.eval()(torch.ones(2, 3)).dtype == torch.float64
    amp.remove_policy(model)
    after = model.state_dict()
    assert all(after[key].dtype == before[key].dtype for key in before)
    assert all(torch.equal(after[key], before[key]) for key in before)
