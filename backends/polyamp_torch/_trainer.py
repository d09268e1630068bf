"""Trainer: a training loop of one page over the parts of this package."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from polyamp._errors import PolicyError
from polyamp._policy import Policy, parse_policy
from polyamp._policy_map import PolicyMap
from polyamp._scaling import Rule
from polyamp_torch._cast import cast
from polyamp_torch._masters import MasterWeights
from polyamp_torch._modules import apply_policy
from polyamp_torch._scaler import GradScaler
from polyamp_torch._schedule import lr_step

if TYPE_CHECKING:
    import pandas as pd

Tensor = torch.Tensor
Metric = Callable[[Tensor, Tensor], Tensor | float]


class Trainer:
    """Train a model in mixed precision.

        trainer = amp.Trainer(model, optimizer, criterion, fp16=True)
        history = trainer.train(dataloader, num_epochs=3)

    Each step is one window of `accumulate` batches:

        for batch in window:  scale(criterion(model(inputs), target) / batches).backward()
        clip and step, or skip the whole window if one gradient is not finite
        scheduler and EMA wait on a skipped step

    Args:
        model: the policy is applied to it in place (`apply_policy`).
        optimizer: built over `model.parameters()`; wrapped in `MasterWeights` where the policy has
            master weights, or float16 parameters, whose updates need them.
        criterion: `criterion(outputs, target) -> loss`, a mean over the batch; gets float32.
        fp16, bf16: short for policy="fp16" and policy="bf16". Neither: float32.
        policy: a policy, a policy map or a policy string.
        rule: how the loss is scaled, as in `GradScaler`. Without it only float16 is scaled.
        scheduler: stepped after each applied step.
        max_norm: gradients are clipped to this total norm; None: not at all.
        accumulate: batches per step.
        metric: `metric(outputs, target)`, a mean over the batch, for `evaluate`; the criterion by
            default.
        ema_decay: keep an exponential moving average of the weights, in `trainer.ema`, updated
            after each applied step; `evaluate` uses it.
        progress: show a progress bar where standard output is a terminal.

    A batch is `(input, ..., target)`, tensors or nested collections of them; override `forward`
    for anything else.

    Raises:
        PolicyError: more than one of fp16, bf16 and policy, or what `apply_policy` refuses.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Callable[[Any, Any], Tensor],
        *,
        fp16: bool = False,
        bf16: bool = False,
        policy: Policy | PolicyMap | str | None = None,
        rule: Rule | str | None = None,
        scheduler: Any = None,
        max_norm: float | None = None,
        accumulate: int = 1,
        metric: Metric | None = None,
        ema_decay: float | None = None,
        progress: bool = True,
    ) -> None:
        if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
            raise ValueError(f"accumulate must be a whole number of batches, got {accumulate!r}")
        rules = _rules(fp16, bf16, policy)
        self.model = apply_policy(model, rules)
        masters = any(p.master_dtype or p.param_dtype == "float16" for p in rules.policies)
        self.optimizer = MasterWeights(optimizer) if masters else optimizer
        self.device = next(model.parameters()).device
        scaled = rules.needs_scaling or rule is not None
        self.scaler = GradScaler(self.device.type, enabled=scaled, rule=rule)
        self.criterion, self.scheduler = criterion, scheduler
        self.max_norm = float("inf") if max_norm is None else max_norm
        self.accumulate, self.metric = accumulate, criterion if metric is None else metric
        self.ema = None
        if ema_decay is not None:
            average = get_ema_multi_avg_fn(ema_decay)  # type: ignore[no-untyped-call]
            self.ema = AveragedModel(model, multi_avg_fn=average)
        self.progress = progress

    def train(
        self,
        dataloader: Iterable[Any],
        num_epochs: int,
        held_out: Iterable[Any] | None = None,
    ) -> pd.DataFrame:
        """Train for `num_epochs` passes over `dataloader`.

        Returns:
            One row an epoch: epoch (from 1), loss (mean over the applied steps), scale (at the
            end), grad_norm (mean over the applied steps, before clipping), skipped (steps),
            seconds, and with `held_out` the metric under its function's name.
        """
        import pandas as pd

        rows = []
        for epoch in range(1, num_epochs + 1):
            row = {"epoch": epoch, **self._epoch(dataloader, f"epoch {epoch}/{num_epochs}")}
            if held_out is not None:
                row[getattr(self.metric, "__name__", "metric")] = self.evaluate(held_out)
            rows.append(row)
        return pd.DataFrame(rows)

    def _epoch(self, dataloader: Iterable[Any], title: str) -> dict[str, Any]:
        self.model.train()
        start, skipped = time.perf_counter(), self.scaler.state.skipped
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        with _bar(dataloader, title, self.progress) as batches:
            for window in _windows(batches, self.accumulate):
                loss, norm = self.step(window)
                kept = torch.stack([loss.double(), norm.double(), torch.ones_like(loss).double()])
                totals += torch.where(torch.isfinite(norm + loss), kept, 0.0)
        loss_sum, norm_sum, count = totals.tolist()
        return {
            "loss": loss_sum / max(count, 1.0),
            "scale": self.scaler.get_scale(),
            "grad_norm": norm_sum / max(count, 1.0),
            "skipped": self.scaler.state.skipped - skipped,
            "seconds": time.perf_counter() - start,
        }

    def step(self, window: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """One optimizer step over a window of batches, or a skip of all of them.

        Returns:
            The mean loss and the norm of its gradient before clipping, 0-d, on the device; the
            norm is not finite where the step was skipped.
        """
        total = torch.zeros((), device=self.device)
        for batch in window:
            outputs, target = self.forward(self.model, batch)
            loss = self.criterion(outputs, target) / len(window)
            self.scaler.scale(loss).backward()
            total += loss.detach()
        norm = self.scaler.clip_and_step(self.optimizer, self.max_norm)
        if self.scaler.is_enabled():
            self.scaler.update()
        if self.scheduler is not None:
            lr_step(self.scheduler, self.scaler)
        if self.ema is not None and self.scaler.applied(self.optimizer):
            self.ema.update_parameters(self.model)
        self.optimizer.zero_grad()
        return total, norm

    def forward(self, model: torch.nn.Module, batch: Any) -> tuple[Any, Any]:
        """(outputs in float32, target) of one batch `(input, ..., target)`."""
        *inputs, target = _to(batch, self.device)
        return cast(model(*inputs), "float32"), target

    @torch.no_grad()
    def evaluate(self, dataloader: Iterable[Any]) -> float:
        """Mean of the metric over the batches, weighted by their sizes, without training."""
        model = self.model if self.ema is None else self.ema
        was_training = model.training
        model.eval()
        total, count = 0.0, 0
        for batch in dataloader:
            outputs, target = self.forward(model, batch)
            size = len(target)
            total += float(self.metric(outputs, target)) * size
            count += size
        model.train(was_training)
        return total / max(count, 1)


def _rules(fp16: bool, bf16: bool, policy: Policy | PolicyMap | str | None) -> PolicyMap:
    if fp16 + bf16 + (policy is not None) > 1:
        raise PolicyError("give one of fp16=True, bf16=True and policy=, not several")
    if isinstance(policy, PolicyMap):
        return policy
    named = "fp16" if fp16 else "bf16" if bf16 else "float32"
    return PolicyMap(default=parse_policy(named if policy is None else policy))


def _windows(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of `size` batches, the last one shorter if they do not come out even."""
    iterator = iter(batches)
    while window := list(islice(iterator, size)):
        yield window


def _to(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, Tensor):
        return tree.to(device, non_blocking=True)
    if isinstance(tree, dict):
        return {key: _to(value, device) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_to(value, device) for value in tree]
    return tree


@contextlib.contextmanager
def _bar(batches: Iterable[Any], title: str, wanted: bool) -> Iterator[Iterable[Any]]:
    """The batches, with rich's progress bar on a terminal."""
    if not wanted:
        yield batches
        return
    from rich.console import Console
    from rich.progress import track

    if not Console().is_terminal:
        yield batches
        return
    total = len(batches) if isinstance(batches, Sized) else None
    yield track(batches, title, total=total)
