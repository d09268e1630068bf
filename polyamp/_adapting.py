"""What every backend's Adaptive does alike: checks its arguments, decides, saves."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from polyamp._errors import PolyampError, StateError
from polyamp._formats import shown
from polyamp._module_scales import ModuleScales, with_shifts
from polyamp._policy_map import PolicyMap
from polyamp._select import Selector
from polyamp._selection import BRAIN, HALF, SINGLE, Capabilities, Selection
from polyamp._statistics import ModuleStatistics

DEFAULT = Selector()
RECOVERY = 5
"""Steps after a skipped one in which gradients are not judged: the loss scale has just been cut."""


Saved = tuple[Selection, dict[str, int]]
"""The selection, and the counts by name."""


class Adapting:
    """A selector at work during a training, whatever the framework.

    Args:
        families: of every module by path, None for those of no family.
        capabilities: of the device.
        selector: the thresholds; or `ModuleScales`.
        every: steps between two samples, 1 or more.
        max_changes: policies applied at most; then the model keeps what it has, with a warning.

    Attributes:
        selection: the decision for every module, and why.
        statistics: of the last sample, by path.
        steps: steps done.
        changes: policies applied so far, the first one not counted.

    Raises:
        PolyampError: an argument of another type or outside its range.
        RuleError: as `Selector.start`.
    """

    def __init__(
        self,
        families: Mapping[str, str | None],
        capabilities: Capabilities,
        selector: Selector | ModuleScales,
        every: int,
        max_changes: int,
    ) -> None:
        check_arguments(selector, capabilities, every=every, max_changes=max_changes)
        self.selector, self.every, self.max_changes = selector, every, max_changes
        self.capabilities = capabilities
        self.selection = selector.start(families, capabilities)
        self.statistics: dict[str, ModuleStatistics] = {}
        self.steps, self.changes = 0, 0

    def is_to_count(self, at_once: int = 1) -> bool:
        """Whether steps skipped so far are to be counted now: a skip from here to the next sample
        keeps its gradients from being judged.

        Args:
            at_once: steps that are done together.
        """
        return self.every > RECOVERY and (self.steps + RECOVERY) % self.every < at_once

    def decide(self, statistics: Mapping[str, ModuleStatistics], gradients: bool) -> bool:
        """Take a sample of step `steps`; returns whether a decision changed.

        Args:
            statistics: by path.
            gradients: whether they are judged; not so in the steps after a skipped one.
        """
        self.statistics = dict(statistics)
        if self.changes >= self.max_changes:
            return False
        before = self.selection
        self.selection = self.selector.decide(
            statistics, before, self.capabilities, self.steps, gradients
        )
        return [c[:2] for c in self.selection.choices.values()] != [
            c[:2] for c in before.choices.values()
        ]

    def rules(self, paths: Iterable[str]) -> PolicyMap:
        """The decisions as policies.

        Args:
            paths: of all modules, "" for the model itself: under `ModuleScales` those that have no
                power of two while others have are in float32, as gradients pass through them.
        """
        if not isinstance(self.selector, ModuleScales):
            return self.selection.policy_map()
        shifts = {p: c.shift for p, c in self.selection.choices.items() if c.level == 1}
        return with_shifts(PolicyMap(default="16-mixed"), paths, shifts)

    def changed(self, stacklevel: int = 2) -> None:
        """Count a policy that was applied; warns where it was the last one allowed."""
        self.changes += 1
        if self.changes >= self.max_changes:
            warnings.warn(
                f"the formats were changed {self.changes} times (max_changes): they stay now",
                stacklevel=stacklevel + 1,
            )

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

    def read_dict(self, data: Mapping[str, Any], also: tuple[str, ...] = ()) -> Saved:
        """What `to_dict` wrote, checked; nothing is changed.

        Args:
            also: further keys that the backend writes, counts.

        Raises:
            StateError: not such a dict, of another selector, of a model with other modules, or with
                formats that this device does not compute in; names it.
        """
        from polyamp._interchange import check_header, check_keys

        values = check_header(data, "adaptive")
        check_keys(values, ["selector", "selection", "steps", "changes", *also], "adaptive")
        if values["selector"] != type(self.selector).__name__:
            raise StateError(
                f"adaptive: saved under {values['selector']}, this one decides by"
                f" {type(self.selector).__name__}"
            )
        selection = Selection.from_dict(values["selection"])
        if set(selection.modules) != set(self.selection.modules):
            odd = sorted(set(selection.modules) ^ set(self.selection.modules))
            raise StateError(f"adaptive: saved of a model with other modules: {', '.join(odd[:5])}")
        for path, choice in selection.choices.items():
            allowed = choice.format in (*self.capabilities.formats, SINGLE)
            if not allowed or (choice.shift and not self.capabilities.shifts):
                raise StateError(
                    f"adaptive: module {path!r} was saved as {choice}, which this device or backend"
                    " cannot compute in; start a new Adaptive"
                )
        for key in ("steps", "changes", *also):
            if isinstance(values[key], bool) or not isinstance(values[key], int) or values[key] < 0:
                raise StateError(f"adaptive: {key} must be a count, got {values[key]!r}")
        return selection, {key: values[key] for key in ("steps", "changes", *also)}


def check_arguments(selector: Any, capabilities: Any, **counts: Any) -> None:
    """Raise PolyampError for what is no selector, no capabilities, or no whole number from 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PolyampError(f"{name} must be a whole number from 1, got {shown(value)}")
    for name in ("start", "decide"):
        if isinstance(selector, type) or not callable(getattr(selector, name, None)):
            raise PolyampError(
                f"selector must be a Selector or a ModuleScales, got {shown(selector)}"
            )
    if not isinstance(capabilities, Capabilities):
        raise PolyampError(f"capabilities must be polyamp.Capabilities, got {shown(capabilities)}")
    for name in {*capabilities.formats, *capabilities.slow}:
        if name not in (HALF, BRAIN):
            raise PolyampError(
                f"capabilities: no low format {shown(name)}; allowed: {HALF}, {BRAIN}"
            )
