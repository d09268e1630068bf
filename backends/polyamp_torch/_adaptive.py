"""Adaptive: the selector at work during a training.

    every `every` steps:  measure one step (`Watch`), decide (`polyamp.Selector`)
                          if a decision changed: apply the new policy map to the live model
    after a skipped step: measure the next one, forward ranges only: the loss scale has just been
                          lowered, and gradients are small until it has recovered

Where torch.distributed is initialized the statistics are reduced over all ranks, so that all switch
at the same step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from polyamp._errors import PolicyError, PolyampError, StateError
from polyamp._module_scales import ModuleScales
from polyamp._policy_map import PolicyMap
from polyamp._select import Selector
from polyamp._selection import Capabilities, Selection
from polyamp._statistics import ModuleStatistics
from polyamp_torch._capabilities import capabilities as capabilities_of
from polyamp_torch._modules import apply_policy, rules_of
from polyamp_torch._watch import Watch

DEFAULT = Selector()
RECOVERY = 5
"""Steps after a skipped one in which gradients are not judged."""


class Adaptive:
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
        scaler: whose skipped steps call for a sample; None: only every `every` steps.
        selector: the thresholds; or `ModuleScales`, for float16 throughout.
        capabilities: of the model's device; None: measured (`capabilities`).
        every: steps between two samples, 1 or more.
        max_changes: policies applied at most; then the model keeps what it has, with a warning.
            Under torch.compile each is a recompilation.
        group: the ranks that must agree, of torch.distributed; None: all.

    Attributes:
        selection: `polyamp.Selection`: the decision for every module, and why.
        statistics: of the last sample, by path.
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
        for name, value in (("every", every), ("max_changes", max_changes)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PolyampError(f"{name} must be a whole number from 1, got {value!r}")
        self.model, self.scaler, self.selector = model, scaler, selector
        self.every, self.max_changes, self.group = every, max_changes, group
        for name in ("start", "decide"):
            if isinstance(selector, type) or not callable(getattr(selector, name, None)):
                raise PolyampError(
                    f"selector must be a Selector or a ModuleScales, got {selector!r}"
                )
        if not isinstance(capabilities, Capabilities | None):
            raise PolyampError(f"capabilities must be polyamp.Capabilities, got {capabilities!r}")
        if isinstance(model, torch.nn.Module) and rules_of(model) is not None:
            raise PolicyError(
                "the model has a policy already, which Adaptive would replace; call"
                " remove_policy(model) first"
            )
        self.watch = Watch(model)
        try:
            self._start(capabilities)
        except BaseException:
            self.watch.remove()
            raise
        self._begin()

    def _start(self, capabilities: Capabilities | None) -> None:
        device = next(self.model.parameters()).device
        self.capabilities = capabilities_of(device) if capabilities is None else capabilities
        self.selection = self.selector.start(self.watch.families, self.capabilities)
        self.statistics: dict[str, ModuleStatistics] = {}
        self.changes, self.steps, self._sampling = 0, 0, False
        self._since_skip = RECOVERY
        self._rules: PolicyMap | None = None
        self._apply(self.selection.policy_map())
        self.changes = 0

    def step(self) -> Selection:
        """Say that an optimizer step is over, applied or skipped; returns the selection.

        Call it once a step, last: after `scaler.update()`.
        """
        self.steps += 1
        skipped = self._skipped()
        self._since_skip = 0 if skipped else self._since_skip + 1
        if self._sampling:
            self._sampling = False
            if rules_of(self.model) != self._rules:
                raise PolicyError(
                    "the model's policy was changed by hand under Adaptive: call adaptive.remove()"
                    " before, and make a new one after"
                )
            self.statistics = self.watch.end(self.group)
            self._decide()
        if self.steps % self.every == 0 or skipped:
            self._begin()
        return self.selection

    def remove(self) -> None:
        """Stop: the model keeps its policy, its forwards are no longer watched."""
        self._sampling = False
        self.watch.remove()

    def to_dict(self) -> dict[str, Any]:
        """What to save: a JSON-ready dict of the selection, the steps and the changes."""
        return {
            "polyamp": 1,
            "kind": "adaptive",
            "selector": type(self.selector).__name__,
            "selection": self.selection.to_dict(),
            "steps": self.steps,
            "changes": self.changes,
        }

    def from_dict(self, data: Mapping[str, Any]) -> None:
        """Go on from what `to_dict` gave: the policies are applied to the model.

        Raises:
            StateError: not such a dict, or of a model with other modules. Nothing is changed.
        """
        from polyamp._interchange import check_header, check_keys

        values = check_header(data, "adaptive")
        check_keys(values, ["selector", "selection", "steps", "changes"], "adaptive")
        if values["selector"] != type(self.selector).__name__:
            raise StateError(
                f"adaptive: saved under {values['selector']}, this one decides by"
                f" {type(self.selector).__name__}"
            )
        selection = Selection.from_dict(values["selection"])
        if set(selection.modules) != set(self.selection.modules):
            odd = sorted(set(selection.modules) ^ set(self.selection.modules))
            raise StateError(f"adaptive: saved of a model with other modules: {', '.join(odd[:5])}")
        for key in ("steps", "changes"):
            if isinstance(values[key], bool) or not isinstance(values[key], int) or values[key] < 0:
                raise StateError(f"adaptive: {key} must be a count, got {values[key]!r}")
        self._apply(selection.policy_map())
        self.selection = selection
        self.steps, self.changes = values["steps"], values["changes"]
        self._begin()

    def _begin(self) -> None:
        self.watch.begin()
        self._sampling = True

    def _skipped(self) -> bool:
        if self.scaler is None or not self.scaler.is_enabled():
            return False
        decision = getattr(self.scaler, "last_decision", None)
        # On a device the flag is there too late to be worth waiting for.
        return decision is not None and decision.applied is False

    def _decide(self) -> None:
        measured: Mapping[str, ModuleStatistics] = self.statistics
        if self._since_skip < RECOVERY:
            nothing: dict[str, Any] = {"gradient": None, "weight_gradient": None}
            measured = {path: one._replace(**nothing) for path, one in measured.items()}
        if self.changes >= self.max_changes:
            return
        before = self.selection
        self.selection = self.selector.decide(measured, before, self.capabilities, self.steps)
        if self.selection.choices != before.choices:
            self._apply(self.selection.policy_map())
            if self.changes >= self.max_changes:
                warnings.warn(
                    f"the formats were changed {self.changes} times (max_changes): they stay now",
                    stacklevel=3,
                )

    def _apply(self, rules: PolicyMap) -> None:
        if rules == self._rules and rules_of(self.model) == rules:
            return
        self.watch.remove()
        try:
            apply_policy(self.model, rules)
        finally:
            self.watch.install()
        self._rules = rules
        self.changes += 1
