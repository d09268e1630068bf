"""Operation families in float32 inside low-precision policies, on the CPU as on CUDA."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

import polyamp
import polyamp.torch as amp
from polyamp._policy_pattern import OP_FAMILIES
from polyamp_torch import _families
from polyamp_torch._families import FAMILY_OF

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
        assert "op:" not in amp.policy_tree(model)
        assert model(torch.ones(1, 2)).dtype == torch.float32

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


def test_every_family_has_functions():
    assert set(FAMILY_OF.values()) == set(OP_FAMILIES)
    assert FAMILY_OF[F.softmax] == FAMILY_OF[torch.Tensor.softmax] == "softmax"
    assert FAMILY_OF[torch.Tensor.__pow__] == "exp"
    assert not {torch.matmul, F.linear, torch.add, F.conv2d, F.batch_norm} & set(FAMILY_OF)


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
        x = torch.rand(4, 4, dtype=torch.bfloat16) + 0.5
        with torch.autocast("cpu", dtype=torch.bfloat16):
            before = {name: op(x) for name, op in OPERATIONS.items()}
        outcome(torch.exp, "bf16")
        assert len(_families._registered) == 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            after = {name: op(x) for name, op in OPERATIONS.items()}
        for name in OPERATIONS:
            assert after[name].dtype == before[name].dtype, name
            assert torch.equal(after[name], before[name]), name
        assert {after[name].dtype for name in ("softmax", "exp", "sum")} == {torch.bfloat16}

    def test_every_operator_belongs_to_one_family_and_torchs_own_list_is_kept(self):
        operators = _families._operators()
        assert set(operators.values()) == {*OP_FAMILIES} - {"loss"}, "torch's list has the losses"
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
