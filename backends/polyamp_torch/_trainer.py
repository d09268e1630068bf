"""Trainer: a training loop of one page over the parts of this package."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from polyamp._errors import PolicyError
from polyamp._policy import Policy, parse_policy
from polyamp._policy_map import PolicyMap
from polyamp._presets import resolve_rule
from polyamp._scaling import Rule
from polyamp_torch._cast import map_tensors, wide
from polyamp_torch._clip import Limit
from polyamp_torch._ema import ExponentialMovingAverage, check_decay
from polyamp_torch._masters import MasterWeights
from polyamp_torch._modules import apply_policy, rules_of
from polyamp_torch._per_module import check_per_module
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

    Each step is one window of `accumulation_steps` batches:

        for batch in window:  scale(criterion(model(inputs), target) / batches).backward()
        clip and step; where the loss is scaled, skip the whole window if a gradient is not finite
        scheduler and EMA wait on a skipped step

    Args:
        model: the policy is applied to it in place (`apply_policy`).
        optimizer: built over `model.parameters()`; wrapped in `MasterWeights` where the policy has
            master weights, or float16 parameters, whose updates need them.
        criterion: `criterion(outputs, target) -> loss`, a mean over the batch; gets outputs of at
            least float32.
        fp16, bf16: short for policy="fp16" and policy="bf16".
        policy: a policy, a policy map or a policy string. None of the three: the policy that the
            model has already, else float32.
        rule: how the loss is scaled, as in `GradScaler`; by default "auto" (`polyamp.Predictive`)
            where something computes in float16, and no scaling elsewhere. With
            `polyamp.Predictive(per_module=True)` float16 modules get powers of two of their own
            where they need them.
        scheduler: stepped after each applied step; not ReduceLROnPlateau.
        max_norm: gradients are clipped to this total norm; None: not at all.
        accumulation_steps: batches per step, which count alike, whatever their sizes.
        metric: `metric(outputs, target)`, a mean over the batch, for `evaluate`; the criterion by
            default.
        ema_decay: keep an exponential moving average of the weights in float32, updated after each
            applied step: `trainer.ema.module` has it, and `evaluate` uses it.
        progress: show a progress bar where standard output is a terminal.

    A batch is `(input, ..., target)`, tensors or nested collections of them; override `forward`
    for anything else. Modules that are in eval mode while the model trains stay in it.

    Attributes:
        model, optimizer, scaler, scheduler, ema: what to save and to load to go on later (their
            `state_dict`; the scaler also has `to_dict`).

    Raises:
        PolicyError: more than one of fp16, bf16 and policy, or what `apply_policy` refuses.
        TypeError, ValueError: an argument that is not what it should be. The model is unchanged.
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
        accumulation_steps: int = 1,
        metric: Metric | None = None,
        ema_decay: float | None = None,
        progress: bool = True,
    ) -> None:
        optimizer = getattr(optimizer, "_polyamp_masters", optimizer)
        check(model, optimizer, criterion, scheduler)
        check_count("accumulation_steps", accumulation_steps)
        if metric is not None and not callable(metric):
            raise TypeError(f"metric must be callable, got {metric!r}")
        limit = Limit.of(float("inf") if max_norm is None else max_norm, 2.0)
        if ema_decay is not None:
            check_decay(ema_decay)
        rules = _rules(model, fp16, bf16, policy)
        self.device = next(model.parameters()).device
        scaled = rules.needs_scaling or rule is not None
        rule = resolve_rule(rule or "auto")
        check_per_module(rule, rules)
        self.model = apply_policy(model, rules)
        self.scaler = GradScaler(self.device.type, enabled=scaled, rule=rule, model=model)
        masters = any(p.master_dtype or p.param_dtype == "float16" for p in rules.policies)
        wrap = masters and not isinstance(optimizer, MasterWeights)
        self.optimizer = MasterWeights(optimizer) if wrap else optimizer
        self.criterion, self.scheduler = criterion, scheduler
        self.max_norm = limit.max_norm
        self.accumulation_steps = accumulation_steps
        self.metric = criterion if metric is None else metric
        self.ema = None
        if ema_decay is not None:
            master_of = getattr(self.optimizer, "master_of", lambda param: param)
            self.ema = ExponentialMovingAverage(model, ema_decay, master_of)
        self.progress, self.epoch = progress, 0

    def train(
        self,
        dataloader: Iterable[Any],
        num_epochs: int,
        val_dataloader: Iterable[Any] | None = None,
    ) -> pd.DataFrame:
        """Train for `num_epochs` passes over `dataloader`; called again it goes on counting.

        Returns:
            One row an epoch: epoch (from 1), loss (mean over the steps, without skipped ones; NaN
            if there is none), scale (at the end; 1 where nothing is scaled), grad_norm (likewise,
            before clipping), skipped (steps), seconds, and with `val_dataloader` the metric as
            "val_" and its function's name.

        Raises:
            ValueError: an epoch without a batch (a generator is exhausted after one), or
                `num_epochs` is no whole number from 1.
        """
        import pandas as pd

        check_count("num_epochs", num_epochs)
        last = self.epoch + num_epochs
        rows = []
        while self.epoch < last:
            self.epoch += 1
            row = {"epoch": self.epoch, **self._epoch(dataloader, f"epoch {self.epoch}/{last}")}
            if val_dataloader is not None:
                row[f"val_{_name(self.metric)}"] = self.evaluate(val_dataloader)
            rows.append(row)
        return pd.DataFrame(rows)

    def _epoch(self, dataloader: Iterable[Any], title: str) -> dict[str, Any]:
        if not self.model.training:
            self.model.train()
        start, before = time.perf_counter(), self.scaler.state
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        count = 0
        with _bar(dataloader, title, self.progress) as batches:
            for window in _windows(batches, self.accumulation_steps):
                loss, norm = self.step(window)
                totals += torch.stack([loss.double(), norm.double()]).where(self._applied(), 0.0)
                count += 1
        if not count:
            raise ValueError(
                "the dataloader gave no batch; a generator is exhausted after one epoch: pass a"
                " DataLoader or a list"
            )
        skipped = self.scaler.state.skipped - before.skipped
        used = count - skipped
        loss_sum, norm_sum = totals.tolist()
        return {
            "loss": loss_sum / used if used else math.nan,
            "scale": self.scaler.get_scale(),
            "grad_norm": norm_sum / used if used else math.nan,
            "skipped": skipped,
            "seconds": time.perf_counter() - start,
        }

    def _applied(self) -> Tensor:
        """0-d bool, on the device: whether the last step was applied. Nothing waits for it."""
        last = self.scaler.last_decision
        return torch.as_tensor(True if last is None else last.applied, device=self.device)

    def step(self, window: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """One optimizer step over a window of batches, or a skip of all of them.

        Args:
            window: a list of batches.

        Returns:
            The mean loss and the norm of its gradient before clipping, 0-d, on the device. While
            the loss is scaled, the norm is not finite where the step was skipped.

        Raises:
            ValueError: an empty window.

        After any error gradients are cleared, so that the next step is a step of its own.
        """
        if not len(window):
            raise ValueError("a step needs at least one batch")
        try:
            return self._step(window)
        except BaseException:
            self.optimizer.zero_grad()
            self.scaler._abandon()
            raise

    def _step(self, window: Sequence[Any]) -> tuple[Tensor, Tensor]:
        parts: list[Tensor] = []
        for number, batch in enumerate(window, start=1):
            outputs, target = self.forward(self.model, batch)
            loss = self.criterion(outputs, target)
            loss = loss / len(window) if len(window) > 1 else loss
            self.scaler.scale(loss).backward()
            parts.append(loss.detach())
            if number < len(window) and isinstance(self.optimizer, MasterWeights):
                self.optimizer.accumulate()
        norm = self.scaler.clip_and_step(self.optimizer, self.max_norm)
        if self.scaler.is_enabled():
            self.scaler.update()
        if self.scheduler is not None:
            lr_step(self.scheduler, self.scaler)
        if self.ema is not None and self.scaler.applied(self.optimizer):
            self.ema.update()
        self.optimizer.zero_grad()
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(), norm

    def forward(self, model: torch.nn.Module, batch: Any) -> tuple[Any, Any]:
        """(outputs, in float32 where they were lower, and target) of `(input, ..., target)`."""
        if not isinstance(batch, (list, tuple)) or len(batch) < 2:
            raise TypeError(
                f"a batch is (input, ..., target), got {type(batch).__name__}; override"
                " Trainer.forward for batches of another form. step() takes a list of batches"
            )
        *inputs, target = map_tensors(tuple(batch), self._moved)
        return map_tensors(model(*inputs), wide), target

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=self.device.type != "cpu")

    @torch.no_grad()
    def evaluate(self, dataloader: Iterable[Any]) -> float:
        """Mean of the metric over the batches, weighted by their sizes, without training.

        Uses the moving average where there is one.

        Raises:
            ValueError: no batch.
        """
        model = self.model if self.ema is None else self.ema.module
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        total, count = 0.0, 0
        try:
            for batch in dataloader:
                outputs, target = self.forward(model, batch)
                size = batch_size(target)
                total += float(self.metric(outputs, target)) * size
                count += size
        finally:
            for module, mode in modes:
                module.training = mode
        if not count:
            raise ValueError("there was no batch to evaluate; a generator is exhausted after one")
        return total / count


def _rules(
    model: torch.nn.Module, fp16: bool, bf16: bool, policy: Policy | PolicyMap | str | None
) -> PolicyMap:
    if fp16 + bf16 + (policy is not None) > 1:
        raise PolicyError("give one of fp16=True, bf16=True and policy=, not several")
    if isinstance(policy, PolicyMap):
        return policy
    if policy is None:
        policy = "fp16" if fp16 else "bf16" if bf16 else None
    if policy is None:
        return rules_of(model) or PolicyMap()
    return PolicyMap(default=parse_policy(policy))


def _name(metric: Metric) -> str:
    name = getattr(metric, "__name__", type(metric).__name__)
    return "metric" if name in ("<lambda>", "partial") else name


def batch_size(target: Any) -> int:
    """Length of the first tensor in `target`; 1 for a tensor without dimensions or no tensor."""
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(len(tensor) if tensor.dim() else 1)
        return tensor

    map_tensors(target, note)
    return sizes[0] if sizes else 1


def check(model: Any, optimizer: Any, criterion: Any, scheduler: Any) -> None:
    """Refuse what `Trainer` cannot work with.

    Raises:
        TypeError, ValueError: names the argument, what came and what to do.
    """
    if not isinstance(model, torch.nn.Module) or next(model.parameters(), None) is None:
        raise TypeError(f"model must be a module with parameters, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be one torch optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("Trainer cannot step LBFGS, which calls a closure; write the loop by hand")
    if not callable(criterion):
        raise TypeError(
            f"criterion must be callable, got {type(criterion).__name__}; the order is"
            " Trainer(model, optimizer, criterion)"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TypeError("step ReduceLROnPlateau by hand, on what train() or evaluate() returns")
    known = (optimizer, getattr(optimizer, "inner", optimizer))
    over = getattr(scheduler, "optimizer", None)
    if scheduler is not None and (over is None or not callable(getattr(scheduler, "step", None))):
        raise TypeError(
            "scheduler must be a scheduler of torch.optim.lr_scheduler over this optimizer, got"
            f" {scheduler!r}"
        )
    if scheduler is not None and all(over is not o for o in known):
        raise ValueError("scheduler must be built over this optimizer")
    ids = {id(param) for param in model.parameters()}
    if isinstance(optimizer, MasterWeights):
        ids |= {id(optimizer.master_of(param)) for param in model.parameters()}
    if not any(id(param) in ids for group in optimizer.param_groups for param in group["params"]):
        raise ValueError("optimizer has no parameter of this model; build it over its parameters")


def check_count(name: str, value: Any) -> None:
    """Refuse a number of things that is no int from 1.

    Raises:
        ValueError: names it.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1, got {value!r}")


def _windows(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of `size` batches, the last one shorter if they do not come out even."""
    iterator = iter(batches)
    while window := list(islice(iterator, size)):
        yield window


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
