"""`polyamp bench closed-loop`: float16 trainings with a tiny loss under every scaling rule.

A perceptron learns a sine of its inputs; the loss is multiplied by 1e-8, as an unlucky weight of
one of several losses would. Adam does not care (its epsilon is 1e-30), float16 does: without
scaling every gradient is 0.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import nn

from polyamp._dynamic import Dynamic
from polyamp._errors import SkippedStepWarning
from polyamp._history import TwoPhase
from polyamp._scaling import Rule, Static
from polyamp.bench.harness import Tell
from polyamp.bench.report import Report, Row
from polyamp_torch._bench import report
from polyamp_torch._modules import apply_policy
from polyamp_torch._scaler import GradScaler

LIMIT = 1.02
"""Largest final loss of the predictive rule over float32's, means over the seeds."""
LOSS_WEIGHT = 1e-8
SEEDS = (0, 1, 2)
SAMPLES, INPUTS, WIDTH, BATCH = 512, 16, 64, 64

RULES: dict[str, Rule | str | None] = {
    "float32": None,
    "auto": "auto",
    "torch": "torch",
    "2**12, x2 / 2000, x0.5": Dynamic(init_scale=2.0**12),
    "two-phase": "two-phase",
    "two-phase, literal": TwoPhase(literal=True),
    "no scaling": Static(1.0),
}
"""What is tried; None: float32 throughout."""


class Trained(NamedTuple):
    """One training: mean squared error on all samples, steps skipped, scale at the end."""

    loss: float
    skipped: int
    scale: float


def train(rule: Rule | str | None, seed: int, steps: int) -> Trained:
    """Train on the CPU: in float32 for None, else in float16 under `rule`."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    )
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(SAMPLES, INPUTS, generator=source)
    targets = torch.sin(inputs @ torch.randn(INPUTS, generator=source) / 2)[:, None]
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-30)
    scaler = GradScaler("cpu", enabled=rule is not None, rule=rule)
    if rule is not None:
        apply_policy(model, "fp16")
    for _ in range(steps):
        chosen = torch.randint(0, SAMPLES, (BATCH,), generator=source)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[chosen]).float(), targets[chosen])
        scaler.scale(loss * LOSS_WEIGHT).backward()
        scaler.step(optimizer)
        scaler.update()
    with torch.no_grad():
        final = nn.functional.mse_loss(model(inputs).float(), targets).item()
    return Trained(final, scaler.state.skipped, scaler.get_scale())


def closed_loop(quick: bool, tell: Tell) -> Report:
    """Train under every rule; the peer of each row is float32."""
    steps, seeds = (200, SEEDS[:1]) if quick else (400, SEEDS)
    rows: list[Row] = []
    reference = 0.0
    for name, rule in RULES.items():
        tell(f"closed-loop: {name}, {len(seeds)} trainings of {steps} steps")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SkippedStepWarning)
            runs = [train(rule, seed, steps) for seed in seeds]
        mean = sum(run.loss for run in runs) / len(runs)
        reference = reference or mean
        limit = LIMIT if name == "auto" else None
        rows += [
            Row(f"{name}, final loss", mean, "mse", reference),
            Row(f"{name}, over float32", mean / reference, "ratio", 1.0, limit),
            Row(f"{name}, skipped", sum(run.skipped for run in runs), "count", 0),
        ]
    return report(
        "closed-loop",
        rows,
        f"a perceptron in float16, loss x {LOSS_WEIGHT:g}, Adam, {steps} steps; means over"
        f" {len(seeds)} seeds, skipped steps summed.",
    )
