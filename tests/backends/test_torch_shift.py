"""Powers of two of modules' own, in PyTorch."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import polyamp.torch as amp  # noqa: E402
from polyamp import Capabilities, ModuleScales, PolicyError, PolicyMap  # noqa: E402

CAN = Capabilities()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(inplace=True), nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh(),
        nn.Linear(32, 4),
    )  # fmt: skip


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    x = torch.randn(64, 16, generator=source)
    return x, torch.randint(0, 4, (64,), generator=source)


def deep() -> nn.Sequential:
    """Sixteen sigmoid layers: from the last to the first, gradients shrink by 45 bits."""
    torch.manual_seed(0)
    layers = [layer for _ in range(16) for layer in (nn.Linear(64, 64), nn.Sigmoid())]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def test_a_power_of_two_per_module_brings_back_what_one_scale_loses() -> None:
    source = torch.Generator().manual_seed(2)
    x, y = torch.rand(64, 64, generator=source), torch.randint(0, 10, (64,), generator=source)

    def gradients(net: nn.Module, scale: float) -> list[torch.Tensor]:
        net.zero_grad()
        (nn.functional.cross_entropy(net(x).float(), y) * scale).backward()
        return [p.grad.double() / scale for p in net.parameters()]

    exact = gradients(deep(), 1.0)

    def lost(found: list[torch.Tensor]) -> float:
        if not all(bool(torch.isfinite(g).all()) for g in found):
            return 1.0
        gone = sum(int(((a != 0) & (b == 0)).sum()) for a, b in zip(exact, found, strict=True))
        return gone / sum(int((a != 0).sum()) for a in exact)

    best = min(lost(gradients(amp.apply_policy(deep(), "fp16"), 2.0**k)) for k in range(8, 24))
    assert best > 0.2
    net = deep()
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    scaler = amp.GradScaler("cpu", rule="auto")
    adaptive = amp.Adaptive(net, scaler, selector=ModuleScales(), capabilities=CAN, every=4)
    for _ in range(20):
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(net(x).float(), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        adaptive.step()
    found = gradients(net, scaler.get_scale())
    assert lost(found) < 1e-3
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
    assert max(errors) < 0.01
    assert adaptive.changes <= 3


@pytest.mark.parametrize("way", ["same", "copied", "pickled"])
def test_powers_of_two_leave_float32_gradients_bit_for_bit(way: str) -> None:
    def gradients(net: nn.Module) -> list[torch.Tensor]:
        x, y = batch()
        nn.functional.cross_entropy(net(x), y).backward()
        return [p.grad for p in net.parameters()]

    rules = PolicyMap({"3": "float32@2^20", "5": "float32@2^-7"}, default="float32")
    net = amp.apply_policy(model(), rules)
    if way == "copied":
        net = copy.deepcopy(net)
    elif way == "pickled":
        net = pickle.loads(pickle.dumps(net))
    assert all(torch.equal(a, b) for a, b in zip(gradients(net), gradients(model()), strict=True))
    amp.remove_policy(net)
    net.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(gradients(net), gradients(model()), strict=True))


def test_a_power_of_two_and_what_it_cannot_go_with() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

    with pytest.raises(PolicyError, match="one tied parameter, in modules with powers of two"):
        amp.apply_policy(Tied(), PolicyMap({"a": "fp16@2^4"}, default="fp16"))
    with pytest.raises(PolicyError, match=r"cannot apply @2\^4 to float16 parameters"):
        amp.apply_policy(nn.Linear(2, 2), "O3@2^4")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("way", ["same", "copied"])
@pytest.mark.parametrize("rules", [{"a": "fp32@2^4", "b": "fp32@2^4"}, {"": "fp32@2^4"}])
def test_a_tied_parameter_is_divided_once(rules: dict[str, str], way: str) -> None:
    torch.manual_seed(0)
    net, x = Tied(), torch.randn(4, 8)
    net(x).sum().backward()
    want = net.a.weight.grad.clone()
    net.zero_grad()
    default = rules.pop("", "fp32")
    amp.apply_policy(net, PolicyMap(rules, default=default))
    net = copy.deepcopy(net) if way == "copied" else net
    net(x).sum().backward()
    assert torch.equal(net.a.weight.grad, want)


def test_gradients_of_gradients_are_refused() -> None:
    net, x = amp.apply_policy(nn.Linear(8, 1), "float32@2^5"), torch.randn(4, 8).requires_grad_()
    (grad,) = torch.autograd.grad(net(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.pow(2).sum().backward()
