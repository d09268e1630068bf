"""Small training situations for the tests of the PyTorch GradScaler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import polyamp.torch as amp

INF, NAN = float("inf"), float("nan")

Optimizer = torch.optim.Optimizer
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "plain": lambda params, **kw: torch.optim.SGD(params, **({"lr": 1.0} | kw)),
    "fused": lambda params, **kw: torch.optim.SGD(params, **({"lr": 1.0, "fused": True} | kw)),
}


def make_scaler(mode: str, device: str = "cpu", **kwargs: Any) -> amp.GradScaler:
    """A scaler whose state is Python numbers (host) or 0-d tensors that nobody reads (device)."""
    scaler = amp.GradScaler(device, **kwargs)
    if mode == "device":
        scaler._force_device_mode = True
    return scaler


def parameter(*values: complex, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


def backward(
    scaler: Any, param: torch.Tensor, slope: float = 1.0, bad: float | None = None
) -> None:
    """Leave `slope` as the true gradient of `param`; `bad` (inf, NaN) in its first entry."""
    param.grad = None
    scaler.scale((param * slope).sum()).backward()
    if bad is not None:
        param.grad.view(-1)[0] = bad


def iterate(
    scaler: Any, optimizer: Optimizer, param: torch.Tensor, symbol: str = ".", slope: float = 1.0
) -> None:
    """One whole iteration: "." clean, "x" an infinite gradient, "n" a NaN."""
    backward(scaler, param, slope, {".": None, "x": INF, "n": NAN}[symbol])
    scaler.step(optimizer)
    scaler.update()


def scales(scaler: Any, trace: Iterable[str], kind: str = "plain") -> list[float]:
    """The scale after each step of a trace, on a fresh one-parameter problem."""
    param = parameter(0.0, 0.0)
    optimizer = OPTIMIZERS[kind]([param], lr=2.0**-20)
    out = []
    for symbol in trace:
        iterate(scaler, optimizer, param, symbol)
        out.append(scaler.get_scale())
    return out


def mlp(seed: int = 0) -> torch.nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3, bias=False)
        )


def batches(count: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    gen = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(6, 4, generator=gen), torch.randn(6, 3, generator=gen)) for _ in range(count)
    ]


def train(
    scaler: Any,
    build: Callable[[Any], Optimizer],
    trace: str,
    after: Callable[[], None] = lambda: None,
) -> tuple[torch.nn.Sequential, Optimizer]:
    """Train the small network; "x" and "n" spoil one entry of the last weight's gradient."""
    model = mlp()
    optimizer = build(model.parameters())
    for symbol, (inputs, targets) in zip(trace, batches(len(trace)), strict=True):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        if symbol != ".":
            model[2].weight.grad[1, 1] = INF if symbol == "x" else NAN
        scaler.step(optimizer)
        scaler.update()
        after()
    return model, optimizer


def tensors_of(model: torch.nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """Parameters and every tensor of the optimizer's state, in a fixed order."""
    out: list[torch.Tensor] = []
    for param in model.parameters():
        out.append(param.detach())
        state = optimizer.state[param]
        out.extend(state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor))
    return out


def same_bits(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


class HostReads(TorchDispatchMode):
    """Counts the operations that make the host wait for a device value."""

    READS = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.equal.default,
        torch.ops.aten.nonzero.default,
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.READS
        return func(*args, **(kwargs or {}))
