"""`Predictive(per_module=True)`: float16 modules with powers of two of their own."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import polyamp.torch as amp  # noqa: E402
from polyamp import Policy, PolicyMap, Predictive, RuleError, StateError  # noqa: E402
from polyamp_torch._modules import APPLIED  # noqa: E402

RULE = Predictive(per_module=True)
pytestmark = [
    pytest.mark.filterwarnings("ignore::polyamp.SkippedStepWarning"),
    pytest.mark.filterwarnings(  # torch.compile makes one to trace any autograd.Function
        "ignore:.*should not be instantiated:DeprecationWarning"
    ),
]


def deep(layers: int = 16) -> nn.Sequential:
    """Sigmoid layers: sixteen of them make gradients shrink by 45 bits from last to first."""
    torch.manual_seed(0)
    parts = [layer for _ in range(layers) for layer in (nn.Linear(64, 64), nn.Sigmoid())]
    return nn.Sequential(*parts, nn.Linear(64, 10))


def small() -> nn.Sequential:
    """The same in six layers: small weights make gradients shrink by 40 bits."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Linear(64, 16), nn.Sigmoid(), nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 16)),
        *(nn.Sigmoid(), nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 10)),
    )
    with torch.no_grad():
        for layer in net[2::2]:
            layer.weight.mul_(2.0**-8)
    return net


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(2)
    return torch.rand(64, 64, generator=source), torch.randint(0, 10, (64,), generator=source)


def loss_of(net: nn.Module) -> torch.Tensor:
    x, y = batch()
    return nn.functional.cross_entropy(net(x).float(), y)


def train(net: nn.Module, scaler: amp.GradScaler, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(net)).backward()
        scaler.step(optimizer)
        scaler.update()


def gradients(net: nn.Module, scale: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Unscaled gradients of every layer's output and of the parameters, in float64."""
    outputs: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.retain_grad()
        outputs.append(out)

    handles = [layer.register_forward_hook(keep) for layer in net]
    net.zero_grad()
    (loss_of(net) * scale).backward()
    for handle in handles:
        handle.remove()
    return (
        [out.grad.double() / scale for out in outputs],
        [p.grad.double() / scale for p in net.parameters()],
    )


def lost(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Share of the nonzero entries that are 0; 1 where one is not finite."""
    if not all(bool(torch.isfinite(g).all()) for g in found):
        return 1.0
    gone = sum(int(((a != 0) & (b == 0)).sum()) for a, b in zip(exact, found, strict=True))
    return gone / sum(int((a != 0).sum()) for a in exact)


def scaled_model(
    net: nn.Sequential | None = None, policy: Any = "fp16"
) -> tuple[nn.Sequential, amp.GradScaler, Any]:
    net = amp.apply_policy(small() if net is None else net, policy)
    scaler = amp.GradScaler("cpu", rule=RULE, model=net)
    return net, scaler, torch.optim.SGD(net.parameters(), 0.0)


def test_one_scale_loses_activation_gradients_and_powers_of_two_keep_them() -> None:
    exact, exact_weights = gradients(deep(), 1.0)
    single = amp.apply_policy(deep(), "fp16")
    tried = [gradients(single, 2.0**k) for k in range(8, 24)]
    usable = [outputs for outputs, weights in tried if lost(weights, exact_weights) < 1.0]
    assert min(lost(outputs, exact) for outputs in usable) > 0.2
    net, scaler, optimizer = scaled_model(deep())
    train(net, scaler, optimizer, 30)
    found, weights = gradients(net, scaler.get_scale())
    assert lost(found, exact) < 0.001
    assert lost(weights, exact_weights) < 0.001
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(weights, exact_weights, strict=True)]
    assert max(errors) < 0.01
    shifts = scaler.module_shifts
    assert len(shifts) == 17
    assert shifts["32"] < 0
    assert shifts["0"] > 30
    assert scaler._modules.changes <= 3
    assert scaler.state.skipped == 0


def test_a_narrow_model_gets_none() -> None:
    net, scaler, optimizer = scaled_model(deep(2))
    train(net, scaler, optimizer, 60)
    assert scaler.module_shifts == {}
    assert scaler._modules.changes == 0


@pytest.mark.parametrize("policy", [None, "float32", "bf16"])
def test_other_formats_are_bit_for_bit_as_without(policy: str | None) -> None:
    def weights(rule: Predictive) -> list[torch.Tensor]:
        net = small() if policy is None else amp.apply_policy(small(), policy)
        scaler = amp.GradScaler("cpu", rule=rule, model=net)
        train(net, scaler, torch.optim.SGD(net.parameters(), 1.0), 12)
        assert scaler.module_shifts == {}
        scaler.scale(loss_of(net)).backward()
        return [p.grad for p in net.parameters()]

    pairs = zip(weights(RULE), weights(Predictive()), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_other_modules_of_a_mixed_map_are_left_alone() -> None:
    rules = PolicyMap({"0": "float32", "6": "bf16"}, default="fp16")
    net, scaler, optimizer = scaled_model(policy=rules)
    train(net, scaler, optimizer, 30)
    assert set(scaler.module_shifts) == {"2", "4", "8"}
    applied = {path: module.__dict__[APPLIED].policy for path, module in net.named_modules()}
    for path in ("0", "6"):
        assert applied[path] == rules.policy_for(path)
    assert applied["2"] == Policy.parse(f"fp16@2^{scaler.module_shifts['2']}")
    assert {applied[path].compute_dtype for path in ("", "1", "3")} == {"float32"}


def test_the_model_is_needed_and_its_parameters_wide() -> None:
    with pytest.raises(RuleError, match="per_module=True needs the model"):
        amp.GradScaler("cpu", rule=RULE)
    half = amp.apply_policy(deep(1), "O3")
    with pytest.raises(RuleError, match="cannot go with float16 parameters"):
        amp.GradScaler("cpu", rule=RULE, model=half)
    amp.GradScaler("cpu", rule=RULE, enabled=False)
    net = deep(1)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    with pytest.raises(RuleError, match="cannot go with float16 parameters"):
        amp.Trainer(net, optimizer, loss_of, policy="O3", rule=RULE)
    assert next(net.parameters()).dtype == torch.float32


@pytest.mark.parametrize("cut", [5, 6, 13])
def test_saved_and_gone_on_equals_uninterrupted(cut: int) -> None:
    def run(stop: int | None) -> tuple[list[torch.Tensor], Any, dict[str, int]]:
        net, scaler, _ = scaled_model()
        optimizer = torch.optim.SGD(net.parameters(), 0.5)
        train(net, scaler, optimizer, 30 if stop is None else stop)
        if stop is not None:
            saved = json.loads(json.dumps(scaler.state_dict()))
            weights = copy.deepcopy(net.state_dict())
            net, scaler, _ = scaled_model()
            net.load_state_dict(weights)
            scaler.load_state_dict(saved)
            train(net, scaler, torch.optim.SGD(net.parameters(), 0.5), 30 - stop)
        return list(net.parameters()), scaler.to_dict(), scaler.module_shifts

    want, got = run(None), run(cut)
    assert got[1:] == want[1:]
    assert all(torch.equal(a, b) for a, b in zip(got[0], want[0], strict=True))
    assert want[2]["0"] > 20


def test_portable_form() -> None:
    net, scaler, optimizer = scaled_model()
    train(net, scaler, optimizer, 20)
    saved = json.loads(json.dumps(scaler.to_dict()))
    again = amp.GradScaler.from_dict(saved, "cpu", model=amp.apply_policy(small(), "fp16"))
    assert again.to_dict() == saved
    assert again.module_shifts == scaler.module_shifts
    with pytest.raises(RuleError, match="needs the model"):
        amp.GradScaler.from_dict(saved, "cpu")
    with pytest.raises(StateError, match="has no model"):
        amp.GradScaler("cpu").load_state_dict(scaler.state_dict())
    for modules, message in (
        ({"shifts": {"40": 3}, "due": 1, "changes": 1}, "saved for 40"),
        ({"shifts": {"0": 300}, "due": 1, "changes": 1}, "whole numbers from -126"),
        ({"shifts": {}, "due": -1, "changes": 1}, "due must be a count"),
        ({"shifts": {}, "due": 1}, "missing key changes"),
        ([], "modules must be a dict"),
    ):
        before = again.to_dict()
        with pytest.raises(StateError, match=message):
            again.load_state_dict({**saved, "modules": modules})
        assert again.to_dict() == before


def test_a_copy_measures_nothing_and_a_new_policy_is_followed() -> None:
    net, scaler, optimizer = scaled_model()
    train(net, scaler, optimizer, 5)
    assert scaler._modules._sampling
    twin = copy.deepcopy(net)
    loss_of(twin).backward()
    assert not any(m.__dict__["forward"].args[1].noted for m in twin if isinstance(m, nn.Linear))
    train(net, scaler, optimizer, 10)
    assert scaler.module_shifts
    amp.apply_policy(net, "bf16")
    train(net, scaler, optimizer, 1)
    assert scaler.module_shifts == {}
    amp.apply_policy(net, "fp16")
    train(net, scaler, optimizer, 20)
    assert scaler.module_shifts["0"] > 30
    assert copy.deepcopy(scaler).module_shifts == {}


def test_tied_and_shared_modules() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small()
            self.twice = nn.Linear(64, 64)
            self.again = self.twice
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
            self.b.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(self.b(self.a(self.again(self.twice(x)))))

    torch.manual_seed(1)
    net = amp.apply_policy(Tied(), "fp16")
    scaler = amp.GradScaler("cpu", rule=RULE, model=net)
    train(net, scaler, torch.optim.SGD(net.parameters(), 0.0), 30)
    assert {"twice", "body.0"} <= set(scaler.module_shifts)
    assert not {"a", "b", "again"} & set(scaler.module_shifts)


class Gain(nn.Module):
    """A unit inside a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.inner = nn.Parameter(torch.ones(16)), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.gain


def test_a_unit_inside_another_is_measured_at_the_scale_outside() -> None:
    net = small()
    net[2] = Gain()
    net, scaler, optimizer = scaled_model(net)
    train(net, scaler, optimizer, 60)
    shifts = scaler.module_shifts
    assert abs(shifts["2"] - shifts["2.inner"]) <= 6
    assert scaler._modules.changes <= 3


def test_under_torch_compile(fresh_compiler: Any) -> None:
    net = amp.apply_policy(small(), "fp16")
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    scaler = amp.GradScaler("cpu", rule=RULE, model=compiled)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    train(compiled, scaler, optimizer, 8)
    assert scaler.module_shifts["0"] > 30
    exact = gradients(small(), 1.0)[1]
    net.zero_grad()
    scaler.scale(loss_of(compiled)).backward()
    found = [p.grad.double() / scaler.get_scale() for p in net.parameters()]
    assert lost(found, exact) < 0.001


def test_trainer() -> None:
    net = small()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    trainer = amp.Trainer(
        net, optimizer, nn.CrossEntropyLoss(), fp16=True, rule=RULE, ema_decay=0.9
    )
    trainer.train([batch()] * 20, num_epochs=1)
    assert min(trainer.scaler.module_shifts.values()) < 0
    assert max(trainer.scaler.module_shifts.values()) > 20
