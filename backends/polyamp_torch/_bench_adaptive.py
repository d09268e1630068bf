"""`polyamp bench torch-selector`: a training step under Adaptive beside the same without.

    ratio = (49 * step without statistics + step with them) / 50, over a plain step

each a case of its own, side by side. All compute in bfloat16 under the same policy.
"""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn import functional as F

from polyamp._selection import BRAIN, Capabilities
from polyamp.bench.harness import Case, Tell, corrected_ratio, interleaved, ratio
from polyamp.bench.report import Report, Row
from polyamp_torch._adaptive import Adaptive
from polyamp_torch._bench import report
from polyamp_torch._cast import default_device_type
from polyamp_torch._demo_models import ResNet, Transformer
from polyamp_torch._modules import apply_policy

LIMIT = 1.02
EVERY = 50
_SYMBOLS, _CONTEXT, _BATCH = 96, 32, 128


def _model(name: str, device: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "transformer":
            model: nn.Module = Transformer(_SYMBOLS, _CONTEXT, width=64, depth=2, heads=4)
            text = torch.randint(0, _SYMBOLS, (_BATCH, _CONTEXT + 1))
            return model.to(device), text[:, :-1].to(device), text[:, 1:].to(device)
        images, targets = torch.rand(_BATCH, 8, 8), torch.randint(0, 10, (_BATCH,))
        return ResNet(10, 16, 1).to(device), images.to(device), targets.to(device)


def case(name: str, device: str, kind: str) -> Case:
    """One training step with SGD; `kind` is plain, unsampled or sampled."""
    model, inputs, targets = _model(name, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    adaptive = None
    if kind == "plain":
        apply_policy(model, "bf16")
    else:
        can = Capabilities(frozenset({BRAIN}))
        every = 1 if kind == "sampled" else 10**9
        adaptive = Adaptive(model, capabilities=can, every=every)

    def run() -> float:
        _wait(device)
        start = time.perf_counter()
        optimizer.zero_grad()
        outputs = model(inputs).float()
        loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if adaptive is not None:
            adaptive.step()
        _wait(device)
        return time.perf_counter() - start

    return run


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def torch_selector(quick: bool, tell: Tell) -> Report:
    """The ratio for the demo's two models."""
    rounds, device = 40 if quick else 200, default_device_type()
    rows = []
    for name in ("transformer", "resnet"):
        tell(f"torch-selector: {name}, {rounds} rounds of 4 steps")
        kinds = {"unsampled": "unsampled", "sampled": "sampled", "plain": "plain", "again": "plain"}
        cases = {label: case(name, device, kind) for label, kind in kinds.items()}
        times = interleaved(cases, rounds, warmup=5)
        pairs = zip(times["unsampled"], times["sampled"], strict=True)
        ours = [((EVERY - 1) * step + sampled) / EVERY for step, sampled in pairs]
        found = corrected_ratio(ours, times["plain"], times["again"])
        extra = ratio(times["sampled"], times["plain"])
        rows += [
            Row(f"{name}, ratio", found.value, "ratio", 1.0, LIMIT),
            Row(f"{name}, ratio, low", found.low, "ratio"),
            Row(f"{name}, ratio, high", found.high, "ratio"),
            Row(f"{name}, a step with statistics", extra.value, "ratio", 1.0),
        ]
    return report(
        "torch-selector",
        rows,
        f"bfloat16, batch {_BATCH}; statistics in one of {EVERY} steps; peer: the same policy"
        " without Adaptive, corrected by its ratio to itself.",
    )
