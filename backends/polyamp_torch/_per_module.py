"""`Predictive(per_module=True)` at work: powers of two for a model's float16 modules.

    every 50 steps, and 5 steps after a skip or a change:
        measure one step (`Watch`), decide (`polyamp._module_scales.module_shifts`)
        if a power of two changed: apply the model's policy map anew, with them

A skipped step has lowered the loss scale, and gradients are small until it has recovered. Where
torch.distributed is initialized the statistics are reduced over all ranks, so that all change at
the same step.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping

import torch

from polyamp._errors import RuleError, StateError
from polyamp._module_scales import SavedShifts, module_shifts, with_shifts
from polyamp._policy_map import PolicyMap
from polyamp._scaling import Rule
from polyamp._selection import HALF
from polyamp._statistics import ModuleStatistics, largest_gradient, overflowed
from polyamp_torch._dtypes import LOW
from polyamp_torch._modules import APPLIED, apply_policy, rules_of
from polyamp_torch._watch import Watch, family_of
from polyamp_torch._wrappers import unwrapped

Module = torch.nn.Module

EVERY = 50
"""Steps between two samples."""
SOON = 5
"""Steps to the next one after a skip or a change."""
MOST = 64
"""Changes; then the model keeps what it has. Under torch.compile each is a recompilation."""


def check_per_module(rule: Rule, rules: PolicyMap) -> None:
    """Refuse a map whose float16 modules a rule with per_module=True cannot give powers of two.

    Raises:
        RuleError: parameters in a low format.
    """
    if not getattr(rule, "per_module", False):
        return
    for policy in rules.policies:
        if policy.compute_dtype == HALF and policy.param_dtype in LOW:
            raise RuleError(
                f"per_module=True cannot go with {policy.param_dtype} parameters, whose gradients"
                f" have no room for it (policy {str(policy)!r}); allowed: params=float32"
            )


def modules_of(rule: Rule, model: Module | None) -> Modules | None:
    """`Modules` where the rule asks for them.

    Raises:
        RuleError: it does and there is no model, or as `check_per_module`.
    """
    if not getattr(rule, "per_module", False):
        return None
    if not isinstance(model, Module):
        raise RuleError(
            f"a rule with per_module=True needs the model: GradScaler(rule=..., model=model); got"
            f" {type(model).__name__}"
        )
    return Modules(rule, model)


class Modules:
    """Measures a model's float16 modules and gives them powers of two; see the module.

    The model's policy map may be replaced at any time; what is applied here starts from it.
    Modules that compute in another format, norms, and those with tied parameters get no power.
    """

    def __init__(self, rule: Rule, model: Module) -> None:
        self.rule, self.model = rule, model
        self.shifts: dict[str, int] = {}
        self.due, self.changes = SOON, 0
        self._watch: Watch | None = None
        self._sampling = False
        self._mark: object = self
        self._follow()

    def _follow(self) -> None:
        """Start anew from the policies that the model has, where they are not those known."""
        root = unwrapped(self.model)
        mark = root.__dict__.get(APPLIED)
        if mark is self._mark:
            return
        base = rules_of(root) or PolicyMap()
        check_per_module(self.rule, base)
        self.stop()
        self._mark, self._base = mark, base
        self.shifts, self.due, self._sampling = {}, SOON, False
        self._units = _units(root, base)
        if self._units:
            self._watch = Watch(self.model)

    def step(self, skipped: bool) -> None:
        """Say that an optimizer step is over."""
        self._follow()
        if self._watch is None:
            return
        if self._sampling:
            self._sampling, self.due = False, EVERY
            self._decide(self._watch.end())
        else:
            self.due -= 1
        if skipped:
            self.due = min(self.due, SOON)
        self._begin_if_due()

    def stop(self) -> None:
        """Watch the model no longer; it keeps its policies."""
        if self._watch is not None:
            self._watch.remove()
        self._watch = None

    def save(self) -> SavedShifts:
        """What to save."""
        return SavedShifts(dict(self.shifts), self.due, self.changes)

    def check(self, saved: SavedShifts) -> None:
        """Refuse what was saved of another model.

        Raises:
            StateError: a module is not there, or computes in another format than float16 now.
        """
        self._follow()
        odd = sorted(set(saved.shifts) - set(self._units))
        if odd:
            raise StateError(
                f"modules: shifts are saved for {', '.join(odd[:5])}, which this model does not"
                " have or does not compute in float16; apply the policy before loading"
            )

    def load(self, saved: SavedShifts) -> None:
        """Go on from what `save` gave, once `check` has passed."""
        if saved.shifts != self.shifts:
            self._apply(saved.shifts)
        self.due, self.changes = saved.due, saved.changes
        if self._sampling and self._watch is not None:
            self._watch.stop()
            self._sampling = False
        self._begin_if_due()

    def _begin_if_due(self) -> None:
        if self.due == 0 and self._watch is not None:
            self._watch.begin()
            self._sampling = True

    def _decide(self, measured: Mapping[str, ModuleStatistics]) -> None:
        if overflowed(measured) or self.changes >= MOST:
            return
        amaxes = {
            path: largest_gradient(one)
            for path, one in measured.items()
            if path in self._units and (one.gradient is not None or one.weight_gradient is not None)
        }
        new = module_shifts(amaxes, self.shifts)
        if new == self.shifts:
            return
        self._apply(new)
        self.changes, self.due = self.changes + 1, SOON
        if self.changes == MOST:
            warnings.warn(
                f"the modules' powers of two were changed {MOST} times: they stay now",
                stacklevel=4,
            )

    def _apply(self, shifts: Mapping[str, int]) -> None:
        root = unwrapped(self.model)
        names = dict(root.named_modules(remove_duplicate=False))
        first = {module: path for path, module in root.named_modules()}
        everywhere = {p: shifts[first[m]] for p, m in names.items() if first[m] in shifts}
        rules = with_shifts(self._base, names, everywhere)
        if self._watch is not None:
            self._watch.remove()
        try:
            apply_policy(self.model, rules)
        finally:
            if self._watch is not None:
                self._watch.install()
            self._mark = root.__dict__.get(APPLIED)
        self.shifts = dict(shifts)


def _units(root: Module, base: PolicyMap) -> frozenset[str]:
    """Paths of the modules that may get a power of two."""
    owners = Counter(p for m in root.modules() for p in set(m.parameters(recurse=False)))
    return frozenset(
        path
        for path, module in root.named_modules()
        if base.policy_for(path).compute_dtype == HALF
        and family_of(module) is None
        and (own := list(module.parameters(recurse=False)))
        and all(owners[param] == 1 for param in own)
    )
