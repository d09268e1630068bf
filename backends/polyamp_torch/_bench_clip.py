"""`polyamp bench torch-clip`: clip_and_step beside torch's four calls, and beside no scaler."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from polyamp.bench.harness import (
    Case,
    Tell,
    corrected_ratio,
    in_fresh_python,
    interleaved,
    ratio,
)
from polyamp.bench.report import Report, Row
from polyamp.bench.shapes import Shape
from polyamp_torch._bench import _SCALE as SCALE
from polyamp_torch._bench import OPTIMIZERS, Problem, print_rows, report, syncs
from polyamp_torch._scaler import GradScaler

TORCH_LIMITS = {"sgd-fused": 0.65, "adam-fused": 0.75}
PLAIN_LIMITS = {"sgd-fused": 1.0, "adam-fused": 1.0}

_MAX_NORM = 1.0  # of gradients whose norm is 5: they are clipped
_SMALL: list[Shape] = [(8, 3), (8,), (5,)]  # counting needs no size

Way = Callable[[], object]


def torch_clip(quick: bool, tell: Tell) -> Report:
    """Measure every optimizer in a process of its own: ratios on the CPU, syncs wherever."""
    rounds = 30 if quick else 200
    rows: list[Row] = []
    for name in OPTIMIZERS:
        tell(f"torch-clip: {name}, {rounds} rounds of four ways")
        found = in_fresh_python("-m", "polyamp_torch._bench_clip", name, str(rounds))
        rows += [Row(**row) for row in found]
    return report(
        "torch-clip",
        rows,
        "scale + clip_and_step + update on ResNet-50's 161 gradient tensors (25.6M numbers),"
        " clipped from norm 5 to 1.",
        "over torch: scale + unscale_ + clip_grad_norm_ + step + update of torch.amp.GradScaler is"
        " the peer; median paired time over it, divided by its ratio to itself.",
        "over no scaler: clip_grad_norm_ + step on unscaled gradients is the peer; both intervals"
        " hold 95 %.",
        "host syncs: beyond the optimizer's own, in device mode on CPU tensors.",
    )


def ways(problem: Problem, device: str) -> dict[str, Way]:
    """Four ways to one clipped step, by name; "alone" wants gradients without a scale."""
    ours = GradScaler(device)

    def clip_and_step() -> None:
        ours.scale(problem.loss)
        ours.clip_and_step(problem.optimizer, _MAX_NORM)
        ours.update()

    def alone() -> None:
        torch.nn.utils.clip_grad_norm_(problem.params, _MAX_NORM)
        problem.optimizer.step()

    return {
        "polyamp": clip_and_step,
        "torch": four_calls(torch.amp.GradScaler(device), problem),
        "torch again": four_calls(torch.amp.GradScaler(device), problem),
        "alone": alone,
    }


def four_calls(scaler: torch.amp.GradScaler, problem: Problem) -> Way:
    """The way torch documents."""

    def run() -> None:
        scaler.scale(problem.loss)
        scaler.unscale_(problem.optimizer)
        torch.nn.utils.clip_grad_norm_(problem.params, _MAX_NORM)
        scaler.step(problem.optimizer)
        scaler.update()

    return run


def timed(problem: Problem, way: Way, scale: float) -> Case:
    """Time a way on gradients that carry `scale`, the device's work included."""
    on_cuda = problem.loss.device.type == "cuda"

    def run() -> float:
        problem.restore()
        if scale != SCALE:
            torch._foreach_mul_(problem.grads, scale / SCALE)
        if on_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        way()
        if on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return run


def measure(
    name: str, rounds: int, shapes: Sequence[Shape], devices: Sequence[str] = ("cpu",)
) -> list[Row]:
    """All rows of one optimizer on each of the devices; limits on the CPU's time, and on syncs."""
    rows: list[Row] = []
    for device in devices:
        rows += time_rows(name, rounds, shapes, device)
        rows.append(sync_row(name, device))
    return rows


def time_rows(name: str, rounds: int, shapes: Sequence[Shape], device: str = "cpu") -> list[Row]:
    """Milliseconds, and the ratios to torch's way and to no scaler with their intervals."""
    problem = Problem(OPTIMIZERS[name], shapes, device)
    cases = {
        who: timed(problem, way, 1.0 if who == "alone" else SCALE)
        for who, way in ways(problem, device).items()
    }
    times = interleaved(cases, rounds)
    ours, peer, again, alone = (times[w] for w in ("polyamp", "torch", "torch again", "alone"))
    over, own, plain = corrected_ratio(ours, peer, again), ratio(again, peer), ratio(ours, alone)
    milli = [1e3 * statistics.median(t) for t in (ours, peer, alone)]
    label = name if device == "cpu" else f"{name} on {device}"
    limits = (TORCH_LIMITS.get(name), PLAIN_LIMITS.get(name)) if device == "cpu" else (None, None)
    return [
        Row(f"{label} time, torch", milli[0], "ms", milli[1]),
        Row(f"{label} time, no scaler", milli[0], "ms", milli[2]),
        Row(f"{label} over torch", over.value, "ratio", own.value, limits[0]),
        Row(f"{label} over torch, high", over.high, "ratio", own.high),
        Row(f"{label} over no scaler", plain.value, "ratio", 1.0, limits[1]),
        Row(f"{label} over no scaler, high", plain.high, "ratio"),
    ]


def sync_row(name: str, device: str = "cpu") -> Row:
    """Host syncs in device mode of one clipped step, the optimizer's own left out; and torch's."""
    label = name if device == "cpu" else f"{name} on {device}"
    problem = Problem(OPTIMIZERS[name], _SMALL, device)
    scaler = GradScaler(device)
    scaler._force_device_mode = True

    def ours() -> None:
        scaler.scale(problem.loss)
        scaler.clip_and_step(problem.optimizer, _MAX_NORM)
        scaler.update()

    peer = four_calls(torch.amp.GradScaler(device), problem)
    limit = 0 if name.endswith("fused") else 1
    return Row(f"{label} host syncs", syncs(ours, problem), "count", syncs(peer, problem), limit)


def _main(name: str, rounds: str) -> None:
    print_rows(measure, name, rounds)


if __name__ == "__main__":
    _main(*sys.argv[1:])
