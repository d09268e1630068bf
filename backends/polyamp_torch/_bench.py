"""The PyTorch benches: `torch-step`, polyamp's GradScaler beside torch.amp.GradScaler."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import polyamp
from polyamp._presets import resolve_rule
from polyamp.bench.harness import (
    Case,
    Tell,
    corrected_ratio,
    cpu_name,
    in_fresh_python,
    interleaved,
    ratio,
)
from polyamp.bench.report import Report, Row
from polyamp.bench.shapes import Shape, resnet50_shapes
from polyamp_torch._scaler import GradScaler
from polyamp_torch._sync_count import SyncCount

Tensor = torch.Tensor

RATIO_LIMIT = 1.02
INTERVAL_LIMIT = 1.06
AMAX_LIMIT = 1.05
"""Largest ratio of a fused step under a rule that has the largest gradient measured."""

_SCALE = 2.0**16  # both scalers' first scale
_SMALL: list[Shape] = [(8, 3), (8,), (5,)]  # counting needs no size
_LR = 1e-5  # parameters stay where they are, near enough

Optimizer = torch.optim.Optimizer
OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=_LR, momentum=0.9),
    "sgd-fused": lambda params: torch.optim.SGD(params, lr=_LR, momentum=0.9, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=_LR),
    "adam-fused": lambda params: torch.optim.Adam(params, lr=_LR, fused=True),
}
SYNC_LIMITS = {name: 0 if name.endswith("fused") else 1 for name in OPTIMIZERS}
"""Host syncs that one optimizer's scale + step + update may cost on a device."""


class Problem:
    """Parameters, their scaled gradients, and one optimizer over them.

    All scalers of a comparison share one problem, the optimizer included: a scaler keeps nothing
    in any of them between two iterations, and so the same kernels run on the same memory whichever
    scaler calls them. Each with its own tensors would add what alignment and huge pages happen to
    do, which lasts for the whole process: no number of rounds averages it out.

    Gradients are written again before every iteration. Left alone they would be unscaled over and
    over, end as subnormal numbers, and slow the kernels down.
    """

    def __init__(
        self,
        make: Callable[[Sequence[Tensor]], Optimizer],
        shapes: Sequence[Shape],
        device: str = "cpu",
    ) -> None:
        source = torch.Generator().manual_seed(0)

        def normal(shape: Shape, size: float) -> Tensor:
            return (torch.randn(shape, generator=source) * size).to(device)

        self.params = [normal(shape, 0.05).requires_grad_() for shape in shapes]
        self.kept = [normal(shape, 1e-3 * _SCALE) for shape in shapes]
        self.grads = [torch.empty_like(kept) for kept in self.kept]
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad
        self.optimizer = make(self.params)
        self.loss = torch.ones((), device=device)

    def restore(self) -> None:
        """Write the scaled gradients again."""
        torch._foreach_copy_(self.grads, self.kept)

    def iterate(self, scaler: torch.amp.GradScaler) -> None:
        """What a scaler does in one training iteration, backward left out."""
        scaler.scale(self.loss)
        scaler.step(self.optimizer)
        scaler.update()

    def case(self, scaler: torch.amp.GradScaler) -> Case:
        """Time `iterate`, the device's work included."""
        wait = torch.cuda.synchronize if self.loss.device.type == "cuda" else _nothing

        def run() -> float:
            self.restore()
            wait()
            start = time.perf_counter()
            self.iterate(scaler)
            wait()
            return time.perf_counter() - start

        return run


def _nothing() -> None:
    pass


def scaler_syncs(scaler: torch.amp.GradScaler, problem: Problem) -> int:
    """Host syncs of one scale + step + update after a first one, the optimizer's own left out.

    The optimizer's own are those of its `step` without a scaler, such as Adam's look at its step
    counters, which torch keeps on the CPU.
    """
    return syncs(lambda: problem.iterate(scaler), problem)


def syncs(step: Callable[[], object], problem: Problem) -> int:
    """Host syncs of a second call of `step`, less those of the optimizer's own step."""
    problem.restore()
    step()
    problem.restore()
    together, alone = SyncCount(), SyncCount()
    with together:
        step()
    with alone:
        problem.optimizer.step()
    return together.count - alone.count


def torch_step(quick: bool, tell: Tell, rule: str = "torch") -> Report:
    """Measure every optimizer in a process of its own: ratios on the CPU, syncs wherever."""
    rounds = 40 if quick else 250
    rows: list[Row] = []
    for name in OPTIMIZERS:
        tell(f"torch-step: {name}, {rounds} rounds of three scalers")
        found = in_fresh_python("-m", "polyamp_torch._bench", name, str(rounds), rule)
        rows += [Row(**row) for row in found]
    return report(
        "torch-step" if rule == "torch" else f"torch-step --rule {rule}",
        rows,
        "scale + step + update on ResNet-50's 161 gradient tensors (25.6M numbers).",
        "ratio: median paired time over torch.amp.GradScaler, divided by the same of a second"
        " torch.amp.GradScaler, which is the peer; low and high: its 95 % interval.",
        "host syncs: beyond the optimizer's own, in device mode on CPU tensors; the peer is"
        " torch.amp.GradScaler.",
    )


def report(bench: str, rows: Sequence[Row], *notes: str) -> Report:
    """The report of one of torch's benches, with this machine and these versions."""
    device = f"cpu: {cpu_name()}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device += f"; cuda: {torch.cuda.get_device_name()}"
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "polyamp": polyamp.__version__,
    }
    return Report(bench, device, versions, rows, notes)


def measure(
    name: str,
    rounds: int,
    shapes: Sequence[Shape],
    devices: Sequence[str] = ("cpu",),
    rule: str = "torch",
) -> list[Row]:
    """All rows of one optimizer: time and syncs on each of the devices, limits on the CPU's time.

    On an accelerator the time only informs: there the optimizer takes so little of it that the
    ratio compares the launching of kernels.
    """
    rows: list[Row] = []
    for device in devices:
        rows += time_rows(name, rounds, shapes, device, rule)
        rows.append(sync_row(name, device, rule))
    return rows


def time_rows(
    name: str,
    rounds: int,
    shapes: Sequence[Shape],
    device: str = "cpu",
    rule: str = "torch",
) -> list[Row]:
    """Milliseconds and the corrected ratio with its interval, three scalers on one problem."""
    problem = Problem(OPTIMIZERS[name], shapes, device)
    scalers = {
        "torch": torch.amp.GradScaler(device),
        "torch again": torch.amp.GradScaler(device),
        "polyamp": _scaler(rule, device),
    }
    times = interleaved({who: problem.case(s) for who, s in scalers.items()}, rounds)
    ours, peer, again = times["polyamp"], times["torch"], times["torch again"]
    found, own = corrected_ratio(ours, peer, again), ratio(again, peer)
    label = _label(name, device)
    milli = [1e3 * statistics.median(t) for t in (ours, peer)]
    limits = _limits(name, device, rule)
    return [
        Row(f"{label} time", milli[0], "ms", milli[1]),
        Row(f"{label} ratio", found.value, "ratio", own.value, limits[0]),
        Row(f"{label} ratio, low", found.low, "ratio", own.low),
        Row(f"{label} ratio, high", found.high, "ratio", own.high, limits[1]),
    ]


def _scaler(rule: str, device: str) -> GradScaler:
    """Under `rule`, starting as torch's does unless the rule has a first scale of its own."""
    return GradScaler(device) if rule == "torch" else GradScaler(device, rule=rule)


def _limits(name: str, device: str, rule: str) -> tuple[float | None, float | None]:
    """Of the ratio, and of its interval's upper end."""
    if device != "cpu":
        return None, None
    if not resolve_rule(rule).wants_amax:
        return RATIO_LIMIT, INTERVAL_LIMIT
    return (AMAX_LIMIT if name.endswith("fused") else None), None


def sync_row(name: str, device: str = "cpu", rule: str = "torch") -> Row:
    """Host syncs of polyamp's scaler, in device mode, and of torch's."""
    scaler = _scaler(rule, device)
    scaler._force_device_mode = True
    ours = scaler_syncs(scaler, Problem(OPTIMIZERS[name], _SMALL, device))
    peer = scaler_syncs(torch.amp.GradScaler(device), Problem(OPTIMIZERS[name], _SMALL, device))
    return Row(f"{_label(name, device)} host syncs", ours, "count", peer, SYNC_LIMITS[name])


def _label(name: str, device: str) -> str:
    return name if device == "cpu" else f"{name} on {device}"


def print_rows(measured: Callable[..., list[Row]], name: str, rounds: str, *options: str) -> None:
    """Measure one optimizer on every device and print its rows as JSON, for the parent process."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    rows = measured(name, int(rounds), resnet50_shapes(), devices, *options)
    keys = ("name", "value", "unit", "peer", "limit")
    plain: list[dict[str, Any]] = [{key: getattr(row, key) for key in keys} for row in rows]
    print(json.dumps(plain))


def _main(name: str, rounds: str, rule: str) -> None:
    print_rows(measure, name, rounds, rule)


if __name__ == "__main__":
    _main(*sys.argv[1:])
