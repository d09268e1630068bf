"""Adaptive: the selector at work during a training.

    plan      the next step's policy map, and whether it measures: a static argument
    update    after the step: every `every` steps read what it measured and decide
              (`polyamp.Selector`); the next plan has the new policy map if a decision changed

Nothing of the model is held here: parameters stay float32 under every plan, so parameters and
optimizer state go on as they are. Each plan is compiled once: a change costs one compilation, and
one more at the next sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyamp._adapting import DEFAULT, Adapting
from polyamp._errors import PolyampError
from polyamp._policy_map import PolicyMap
from polyamp._select import Selector
from polyamp._selection import Capabilities, Selection
from polyamp._statistics import ModuleStatistics, Statistics
from polyamp_jax._capabilities import capabilities as capabilities_of
from polyamp_jax._gradients import Plan
from polyamp_jax._state import scaler_state
from polyamp_jax._units import Unit, units
from polyamp_jax._watch import KINDS


class Adaptive(Adapting):
    """Choose each module's format while the model trains.

        adaptive = amp.Adaptive(model)

        @partial(jax.jit, static_argnames="plan")
        def train_step(params, opt_state, x, y, plan):
            def loss_fn(params): ...        # with amp.apply_policy(model, plan.policy) inside
            loss, grads, statistics = amp.value_grad_and_statistics(loss_fn, plan)(
                opt_state, params)
            params, opt_state = amp.step(tx, grads, opt_state, params, loss=loss)
            return params, opt_state, statistics

        for x, y in batches:
            params, opt_state, statistics = train_step(params, opt_state, x, y, plan=adaptive.plan)
            adaptive.update(statistics, opt_state)

    Args:
        model: a flax.nnx or equinox module, or what `units` gave (flax.linen:
            `amp.Adaptive(amp.units(model, x))`). Starts in the fastest format of its device.
        selector: the thresholds.
        capabilities: of the model's device; None: measured (`capabilities`).
        every: steps between two samples, 1 or more.
        max_changes: policies given out at most; then the model keeps what it has, with a warning.

    Attributes:
        selection: `polyamp.Selection`: the decision for every module, and why.
        statistics: of the last sample, by path.
        steps: steps done.
        changes: policies given out so far, the first one not counted.

    Raises:
        PolyampError: not a model, one without parameters, or `every` is below 1.
    """

    def __init__(
        self,
        model: Any,
        *,
        selector: Selector = DEFAULT,
        capabilities: Capabilities | None = None,
        every: int = 50,
        max_changes: int = 64,
    ) -> None:
        self.units = units_of(model)
        can = capabilities_of() if capabilities is None else capabilities
        super().__init__(families(self.units), can, selector, every, max_changes)
        self._rules = self._map()
        self._skipped: Any = 0

    @property
    def policy(self) -> PolicyMap:
        """Of the next step."""
        return self._rules

    @property
    def sampling(self) -> bool:
        """Whether the next step measures."""
        return self.steps % self.every == 0

    @property
    def plan(self) -> Plan:
        """The next step, for `apply_policy` and `value_grad_and_statistics`."""
        return Plan(self.policy, self.sampling, tuple(self.units))

    def update(self, statistics: Mapping[str, Any], opt_state: Any = None) -> Selection:
        """Say that a step of `plan` is over, applied or skipped; waits for it where it measured.

        Args:
            statistics: what the step measured; of a step that did not measure `{}`.
            opt_state: after the step, of `loss_scaled`: gradients are then not judged in a sample
                with a skipped step in it or in the 5 before (all since the last sample, where
                `every` is less), when the loss scale has just been lowered. None: they are.

        Returns:
            The selection.

        Raises:
            PolyampError: the step measured and should not have, or the other way round.
            StateError: no loss scaler in `opt_state`.
        """
        if bool(statistics) != self.sampling:
            wanted = "statistics of" if self.sampling else "no statistics in"
            raise PolyampError(f"expected {wanted} step {self.steps}: give it `adaptive.plan`")
        skipped = None if opt_state is None else scaler_state(opt_state).skipped
        due = self.sampling
        self.steps += 1
        if due:
            before, self._skipped = self._skipped, 0 if skipped is None else int(skipped)
            self._decide(read_statistics(statistics, self.units), self._skipped > int(before))
        elif skipped is not None and self.is_to_count():
            self._skipped = jnp.array(skipped, copy=True)  # the step may donate the state's own
        return self.selection

    def _map(self) -> PolicyMap:
        return self.rules(["", *self.units])

    def _decide(self, measured: Mapping[str, ModuleStatistics], fresh: bool) -> None:
        self.decide(measured, gradients=not fresh)
        rules = self._map()
        if rules != self._rules:
            self._rules = rules
            self.changed(stacklevel=3)

    def to_dict(self) -> dict[str, Any]:
        """What to save: a JSON-ready dict of the selection and the counts."""
        return {**super().to_dict(), "skipped": int(self._skipped)}

    def from_dict(self, data: Mapping[str, Any]) -> None:
        """Go on from what `to_dict` gave.

        Raises:
            StateError: not such a dict, of a model with other modules, or with formats this device
                has not. Nothing is changed.
        """
        self.selection, counts = self.read_dict(data, also=("skipped",))
        self._rules = self._map()
        self.steps, self.changes = counts["steps"], counts["changes"]
        self._skipped = counts["skipped"]


def units_of(model: Any) -> dict[str, Unit]:
    """The units of a model, or the units themselves.

    Raises:
        PolyampError: neither a model nor what `units` gives, or a model without parameters.
    """
    if isinstance(model, Mapping) and model and all(isinstance(u, Unit) for u in model.values()):
        return dict(model)
    return units(model)


def families(known: Mapping[str, Unit]) -> dict[str, str | None]:
    """The family of each unit, by path."""
    return {path: unit.family for path, unit in known.items()}


def read_statistics(
    numbers: Mapping[str, Any], known: Mapping[str, Unit]
) -> dict[str, ModuleStatistics]:
    """What a step measured, in the order of the units; waits for it. Units not called are left out.

    Args:
        numbers: of `value_grad_and_statistics`.
        known: the units.

    Raises:
        PolyampError: a path that is no unit.
    """
    wrong = [path for path in numbers if path not in known]
    if wrong:
        raise PolyampError(f"statistics of {', '.join(map(repr, wrong[:3]))}, which is no unit")
    table = jax.device_get(dict(numbers))
    found: dict[str, ModuleStatistics] = {}
    for path in (path for path in known if path in table):
        rows = np.asarray(table[path]).tolist()
        values = {
            kind: Statistics.from_raw(row) if row[2] else None
            for kind, row in zip(KINDS, rows, strict=True)
        }
        if values["output"] is not None:
            one = ModuleStatistics(work=known[path].work)
            found[path] = one._replace(**values)  # type: ignore[arg-type]
    return found
