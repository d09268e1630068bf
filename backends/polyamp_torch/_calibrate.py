"""Choose a policy map before training, from a few batches.

    for each batch, in float32:  forward, backward of loss * 2**k (k of the predictive rule),
                                 measure
    noise = how much the gradient differs from batch to batch
    for each module and low format:  the first batch again with only this module in the format
    decide once, over all samples together

Nothing of the model changes: weights, buffers, gradients and the random state are put back.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from polyamp._adapting import DEFAULT, check_arguments
from polyamp._calibration import alone, budgeted, to_try, worst
from polyamp._errors import PolyampError
from polyamp._formats import shown
from polyamp._policy_map import PolicyMap
from polyamp._predictive import Predictive
from polyamp._scaling import transition
from polyamp._select import Selector
from polyamp._selection import Capabilities, Choice, Selection
from polyamp._state import Signal
from polyamp._statistics import ModuleStatistics
from polyamp_torch._capabilities import capabilities as capabilities_of
from polyamp_torch._cast import map_tensors, wide
from polyamp_torch._inspect import dense
from polyamp_torch._modules import apply_policy, remove_policy, rules_of
from polyamp_torch._watch import Watch
from polyamp_torch._wrappers import unwrapped

Module = torch.nn.Module
Tensor = torch.Tensor
Loss = Callable[[Any, Any], Tensor]


def calibrate(
    model: Module,
    batches: Iterable[Any],
    criterion: Loss | None = None,
    *,
    selector: Selector = DEFAULT,
    capabilities: Capabilities | None = None,
    share: float | None = None,
) -> PolicyMap:
    """The policy map that the model's numbers on some batches call for; `advise` says why.

        rules = amp.calibrate(model, batches, criterion)
        Path("precision.toml").write_text(rules.to_toml())      # to keep, and use again
        amp.apply_policy(model, rules)

    Args:
        model: in the mode (train or eval) that it is to be used in.
        batches: a few, representative: `(input, ..., target)`; only read once. Without criterion
            every element is an input.
        criterion: `criterion(outputs, target) -> loss`, a mean over the batch. None: only forward
            ranges are judged, as for inference.
        selector: the thresholds.
        capabilities: of the model's device; None: measured (`capabilities`).
        share: of the model's multiply-adds, 0..1, that shall be in a low format if that can be,
            with the least error of the gradient; None: all that is safe.

    Returns:
        Policies to give to `apply_policy`; parameters and outputs in float32. Where ranks train
        together, calibrate on one and share the map.

    Raises:
        PolyampError: no batch, no parameters, a share outside 0..1, or a loss that is not finite
            in float32.
    """
    found = advise(
        model, batches, criterion, selector=selector, capabilities=capabilities, share=share
    )
    return found.policy_map()


def advise(
    model: Module,
    batches: Iterable[Any],
    criterion: Loss | None = None,
    *,
    selector: Selector = DEFAULT,
    capabilities: Capabilities | None = None,
    share: float | None = None,
) -> Selection:
    """What `calibrate` would choose for each module, and the statistic that made it so.

    Arguments and errors as `calibrate`. `print(amp.advise(...).table())` shows it; nothing is
    changed.
    """
    if share is not None and not (type(share) in (int, float) and 0.0 <= share <= 1.0):
        raise PolyampError(f"share must be from 0 to 1, got {share!r}")
    if not isinstance(model, Module):
        raise PolyampError(f"expected a torch.nn.Module, got {shown(model)}")
    device = next(iter(model.parameters()), torch.zeros(())).device
    can = capabilities_of(device) if capabilities is None else capabilities
    check_arguments(selector, can)
    run = _Calibration(model, criterion)
    with run.undisturbed():
        statistics = run.measure(batches)
        start = selector.start(run.families, can)
        if criterion is not None:
            statistics = run.with_errors(statistics, selector, start, can)
        chosen = selector.calibrated(statistics, start, can)
    return chosen if share is None else budgeted(chosen, statistics, run.macs, share)


class _Calibration:
    """Batches through a model that is put back as it was."""

    def __init__(self, model: Module, criterion: Loss | None) -> None:
        self.model, self.root, self.criterion = model, unwrapped(model), criterion
        self.families: dict[str, str | None] = {}
        self.macs: dict[str, float] = {}
        self.noise = math.inf
        self.scale = 1.0
        self._first: Any = None
        self._reference: Tensor | None = None

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Weights, buffers, gradients, policy and random state are put back at the end."""
        rules = rules_of(self.root)
        kept = {name: b.detach().clone() for name, b in self.root.named_buffers()}
        grads = [(p, p.grad) for p in self.root.parameters()]
        devices = sorted({p.device.index or 0 for p, _ in grads if p.device.type == "cuda"})
        remove_policy(self.root)
        try:
            with torch.random.fork_rng(devices):
                yield
        finally:
            remove_policy(self.root)
            with torch.no_grad():
                for name, buffer in self.root.named_buffers():
                    buffer.copy_(kept[name])
            for param, grad in grads:
                param.grad = grad
            if rules is not None:
                apply_policy(self.root, rules)

    def measure(self, batches: Iterable[Any]) -> dict[str, ModuleStatistics]:
        """All batches in float32; see the module."""
        rule = Predictive()
        state = rule.init()
        samples: list[dict[str, ModuleStatistics]] = []
        gradients: list[Tensor] = []
        watch = Watch(self.root)
        self.families = watch.families
        try:
            for batch in batches:
                if self._first is None:
                    self._first = batch
                    state = self._settled(rule, state, batch)
                self.scale = float(state.loss_scale)
                watch.begin()
                gradient = self._pass(batch)
                samples.append(watch.end(alone=True))
                gradients.append(gradient)
                state = transition(rule, state, Signal(True, amax=_amax(gradient, self.scale)))
        finally:
            watch.remove()
        if not any(samples):
            raise PolyampError(
                "there was no batch to calibrate with, or none with entries; a generator is read"
                " once"
            )
        self._reference, self.noise = gradients[0], _noise(gradients)
        self.macs = {
            path: one.work * (one.output.size if one.output else 0)
            for sample in reversed(samples)
            for path, one in sample.items()
            if one.work is not None
        }
        paths = dict.fromkeys(path for sample in samples for path in sample)
        return {path: worst([s[path] for s in samples if path in s]) for path in paths}

    def _settled(self, rule: Predictive, state: Any, batch: Any) -> Any:
        """The rule's state once it knows the first batch."""
        for _ in range(3):
            self.scale = float(state.loss_scale)
            gradient = self._pass(batch)
            state = transition(rule, state, Signal(True, amax=_amax(gradient, self.scale)))
        return state

    def _pass(self, batch: Any, sound: bool = True) -> Tensor:
        """One batch with the random state of every other one: all gradients, flat, unscaled, f32.

        Args:
            sound: raise where a gradient is not finite.
        """
        torch.manual_seed(0)
        for param in self.root.parameters():
            param.grad = None
        inputs, target = _parts(batch, self.criterion)
        if self.criterion is None:
            with torch.no_grad():
                self.model(*inputs)
            return torch.zeros(0)
        loss = self.criterion(map_tensors(self.model(*inputs), wide), target)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise PolyampError(
                "criterion(outputs, target) must give a tensor of one number that the model's"
                f" parameters lead to, got {shown(loss)}"
            )
        if not torch.isfinite(loss.detach()).all():
            raise PolyampError(f"the loss is {loss.item()} in float32; calibrate on sound batches")
        (loss * self.scale).backward()  # type: ignore[no-untyped-call]
        flat = [
            torch.zeros(p.numel(), device=p.device)
            if p.grad is None
            else dense(p.grad.detach()).float().reshape(-1) / self.scale
            for p in self.root.parameters()
            if p.requires_grad
        ]
        gradient = torch.cat(flat) if flat else torch.zeros(0)
        if sound and not torch.isfinite(gradient).all():
            raise PolyampError("a gradient is not finite in float32; calibrate on sound batches")
        return gradient

    def with_errors(
        self,
        statistics: dict[str, ModuleStatistics],
        selector: Selector,
        start: Selection,
        can: Capabilities,
    ) -> dict[str, ModuleStatistics]:
        """The statistics with the errors of the low formats that they allow."""
        first = selector.calibrated(statistics, start, can)
        found = dict(statistics)
        for path, one in statistics.items():
            if start.modules[path].family is not None:
                continue
            errors = [
                (choice.format, self._error(path, choice) / self.noise)
                for choice in to_try(first.choices[path], can)
            ]
            found[path] = one._replace(errors=tuple(errors))
        return found

    def _error(self, path: str, choice: Choice) -> float:
        """Relative error of the gradient with only one module as chosen."""
        apply_policy(self.root, alone(path, choice, self.families))
        try:
            gradient = self._pass(self._first, sound=False)
        finally:
            remove_policy(self.root)
        reference = self._reference
        if reference is None or not torch.isfinite(gradient).all():
            return math.inf
        size = float(reference.norm())
        return float((gradient - reference).norm()) / size if size else 0.0


def _parts(batch: Any, criterion: Loss | None) -> tuple[tuple[Any, ...], Any]:
    if criterion is None:
        return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), None
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise PolyampError(
            f"with a criterion a batch is (input, ..., target), got {type(batch).__name__}"
        )
    *inputs, target = batch
    return tuple(inputs), target


def _amax(gradient: Tensor, scale: float) -> float:
    return float(gradient.abs().max()) * scale if gradient.numel() else 0.0


def _noise(gradients: list[Tensor]) -> float:
    """Relative standard deviation of a batch's gradient; infinite where it is not known."""
    if len(gradients) < 2 or not gradients[0].numel():
        return math.inf
    stack = torch.stack(gradients)
    mean = stack.mean(0)
    deviation = float((stack - mean).pow(2).sum().sqrt()) / math.sqrt(len(gradients) - 1)
    size = float(mean.norm())
    return deviation / size if size and deviation else math.inf
