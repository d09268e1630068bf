"""Operation families in float32 inside low-precision policies, on the CPU as on CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import polyamp
import polyamp.torch as amp
from polyamp._policy_pattern import OP_FAMILIES
from polyamp_torch import _families
from polyamp_torch._families import FAMILY_OF, PROMOTE

LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def labels(x):
    return torch.zeros(x.shape[0], dtype=torch.long)


OPERATIONS = {
    "softmax": lambda x: F.softmax(x, -1),
    "softmax method": lambda x: x.softmax(-1),
    "softmax torch": lambda x: torch.softmax(x, dim=-1),
    "softmax keyword": lambda x: F.softmax(input=x, dim=-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "log_softmax method": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x: F.group_norm(x, 2),
    "cross_entropy": lambda x: F.cross_entropy(x, labels(x)),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "exp": torch.exp,
    "exp method": lambda x: x.exp(),
    "log": torch.log,
    "pow": lambda x: torch.pow(x, 2),
    "**": lambda x: x**2,
    "2 **": lambda x: 2.0**x,
    "1 /": lambda x: 1.0 / x,
    "norm": torch.norm,
    "norm method": lambda x: x.norm(dim=-1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "cumsum": lambda x: torch.cumsum(x, -1),
    "sum": torch.sum,
    "sum method": lambda x: x.sum(-1),
}
STAY_LOW = {
    "matmul": lambda x: x @ x.T,
    "torch.matmul": lambda x: torch.matmul(x, x.T),
    "linear": lambda x: F.linear(x, x),
    "conv1d": lambda x: F.conv1d(x[None], x[:, :, None]),
    "relu": F.relu,
    "add": lambda x: x + x,
}


class Record(torch.nn.Module):
    """Applies an operation to a low-precision matrix product; keeps what came out."""

    def __init__(self, operation):
        super().__init__()
        self.operation = operation
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.inner(x).abs() + 0.5
        self.seen = hidden.dtype
        self.out = self.operation(hidden)
        return self.out


def outcome(operation, policy):
    torch.manual_seed(0)
    model = amp.apply_policy(Record(operation), policy)
    model(torch.randn(4, 4))
    return model


@pytest.mark.parametrize("policy", LOW)
class TestDtypes:
    @pytest.mark.parametrize("name", OPERATIONS)
    def test_float32(self, name, policy):
        model = outcome(OPERATIONS[name], policy)
        assert (model.seen, model.out.dtype) == (LOW[policy], torch.float32)

    @pytest.mark.parametrize("name", STAY_LOW)
    def test_matrix_work_and_elementwise_stay_low(self, name, policy):
        model = outcome(STAY_LOW[name], policy)
        assert (model.seen, model.out.dtype) == (LOW[policy], LOW[policy])

    def test_plain_autocast_leaves_several_low(self, policy):
        x = torch.rand(4, 4, dtype=LOW[policy]) + 0.5
        with torch.autocast("cpu", dtype=LOW[policy]):
            low = {name for name, op in OPERATIONS.items() if op(x).dtype == LOW[policy]}
        assert {"softmax", "log_softmax", "layer_norm", "exp", "log", "**", "sum"} <= low


@pytest.mark.parametrize("policy", LOW)
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "exp", "cumsum", "sum", "mse_loss"])
def test_values_are_those_of_float32_inputs(name, policy):
    torch.manual_seed(0)
    operation, model = OPERATIONS[name], Record(lambda x: (x, OPERATIONS[name](x)))
    hidden, out = amp.apply_policy(model, f"c={policy},o=f32")(torch.randn(4, 4))
    assert torch.equal(out, operation(hidden.float()))


def test_a_sum_past_float16():
    class Model(torch.nn.Module):
        def forward(self, x):
            return x.sum()

    x = torch.full((2000,), 60.0)
    assert amp.apply_policy(Model(), "fp16")(x).item() == 120_000.0
    with torch.autocast("cpu", dtype=torch.float16):
        assert x.half().sum().item() == float("inf")


@pytest.mark.parametrize("policy", ["float32", "float64"])
def test_wide_policies_widen_nothing(policy):
    seen = []
    model = torch.nn.Sequential(torch.nn.Softmax(-1))
    model[0].forward = lambda x: seen.append(F.softmax(x.half(), -1).dtype) or x
    amp.apply_policy(model, policy)(torch.randn(2, 4))
    assert seen == [torch.float16]


class TestOpRules:
    def test_a_low_policy_leaves_the_family_to_autocast(self):
        rules = polyamp.PolicyMap({"op:softmax": "fp16"}, default="fp16")
        assert outcome(OPERATIONS["softmax"], rules).out.dtype == torch.float16
        assert outcome(OPERATIONS["layer_norm"], rules).out.dtype == torch.float32

    def test_float32_is_what_families_have_anyway(self):
        rules = polyamp.PolicyMap({"op:softmax": "float32"}, default="fp16")
        assert outcome(OPERATIONS["softmax"], rules).out.dtype == torch.float32

    def test_are_no_module_patterns(self):
        rules = polyamp.PolicyMap({f"op:{f}": "bf16" for f in OP_FAMILIES}, default="float32")
        model = amp.apply_policy(torch.nn.Sequential(torch.nn.Linear(2, 2)), rules)
        assert model(torch.ones(1, 2)).dtype == torch.float32
        assert amp.idle_rules(model) == []

    def test_float64_is_refused(self):
        model = torch.nn.Linear(2, 2)
        with pytest.raises(polyamp.PolicyError, match="'torch' cannot compute op:loss in float64"):
            amp.apply_policy(model, polyamp.PolicyMap({"op:loss": "float64"}, default="fp16"))
        assert "forward" not in model.__dict__

    @pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm", "BatchNorm1d"])
    def test_low_norms(self, norm):
        rules = polyamp.PolicyMap({"op:norm": "bf16-true"}, default="bf16-true")
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), getattr(torch.nn, norm)(4))
        out = amp.apply_policy(model, rules)(torch.randn(8, 4))
        kept = torch.float32 if norm == "BatchNorm1d" else torch.bfloat16
        assert model[1].weight.dtype == kept
        assert out.dtype == torch.bfloat16
        assert out.isfinite().all()


def test_every_name_is_a_function_of_torch():
    assert set(FAMILY_OF.values()) == {*OP_FAMILIES, PROMOTE}
    homes = (torch, F, torch.special, torch.linalg, torch.Tensor)
    assert [name for name in FAMILY_OF if not any(hasattr(home, name) for home in homes)] == []
    assert not {"matmul", "linear", "add", "conv2d", "batch_norm"} & set(FAMILY_OF)


def test_out_arguments_are_left_alone():
    out = torch.empty(4, 4, dtype=torch.bfloat16)
    model = outcome(lambda x: torch.exp(x.detach(), out=out), "bf16")
    assert model.out is out


def test_families_end_with_the_forward():
    model = outcome(OPERATIONS["softmax"], "bf16")
    assert F.softmax(torch.ones(2, dtype=torch.bfloat16), 0).dtype == torch.bfloat16
    assert model.out.dtype == torch.float32


def test_every_thread_has_families_of_its_own():
    seen = []
    inner = amp.apply_policy(torch.nn.Sequential(Record(torch.exp)), "bf16")

    def elsewhere(x):
        thread = threading.Thread(target=lambda: seen.append(inner(torch.randn(4, 4)).dtype))
        thread.start()
        thread.join()
        return inner[0].out

    assert outcome(elsewhere, "bf16").out.dtype == torch.float32
    assert seen == [torch.float32]


def test_families_end_after_an_error():
    def fail(x):
        raise ArithmeticError("stop")

    model = amp.apply_policy(torch.nn.Sequential(Record(fail)), "bf16")
    with pytest.raises(ArithmeticError, match="stop"):
        model(torch.randn(4, 4))
    assert torch.ones(1, dtype=torch.bfloat16).exp().dtype == torch.bfloat16
    assert outcome(torch.exp, "bf16").out.dtype == torch.float32


class TestKernelsUnderAutocastsKey:
    def test_others_autocast_is_as_before(self):
        code = """
import torch, polyamp.torch as amp
from test_torch_families import OPERATIONS, outcome
from polyamp_torch import _families
x = torch.rand(4, 4, dtype=torch.bfloat16) + 0.5
def all_of():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return {name: op(x) for name, op in OPERATIONS.items()}
before = all_of()
assert not _families._registered
outcome(torch.exp, "bf16")
assert len(_families._registered) == 1
for name, after in all_of().items():
    assert after.dtype == before[name].dtype, name
    assert torch.equal(after, before[name]), name
    print(name, after.dtype)
"""
        here = Path(__file__).parent
        path = os.pathsep.join([str(here), *sys.path])
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "softmax torch.bfloat16" in done.stdout
        assert len(done.stdout.splitlines()) == len(OPERATIONS)

    def test_every_operator_belongs_to_one_family_and_torchs_own_list_is_kept(self):
        operators = _families._operators()
        families = {*OP_FAMILIES, PROMOTE} - {"loss"}  # torch's own list has the losses
        assert set(operators.values()) == families
        assert operators["softmax", "int"] == "softmax"
        assert operators["linalg_vector_norm", "default"] == "norm"
        assert not {"mm", "addmm", "linear", "relu", "mse_loss"} & {name for name, _ in operators}

    def test_the_softmax_inside_attention_is_float32(self):
        torch.manual_seed(0)
        attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        x = torch.randn(2, 5, 8)
        amp.apply_policy(attention, "bf16")
        assert attention(x, x, x)[1].dtype == torch.float32
        amp.remove_policy(attention)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert attention(x, x, x)[1].dtype == torch.bfloat16

    def test_a_float32_region_inside_widens_nothing_and_the_outer_one_goes_on(self):
        seen = {}

        class Outer(Record):
            def __init__(self):
                super().__init__(torch.exp)
                self.wide = torch.nn.Sequential(torch.nn.Identity())

            def forward(self, x):
                self.wide(x)
                return super().forward(x)

        model = Outer()
        low = torch.rand(4, 4, dtype=torch.bfloat16)
        model.wide[0].forward = lambda x: (
            seen.update(
                autocast=torch.is_autocast_enabled("cpu"), exp=torch.exp(low).dtype, given=x.dtype
            )
            or x
        )
        amp.apply_policy(model, polyamp.PolicyMap({"wide": "float32"}, default="bf16"))
        model(torch.randn(4, 4))
        assert seen["autocast"] is False
        assert (seen["exp"], seen["given"]) == (torch.bfloat16, torch.float32)
        assert (model.seen, model.out.dtype) == (torch.bfloat16, torch.float32)
        assert torch.is_autocast_enabled("cpu") is False


MIXED = {
    "dot": lambda wide, low: torch.dot(wide[0], low[0]),
    "mv": lambda wide, low: torch.mv(wide, low[0]),
    "lerp": lambda wide, low: torch.lerp(low, wide, 0.5),
    "cross": lambda wide, low: torch.linalg.cross(wide[:3, :3], low[:3, :3]),
    "tensordot": lambda wide, low: torch.tensordot(low, wide, 1),
    "bilinear": lambda wide, low: F.bilinear(wide, low, wide.new_ones(2, 4, 4)),
    "addcmul": lambda wide, low: torch.addcmul(low, wide, low),
    "atan2": lambda wide, low: torch.atan2(low, wide),
    "index_add": lambda wide, low: torch.zeros_like(low).index_add(0, torch.arange(4), wide),
    "scatter_add": lambda wide, low: low.scatter_add(0, torch.zeros(4, 4, dtype=torch.long), wide),
    "index_put": lambda wide, low: low.index_put((torch.tensor([0]),), wide[:1]),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", MIXED)
def test_mixed_inputs_take_the_widest_format(name, compiled, fresh_compiler):
    def operation(low):
        return MIXED[name](low.softmax(-1), low)

    torch.manual_seed(0)
    model = amp.apply_policy(Record(operation), "bf16")
    x = torch.randn(4, 4)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    run(x)
    assert model.out.dtype == torch.float32
    with torch.no_grad():
        low = model.inner(x.bfloat16().float()).bfloat16().abs() + 0.5
        torch.testing.assert_close(
            model.out, MIXED[name](low.float().softmax(-1), low.float()), rtol=2e-2, atol=2e-2
        )


@pytest.mark.parametrize(
    "name", [n for n in OPERATIONS if n not in ("cross_entropy",)] + ["square"]
)
def test_compiled_equals_eager(name, fresh_compiler):
    operation = OPERATIONS.get(name, torch.square)
    torch.manual_seed(0)
    model = amp.apply_policy(Record(operation), "bf16")
    x, grads, outs = torch.randn(4, 4), [], []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        out = run(x)
        out.sum().backward()
        outs.append(out.detach().clone())
        grads.append(model.inner.weight.grad.clone())
    assert torch.equal(*outs)
    assert torch.equal(*grads)


def test_autocast_switched_off_by_the_model_is_off_compiled_too(fresh_compiler):
    def off(x):
        with torch.autocast("cpu", enabled=False):
            return x.exp()

    model = amp.apply_policy(Record(off), "bf16")
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        run(torch.randn(4, 4))
        assert model.out.dtype == torch.bfloat16
