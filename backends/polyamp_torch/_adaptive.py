"""Adaptive: the selector at work during a training.

    every `every` steps:  measure one step (`Watch`), decide (`polyamp.Selector`)
                          if a decision changed: apply the new policy map to the live model
    after a skipped step: measure the next one too, forward ranges only: the loss scale has just
                          been lowered, and gradients are small until it has recovered. (Where the
                          skip is not known on the host, or ranks train together: not at once)

Where torch.distributed is initialized the statistics are reduced over all ranks, so that all switch
at the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from polyamp._adapting import DEFAULT, RECOVERY, Adapting, check_arguments
from polyamp._errors import PolicyError, PolyampError
from polyamp._module_scales import ModuleScales
from polyamp._policy_map import PolicyMap
from polyamp._select import Selector
from polyamp._selection import BRAIN, HALF, Capabilities, Selection
from polyamp_torch._capabilities import capabilities as capabilities_of
from polyamp_torch._modules import apply_policy, rules_of
from polyamp_torch._watch import Watch

LOW = (HALF, BRAIN)


class Adaptive(Adapting):
    """Choose each module's format while the model trains.

        adaptive = amp.Adaptive(model, scaler)
        for inputs, target in batches:
            optimizer.zero_grad()
            scaler.scale(criterion(model(inputs), target)).backward()
            scaler.step(optimizer)
            scaler.update()
            adaptive.step()

    Args:
        model: starts in the fastest format of its device throughout; has no other policy.
        scaler: a GradScaler, whose skipped steps count; None: none is known.
        selector: the thresholds; or `ModuleScales`, for float16 throughout.
        capabilities: of the model's device; None: measured (`capabilities`).
        every: steps between two samples, 1 or more.
        max_changes: policies applied at most; then the model keeps what it has, with a warning.
            Under torch.compile each is a recompilation.
        group: the ranks that must agree, of torch.distributed; None: all.

    Attributes:
        selection: `polyamp.Selection`: the decision for every module, and why.
        statistics: of the last sample, by path.
        steps: steps done.
        changes: policies applied so far, the first one not counted.

    Raises:
        PolyampError: the model has no parameters or is watched already, or `every` is below 1.
        PolicyError: as `apply_policy`; or the model has a policy already.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        scaler: Any = None,
        *,
        selector: Selector | ModuleScales = DEFAULT,
        capabilities: Capabilities | None = None,
        every: int = 50,
        max_changes: int = 64,
        group: Any = None,
    ) -> None:
        check_arguments(
            selector, capabilities or Capabilities(), every=every, max_changes=max_changes
        )
        if scaler is not None and not (
            callable(getattr(scaler, "is_enabled", None)) and hasattr(scaler, "last_decision")
        ):
            raise PolyampError(f"scaler must be a polyamp.torch.GradScaler or None, got {scaler!r}")
        if isinstance(model, torch.nn.Module) and rules_of(model) is not None:
            raise PolicyError(
                "the model has a policy already, which Adaptive would replace; call"
                " remove_policy(model) first"
            )
        self.model, self.scaler, self.group = model, scaler, group
        self.watch = Watch(model)
        try:
            device = next(model.parameters()).device
            can = self._alike(device) if capabilities is None else capabilities
            super().__init__(self.watch.families, can, selector, every, max_changes)
            self._rules: PolicyMap | None = None
            self._apply(self._map())
        except BaseException:
            self.watch.remove()
            raise
        self._since_skip, self._skips, self._sampling = RECOVERY + 1, 0, False
        self._begin()

    def step(self) -> Selection:
        """Say that an optimizer step is over, applied or skipped; returns the selection.

        Call it once a step, last: after `scaler.update()`.
        """
        self.steps += 1
        skipped = self._skipped()
        self._since_skip = 0 if skipped else min(self._since_skip + 1, RECOVERY + 1)
        if self._sampling:
            self._sampling = False
            if rules_of(self.model) != self._rules:
                raise PolicyError(
                    "the model's policy was changed by hand under Adaptive: call adaptive.remove()"
                    " before, and make a new one after"
                )
            before, self._skips = self._skips, self._count()
            (fresh,) = self._on_any_rank(self._since_skip <= RECOVERY or self._skips > before)
            if self.decide(self.watch.end(self.group), gradients=not fresh):
                self._apply(self._map())
                self.changed()
        if skipped is None and self.is_to_count():
            self._skips = self._count()
        if self._is_due():
            self._begin()
        return self.selection

    def remove(self) -> None:
        """Stop: the model keeps its policy, its forwards are no longer watched."""
        self._sampling = False
        self.watch.remove()

    def to_dict(self) -> dict[str, Any]:
        """What to save: a JSON-ready dict of the selection and the counts."""
        return {**super().to_dict(), "since_skip": self._since_skip}

    def from_dict(self, data: Mapping[str, Any]) -> None:
        """Go on from what `to_dict` gave: the policies are applied to the model.

        Raises:
            StateError: not such a dict, of a model with other modules, or with formats this device
                has not. Nothing is changed.
        """
        selection, counts = self.read_dict(data, also=("since_skip",))
        before, self.selection = self.selection, selection
        try:
            self._apply(self._map())
        except BaseException:
            self.selection = before
            raise
        self.steps, self.changes = counts["steps"], counts["changes"]
        self._since_skip = counts["since_skip"]
        self.watch.stop()
        self._sampling = False
        if self._is_due():
            self._begin()

    def _map(self) -> PolicyMap:
        return self.rules(path for path, _ in self.watch.root.named_modules())

    def _begin(self) -> None:
        self.watch.begin()
        self._sampling = True

    def _is_due(self) -> bool:
        """Whether the next step is to be measured."""
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        return self.steps % self.every == 0 or (alone and self._since_skip == 0)

    def _skipped(self) -> bool | None:
        """Whether the last step was skipped; None where the host does not know it yet."""
        decision = self.scaler.last_decision if self._is_scaling() else None
        if decision is None:
            return False
        return not decision.applied if isinstance(decision.applied, bool) else None

    def _count(self) -> int:
        """Steps skipped so far, where `_skipped` does not know; waits for the device."""
        return int(self.scaler.state.skipped) if self._skipped() is None else 0

    def _is_scaling(self) -> bool:
        return self.scaler is not None and bool(self.scaler.is_enabled())

    def _alike(self, device: torch.device) -> Capabilities:
        """What the devices of all ranks can do."""
        can = capabilities_of(device)
        lacking = self._on_any_rank(*(name not in can.formats for name in LOW))
        slow = self._on_any_rank(*(name in can.slow for name in LOW))
        formats = frozenset(name for name, lost in zip(LOW, lacking, strict=True) if not lost)
        return Capabilities(formats, frozenset(n for n, s in zip(LOW, slow, strict=True) if s))

    def _on_any_rank(self, *flags: bool) -> list[bool]:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return list(flags)
        table = torch.tensor(
            flags, dtype=torch.float32, device=next(self.model.parameters()).device
        )
        torch.distributed.all_reduce(table, torch.distributed.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in table.tolist()]

    def _apply(self, rules: PolicyMap) -> None:
        if rules == self._rules and rules_of(self.model) == rules:
            return
        self.watch.remove()
        try:
            apply_policy(self.model, rules)
        finally:
            self.watch.install()
        self._rules = rules
