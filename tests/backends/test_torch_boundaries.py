"""What crosses the boundary of a policy, and what `describe` says of it."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import polyamp
import polyamp.torch as amp

nn = torch.nn
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Batch:
    image: Any
    label: Any


class Echo(nn.Module):
    """Returns what it got, and keeps it."""

    def forward(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        return (*args, kwargs) if kwargs else args[0]


def echo(policy, *args, **kwargs):
    module = amp.apply_policy(Echo(), policy)
    return module, module(*args, **kwargs)


class TestTrees:
    @pytest.mark.parametrize(
        ("policy", "inside", "outside"),
        [("fp16", F16, F32), ("bf16-true", BF16, BF16), ("float32", F32, F32), ("f64", F64, F64)],
    )
    def test_tensors_and_keywords(self, policy, inside, outside):
        module, (x, kwargs) = echo(policy, torch.ones(2), mask=torch.ones(2))
        assert module.args[0].dtype == module.kwargs["mask"].dtype == inside
        assert x.dtype == kwargs["mask"].dtype == outside

    @pytest.mark.parametrize("make", [dict, OrderedDict])
    def test_mappings(self, make):
        module, out = echo("bf16", make(a=[torch.ones(1), {"b": (torch.ones(1),)}]))
        (seen,) = module.args
        assert seen["a"][0].dtype == seen["a"][1]["b"][0].dtype == BF16
        assert out["a"][0].dtype == out["a"][1]["b"][0].dtype == F32
        assert type(seen) is type(out) is make

    def test_dataclasses_and_named_tuples(self):
        batch = Batch(Pair(torch.ones(1), 3), torch.zeros(1, dtype=torch.long))
        module, out = echo("bf16", batch)
        (seen,) = module.args
        assert (type(seen), type(seen.image)) == (Batch, Pair)
        assert (seen.image.left.dtype, seen.image.right) == (BF16, 3)
        assert seen.label is batch.label is out.label
        assert batch.image.left.dtype == out.image.left.dtype == F32

    @pytest.mark.parametrize(
        "value",
        [torch.tensor([70_000]), torch.tensor([True]), torch.tensor([1j]), "text", None, 2.5],
        ids=str,
    )
    def test_all_else_is_the_same_object(self, value):
        module, out = echo("fp16", [value])
        assert module.args[0][0] is out[0] is value

    def test_gradients_come_back_in_the_dtype_of_the_input(self):
        x = torch.ones(3, dtype=F64, requires_grad=True)
        echo("bf16", x)[1].sum().backward()
        assert torch.equal(x.grad, torch.ones(3, dtype=F64))


class TestRegions:
    def test_a_float32_region_gets_float32_back(self):
        rules = polyamp.PolicyMap({"0": "mixed_float16"}, default="float32")
        model = amp.apply_policy(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), rules)
        out = model(torch.randn(2, 4))
        assert out.dtype == F32
        hidden = model[0](torch.randn(2, 4))
        assert torch.equal(hidden, hidden.half().float())

    def test_output_dtype_of_the_model(self):
        assert amp.apply_policy(nn.Linear(4, 4), "mixed_float16")(torch.ones(1, 4)).dtype == F16
        assert amp.apply_policy(nn.Linear(4, 4), "16-mixed")(torch.ones(1, 4)).dtype == F32

    def test_autocast_around_the_model_is_overridden(self):
        model = amp.apply_policy(nn.Linear(4, 4), "float32")
        x = torch.randn(2, 4)
        expected = F.linear(x, model.weight, model.bias)
        with torch.autocast("cpu", dtype=BF16):
            assert torch.equal(model(x), expected)

    def test_an_error_inside_leaves_nothing_on(self):
        model = amp.apply_policy(nn.Linear(4, 4), "bf16")
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(1, 3))
        assert torch.is_autocast_enabled("cpu") is False
        assert torch.ones(1, dtype=BF16).exp().dtype == BF16

    def test_the_encoder_layer_of_torch_in_eval_mode_obeys_its_rules(self):
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        seen = {}
        for name in ("linear1", "linear2"):
            getattr(layer, name).register_forward_hook(
                lambda _m, _i, out, name=name: seen.update({name: out.dtype})
            )
        amp.apply_policy(layer, polyamp.PolicyMap({"linear1": "float32"}, default="bf16"))
        with torch.no_grad():
            layer(torch.randn(1, 3, 8))
        assert seen == {"linear1": F32, "linear2": BF16}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.norm(self.attn(x, x, x)[0])
        return F.linear(x, self.head.weight)


RULES = polyamp.PolicyMap(
    {"head": "float32", "attn.out_proj": "float32", "**.norm": "float32"}, default="bf16"
)
TREE = """\
(model): Tied                                  float32 -> bfloat16 -> float32              default
  embed: Embedding                                                             20 float32
  attn: MultiheadAttention                                                     60 float32
    out_proj: NonDynamicallyQuantizableLinear  float32                         20 float32  rule \
'attn.out_proj'{idle}
  norm: LayerNorm                              float32                         8 float32   rule \
'**.norm'
  head: Linear                                 float32                         20 float32  rule \
'head'{idle}"""


class TestDescribe:
    def test_rules_that_never_ran(self):
        model = amp.apply_policy(Tied(), RULES)
        assert amp.idle_rules(model) == ["", "attn.out_proj", "norm", "head"]
        model(torch.tensor([[0, 1, 2]]))
        assert amp.idle_rules(model) == ["attn.out_proj", "head"]

    def test_tree(self, capsys):
        model = amp.apply_policy(Tied(), RULES)
        assert amp.policy_tree(model) == TREE.format(idle="")
        model(torch.tensor([[0, 1, 2]]))
        idle = "; NEVER CALLED, so without effect"
        assert amp.describe(model) is None
        assert capsys.readouterr().out == TREE.format(idle=idle) + "\n"

    def test_the_module_that_a_rule_matched(self):
        model = nn.Sequential(OrderedDict(parts=nn.ModuleList([nn.Linear(2, 2)])))
        rules = polyamp.PolicyMap({"parts": "bf16-true"})
        lines = amp.policy_tree(amp.apply_policy(model, rules)).splitlines()
        assert lines[2].split() == [
            *("0:", "Linear", "bfloat16", "6", "bfloat16", "rule", "'parts'", "at", "'parts'")
        ]

    def test_without_a_policy(self):
        model = amp.remove_policy(amp.apply_policy(nn.Linear(2, 2), "bf16"))
        assert amp.policy_tree(model) == "(model): Linear    6 float32  no policy"
        assert amp.idle_rules(model) == []


class TestContainersOfTheCaller:
    def test_a_cache_without_tensors_to_cast_is_the_callers_own(self):
        class Caching(nn.Module):
            def forward(self, x, cache, seen):
                cache.append(x)
                seen["x"] = x
                return x

        cache, seen = [], {}
        amp.apply_policy(Caching(), "bf16")(torch.ones(1), cache, seen)
        assert (len(cache), cache[0].dtype, seen["x"].dtype) == (1, BF16, BF16)

    def test_lists_with_a_constructor_of_their_own(self):
        class Named(list):
            def __init__(self, name, values):
                super().__init__(values)
                self.name = name

        module, out = echo("bf16", Named("a", [torch.ones(1)]))
        (seen,) = module.args
        assert (type(seen), seen.name, seen[0].dtype) == (Named, "a", BF16)
        assert (type(out), out.name, out[0].dtype) == (Named, "a", F32)


class TestDevices:
    def test_the_first_floating_input_says_where(self):
        from polyamp_torch._modules import _device_type

        module, index = nn.Linear(1, 1), torch.zeros(1, dtype=torch.long, device="meta")
        assert _device_type(module, (index, torch.ones(1)), {}) == "cpu"
        assert _device_type(module, (index,), {}) == "cpu"
        assert _device_type(nn.ReLU(), (torch.ones(1, device="meta"),), {}) == "meta"
        assert _device_type(nn.ReLU(), ({"x": [index]},), {}) == "meta"

    def test_shapes_are_worked_out_on_meta_and_nothing_stays_on(self):
        model = amp.apply_policy(nn.Linear(4, 2), "bf16").to("meta")
        out = model(torch.ones(3, 4, device="meta"))
        assert (out.shape, out.dtype) == ((3, 2), F32)
        with torch.autocast("cpu", BF16):
            assert torch.ones(1, dtype=BF16).exp().dtype == BF16
