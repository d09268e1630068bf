"""`polyamp bench selector`: what the selector chooses, and what comes of it.

    snapshots    trainings in float32 whose gradients are scaled as the predictive rule would; each
                 sampled gradient is cast as the decision then in force says
      in float16   share of the gradient tensors
      unsafe       of those: infinite, or over 5 % of the nonzero entries flushed to 0, or a
                   relative error above 1 %; weighted by nothing, but tensors with under a millionth
                   of the gradient's squared norm do not count
      flips        decisions changed, per 1,000 samples of a module
    grad norm    the same weight gradients, unscaled, by the gradient-norm rule
    calibrated   infinite or NaN outputs of modules in 100 float16 steps under `calibrate`'s map
    adaptive     accuracy of the six hard trainings, beside float32 and plain float16 autocast

Source of the criteria: the range study in docs/selector.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyamp._errors import SkippedStepWarning
from polyamp._gradnorm import GradNormSelector
from polyamp._predictive import Predictive
from polyamp._scaling import transition
from polyamp._select import Selector
from polyamp._selection import Capabilities, Choice
from polyamp._state import Signal
from polyamp.bench.harness import Tell
from polyamp.bench.report import Report, Row
from polyamp.demo.data import load
from polyamp.demo.settings import settings_for
from polyamp_torch._adaptive import Adaptive
from polyamp_torch._bench import report
from polyamp_torch._calibrate import calibrate
from polyamp_torch._demo_models import build
from polyamp_torch._hard_models import NAMES, Hard, hard
from polyamp_torch._modules import apply_policy
from polyamp_torch._scaler import GradScaler
from polyamp_torch._watch import Watch

LOW_LIMIT, UNSAFE_LIMIT, FLIPS_LIMIT = 96.0, 1.0, 5.0
"""Percent of the gradient tensors (at least), percent of those, per 1,000 samples."""
METRIC_LIMIT = 0.5
"""Percent of float32's accuracy that may be lost."""
PLAIN_LIMIT = 3
"""Hard trainings that plain autocast may manage."""
STALLED = 0.9
"""A training with less than this share of float32's accuracy diverged or stalled."""
FLUSHED, ERROR, NEGLIGIBLE = 0.05, 0.01, 1e-12
CAN = Capabilities()
EVERY = 10


@dataclass
class Counts:
    """Of gradient tensors over all samples."""

    tensors: int = 0
    low: int = 0
    unsafe: int = 0
    samples: int = 0
    flips: int = 0
    norm_low: int = 0
    norm_wrong: int = 0
    norm_high: int = 0
    norm_needless: int = 0


@dataclass
class Snapshot:
    """The gradients of one step, scaled, by module: of its outputs (of all calls in one) and of
    each of its weights."""

    active: bool = False
    found: dict[str, list[Tensor]] = field(default_factory=dict)
    weights: dict[str, list[Tensor]] = field(default_factory=dict)

    def take(self, model: nn.Module, paths: list[str]) -> None:
        """Hook a float32 model."""
        modules = dict(model.named_modules())
        for path in paths:
            for param in modules[path].parameters(recurse=False):
                param.register_hook(self._keeper(path, "weights"))
            modules[path].register_forward_hook(self._forward(path))

    def _keeper(self, path: str, into: str) -> Callable[[Tensor], None]:
        def keep(grad: Tensor) -> None:
            if self.active:
                getattr(self, into).setdefault(path, []).append(grad.detach().clone())

        return keep

    def _forward(self, path: str) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            if self.active and output.requires_grad:
                output.register_hook(self._keeper(path, "found"))

        return hook

    def clear(self) -> None:
        """Forget the step."""
        self.found, self.weights = {}, {}


def unsafe(grad: Tensor, shift: int = 0) -> bool:
    """Whether float16 spoils a gradient that is multiplied by 2**shift."""
    scaled = grad.double() * 2.0**shift
    cast = scaled.half().double()
    nonzero = int((scaled != 0).sum())
    if not nonzero:
        return False
    if not bool(torch.isfinite(cast).all()):
        return True
    flushed = int(((cast == 0) & (scaled != 0)).sum()) / nonzero
    return flushed > FLUSHED or float((cast - scaled).norm() / scaled.norm()) > ERROR


def demo(name: str) -> Hard:
    """One of the demo's trainings in the form of a hard one."""
    settings = settings_for(name, quick=False, accelerator=False)
    task = load(name, settings.context)
    model = build(task, settings)
    inputs, targets = torch.from_numpy(task.inputs), torch.from_numpy(task.targets)
    return Hard(name, model, inputs, targets)


def loss_of(case: Hard, outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy over classes or symbols, weighted."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten()) * case.weight


def snapshots(case: Hard, steps: int, counts: Counts) -> None:
    """Train in float32 and count."""
    rule, selector = Predictive(), Selector()
    state, snapshot, watch = rule.init(), Snapshot(), Watch(case.model)
    selection = selector.start(watch.families, CAN)
    snapshot.take(case.model, [p for p, family in watch.families.items() if family is None])
    optimizer, schedule = case.optimizer(steps)
    for step, (inputs, targets) in enumerate(case.batches(steps), start=1):
        scale = float(state.loss_scale)
        snapshot.active = step % EVERY == 0
        if snapshot.active:
            watch.begin()
        optimizer.zero_grad()
        (loss_of(case, case.model(inputs), targets) * scale).backward()  # type: ignore[no-untyped-call]
        grads = [p.grad for p in case.model.parameters() if p.grad is not None]
        amax = max(float(g.abs().max()) for g in grads)
        overflow = amax >= 65520
        if snapshot.active:
            measured = watch.end()
            if not overflow:
                _count(snapshot, selection.choices, scale, counts)
                before = selection.flips
                selection = selector.decide(measured, selection, CAN, step)
                counts.samples += len(measured)
                counts.flips += selection.flips - before
            snapshot.clear()
        for grad in grads:
            grad.div_(scale)
        if case.max_norm is not None:
            nn.utils.clip_grad_norm_(case.model.parameters(), case.max_norm)
        optimizer.step()
        schedule.step()
        state = transition(rule, state, Signal(not overflow, amax=amax))
    watch.remove()


def _count(snapshot: Snapshot, choices: dict[str, Choice], scale: float, counts: Counts) -> None:
    squares = {
        p: sum(float(g.double().pow(2).sum()) for g in gs) for p, gs in snapshot.weights.items()
    }
    total = sum(squares.values())
    for path, choice in choices.items():
        heavy = squares.get(path, 0.0) >= NEGLIGIBLE * total
        outputs = [torch.cat([g.flatten() for g in gs]) for gs in [snapshot.found.get(path)] if gs]
        for grad in (*outputs, *snapshot.weights.get(path, ())):
            counts.tensors += 1
            low = choice.level < 2
            counts.low += low
            counts.unsafe += low and heavy and unsafe(grad, choice.shift)
        for grad in snapshot.weights.get(path, ()):
            mode = GradNormSelector().mode(float(grad.norm()) / scale)
            if mode == "FP16":
                counts.norm_low += 1
                counts.norm_wrong += heavy and unsafe(grad / scale)
            elif mode == "FP32":
                counts.norm_high += 1
                counts.norm_needless += not unsafe(grad)


def nonfinite_outputs(case: Hard, steps: int) -> int:
    """Outputs of modules that are infinite or NaN under `calibrate`'s map."""
    batches = list(case.batches(steps))
    some = batches[:8]
    if case.outliers:
        some = [*some, (some[0][0] * 1000.0, some[0][1])]
    criterion = lambda outputs, targets: loss_of(case, outputs, targets)  # noqa: E731
    apply_policy(case.model, calibrate(case.model, some, criterion, capabilities=CAN))
    watch, scaler = Watch(case.model), GradScaler("cpu", rule="auto")
    optimizer, _ = case.optimizer(steps)
    found = 0
    for inputs, targets in batches:
        watch.begin()
        optimizer.zero_grad()
        scaler.scale(loss_of(case, case.model(inputs).float(), targets)).backward()
        found += sum(s.output.nonfinite > 0 for s in watch.end().values() if s.output)
        scaler.step(optimizer)
        scaler.update()
    watch.remove()
    return found


def train(case: Hard, mode: str, steps: int) -> float:
    """Accuracy after a training in float32, under plain autocast (with or without torch's scaler),
    or adaptive."""
    optimizer, schedule = case.optimizer(steps)
    adaptive = None
    scaler: Any = torch.amp.GradScaler("cpu", enabled=mode == "torch's scaler")
    if mode == "adaptive":
        scaler = GradScaler("cpu", rule="auto")
        adaptive = Adaptive(case.model, scaler, capabilities=CAN)
    low = mode in ("plain autocast", "torch's scaler")
    for inputs, targets in case.batches(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=low):
            outputs = case.model(inputs)
        scaler.scale(loss_of(case, outputs.float(), targets)).backward()
        if case.max_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(case.model.parameters(), case.max_norm)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        if adaptive is not None:
            adaptive.step()
    return case.accuracy()


def selector(quick: bool, tell: Tell) -> Report:
    """Snapshots, calibration, and trainings; see the module."""
    steps = 200 if quick else 800
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkippedStepWarning)
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        rows = [*_snapshot_rows(steps, tell), *_calibrated_rows(tell), *_trained_rows(steps, tell)]
    notes = (
        f"snapshots: every {EVERY}th of {steps} steps of the demo's two and six hard trainings.",
        "float16 and bfloat16 allowed whatever their speed here; peer of unsafe: share of the"
        " gradient-norm rule's FP16 decisions that are unsafe.",
    )
    return report("selector", rows, *notes)


def _snapshot_rows(steps: int, tell: Tell) -> Iterator[Row]:
    counts = Counts()
    for name in ("digits", "text", *NAMES):
        tell(f"selector: snapshots of {name}, {steps} steps")
        snapshots(demo(name) if name in ("digits", "text") else hard(name), steps, counts)
    wide = 100.0 * (1 - counts.low / counts.tensors)
    wrong = 100.0 * counts.norm_wrong / max(counts.norm_low, 1)
    needless = 100.0 * counts.norm_needless / max(counts.norm_high, 1)
    yield Row("gradient tensors not in float16", wide, "%", None, 100.0 - LOW_LIMIT)
    yield Row(
        "unsafe of those in float16", 100.0 * counts.unsafe / counts.low, "%", wrong, UNSAFE_LIMIT
    )
    yield Row(
        "flips per 1,000 samples",
        1000.0 * counts.flips / counts.samples,
        "count",
        None,
        FLIPS_LIMIT,
    )
    yield Row("FP32 decisions of the gradient-norm rule, needless", needless, "%")


def _calibrated_rows(tell: Tell) -> Iterator[Row]:
    for name in NAMES:
        tell(f"selector: calibrate {name}")
        found = nonfinite_outputs(hard(name), 100)
        yield Row(f"{name}, calibrated, outputs not finite", found, "count", None, 0)


def _trained_rows(steps: int, tell: Tell) -> Iterator[Row]:
    managed = 0
    for name in NAMES:
        found = {}
        for mode in ("float32", "plain autocast", "torch's scaler", "adaptive"):
            tell(f"selector: {name}, {mode}, {steps} steps")
            found[mode] = train(hard(name), mode, steps)
        best = found["float32"]
        managed += found["plain autocast"] >= STALLED * best
        for mode in ("plain autocast", "torch's scaler"):
            yield Row(f"{name}, {mode}, accuracy", found[mode], "share", best)
        lost = 100.0 * (1.0 - found["adaptive"] / best)
        yield Row(f"{name}, adaptive, accuracy", found["adaptive"], "share", best)
        yield Row(f"{name}, adaptive, accuracy lost", lost, "%", 0.0, METRIC_LIMIT)
    yield Row(
        "hard trainings that plain autocast manages", managed, "count", len(NAMES), PLAIN_LIMIT
    )
