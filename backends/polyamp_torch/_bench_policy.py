"""`polyamp bench torch-policy`: apply_policy and Trainer beside the same written by hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import polyamp
from polyamp._policy_pattern import OP_FAMILIES
from polyamp.bench.harness import Case, Tell, corrected_ratio, interleaved, ratio
from polyamp.bench.report import Report, Row
from polyamp_torch._bench import report
from polyamp_torch._cast import default_device_type
from polyamp_torch._demo_models import Transformer
from polyamp_torch._families import Region
from polyamp_torch._modules import apply_policy
from polyamp_torch._trainer import Trainer

POLICY_LIMIT = 1.03
TRAINER_LIMIT = 1.02
RULES = polyamp.PolicyMap(
    {"norm": "float32", "layers.*.norm?": "float32", "head": "float32"}, default="bf16-mixed"
)
_SYMBOLS, _CONTEXT, _BATCH = 96, 32, 32
_CALLS = 200


class HandNorm(nn.LayerNorm):
    """A layer norm kept in float32 by hand."""

    def forward(self, x: Tensor) -> Tensor:
        """In float32 whatever surrounds it."""
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())


class HandLinear(nn.Linear):
    """A linear layer kept in float32 by hand."""

    def forward(self, x: Tensor) -> Tensor:
        """In float32 whatever surrounds it."""
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float())


def plain_model(device: str) -> Transformer:
    """The demo's transformer, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Transformer(_SYMBOLS, _CONTEXT, width=48, depth=2, heads=4).to(device)


def by_hand(device: str) -> Transformer:
    """The transformer with float32 norms and head written into it, to run under torch.autocast."""
    model = plain_model(device)
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.__class__ = HandNorm
    model.head.__class__ = HandLinear
    return model


def batch(device: str) -> tuple[Tensor, Tensor]:
    """Random text and targets, int64 (n, context)."""
    source = torch.Generator().manual_seed(1)
    text = torch.randint(0, _SYMBOLS, (2, _BATCH, _CONTEXT), generator=source).to(device)
    return text[0], text[1]


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy in float32."""
    return F.cross_entropy(logits.float().flatten(0, -2), target.flatten())


def hand_pass(model: nn.Module, device: str) -> Callable[[], None]:
    """Forward and backward under torch.autocast."""
    inputs, target = batch(device)

    def run() -> None:
        with torch.autocast(device, torch.bfloat16):
            logits = model(inputs)
        torch.autograd.backward(loss_of(logits, target))

    return run


def policy_pass(model: nn.Module, device: str) -> Callable[[], None]:
    """Forward and backward of a model that has its policy."""
    inputs, target = batch(device)

    def run() -> None:
        torch.autograd.backward(loss_of(model(inputs), target))

    return run


def hand_step(device: str) -> Callable[[], None]:
    """A whole training step as people write it: autocast, scaler, clipping, schedule."""
    model = by_hand(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    scaler = torch.amp.GradScaler(device)
    inputs, target = batch(device)

    def run() -> None:
        with torch.autocast(device, torch.bfloat16):
            logits = model(inputs)
        torch.autograd.backward(scaler.scale(loss_of(logits, target)))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()

    return run


def trainer_step(device: str) -> Callable[[], None]:
    """The same step by Trainer."""
    model = plain_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    trainer = Trainer(
        model, optimizer, loss_of, policy=RULES, rule="torch", max_norm=1.0,
        scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer),
    )  # fmt: skip
    window = [batch(device)]

    def run() -> None:
        trainer.step(window)

    return run


def timed(run: Callable[[], None], device: str) -> Case:
    """`run` as a case of the harness, the device's work included."""

    def case() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return case


def call_rows(rounds: int) -> list[Row]:
    """Microseconds of one small operation on the CPU: what families in float32 cost there.

    Must come before the first policy of the process: what others pay is compared with before.
    """
    outside = partial(torch.autocast, "cpu", torch.bfloat16)
    inside = partial(Region, "cpu", torch.bfloat16, frozenset(OP_FAMILIES))
    before = {"exp": calls(outside, torch.exp), "neg": calls(outside, torch.neg)}
    peers = interleaved(before, rounds)
    with inside():
        pass
    by_hand = calls(outside, lambda x: x.float().exp())
    times = interleaved(
        {
            "exp": calls(outside, torch.exp),
            "neg": calls(inside, torch.neg),
            "wide": calls(inside, torch.exp),
            "hand": by_hand,
        },
        rounds,
    )
    return [
        _micro("exp in a policy, by hand", times["wide"], times["hand"]),
        _micro("neg in a policy, in autocast", times["neg"], peers["neg"]),
        _micro("exp in autocast, before", times["exp"], peers["exp"]),
    ]


def calls(context: Callable[[], AbstractContextManager[Any]], function: Any) -> Case:
    """`_CALLS` calls of `function` on eight bfloat16 numbers inside `context()`."""
    x = torch.ones(8, dtype=torch.bfloat16)

    def case() -> float:
        with context():
            start = time.perf_counter()
            for _ in range(_CALLS):
                function(x)
            return time.perf_counter() - start

    return case


def _micro(name: str, ours: list[float], peer: list[float]) -> Row:
    value, other = (1e6 * statistics.median(times) / _CALLS for times in (ours, peer))
    return Row(f"one call: {name}", value, "us", other)


def torch_policy(quick: bool, tell: Tell) -> Report:
    """Both comparisons on the default device."""
    device, rounds = default_device_type(), 30 if quick else 150
    single = call_rows(rounds)
    tell(f"torch-policy: forward and backward, {rounds} rounds")
    hands = [hand_pass(by_hand(device), device) for _ in range(2)]
    ours = policy_pass(apply_policy(plain_model(device), RULES), device)
    rows = _rows("apply_policy", hands, ours, device, rounds, POLICY_LIMIT)
    tell(f"torch-policy: training step, {rounds} rounds")
    hands = [hand_step(device) for _ in range(2)]
    rows += _rows("Trainer step", hands, trainer_step(device), device, rounds, TRAINER_LIMIT)
    rows += single
    return report(
        "torch-policy",
        rows,
        "The demo's transformer, norms and head float32, the rest bfloat16.",
        "ratio: median paired time over the same written by hand with torch.autocast, divided by"
        " that of a second one by hand, which is the peer; low and high: 95 % interval. One call:"
        " what is named after the comma is the peer.",
    )


def _rows(
    label: str,
    hands: list[Callable[[], None]],
    ours: Callable[[], None],
    device: str,
    rounds: int,
    limit: float,
) -> list[Row]:
    cases = dict(zip(("hand", "again", "ours"), [*hands, ours], strict=True))
    times = interleaved({name: timed(run, device) for name, run in cases.items()}, rounds)
    found = corrected_ratio(times["ours"], times["hand"], times["again"])
    own = ratio(times["again"], times["hand"])
    milli = [1e3 * statistics.median(times[name]) for name in ("ours", "hand")]
    return [
        Row(f"{label} time", milli[0], "ms", milli[1]),
        Row(f"{label} ratio", found.value, "ratio", own.value, limit),
        Row(f"{label} ratio, low", found.low, "ratio", own.low),
        Row(f"{label} ratio, high", found.high, "ratio", own.high),
    ]
