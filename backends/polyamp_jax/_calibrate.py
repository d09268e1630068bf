"""Choose a policy map before training, from a few batches.

    for each batch, in float32:  gradients of loss * 2**k (k of the predictive rule), measured
    noise = how much the gradient differs from batch to batch
    for each module and low format:  the first batch again with only this module in the format
    decide once, over all samples together

The batches are compiled once; what is tried in a low format runs operation by operation, since one
compilation for every module takes longer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyamp._adapting import DEFAULT, check_arguments
from polyamp._calibration import alone, budgeted, noise_of, relative_error, to_try, worst
from polyamp._errors import PolyampError
from polyamp._policy_map import PolicyMap
from polyamp._predictive import Predictive
from polyamp._scaling import transition
from polyamp._select import Selector
from polyamp._selection import Capabilities, Selection
from polyamp._state import Signal
from polyamp._statistics import ModuleStatistics
from polyamp_jax._adaptive import families, read_statistics, units_of
from polyamp_jax._capabilities import capabilities as capabilities_of
from polyamp_jax._cast import is_floating
from polyamp_jax._gradients import measured, seeded

WIDE = PolicyMap(default="float32")


def calibrate(
    model: Any,
    loss_fn: Callable[..., Any],
    params: Any,
    batches: Iterable[Any],
    *,
    has_aux: bool = False,
    gradients: bool = True,
    selector: Selector = DEFAULT,
    capabilities: Capabilities | None = None,
    share: float | None = None,
) -> PolicyMap:
    """The policy map that the model's numbers on some batches call for; `advise` says why.

        def loss_fn(policy, params, x, y):
            return criterion(amp.apply_policy(model, policy).apply({"params": params}, x), y)

        rules = amp.calibrate(amp.units(model, x), loss_fn, params, batches)
        Path("precision.toml").write_text(rules.to_toml())      # to keep, and use again

    Args:
        model: a flax.nnx or equinox module, or what `units` gave (flax.linen).
        loss_fn: `(policy, params, *batch)` gives the loss, f32, a mean over the batch; applies the
            policy to the model inside. Pure: it is traced, and called several times.
        params: what is differentiated; any pytree of the model's parameters, float32. Not changed.
        batches: a few, representative, of equal shapes: tuples of arrays; only read once.
        has_aux: `loss_fn` gives a pair of the loss and anything else.
        gradients: False: `loss_fn` may give any arrays, and only forward ranges are judged, as for
            inference.
        selector: the thresholds.
        capabilities: of the model's device; None: measured (`capabilities`).
        share: of the model's multiply-adds, 0..1, that shall be in a low format if that can be,
            with the least error of the gradient; None: all that is safe.

    Returns:
        Policies to give to `apply_policy`; parameters and outputs in float32.

    Raises:
        PolyampError: no batch, no parameters, a share outside 0..1, a loss that is not finite in
            float32, or no module that was measured.
    """
    found = advise(
        model,
        loss_fn,
        params,
        batches,
        has_aux=has_aux,
        gradients=gradients,
        selector=selector,
        capabilities=capabilities,
        share=share,
    )
    return found.policy_map()


def advise(
    model: Any,
    loss_fn: Callable[..., Any],
    params: Any,
    batches: Iterable[Any],
    *,
    has_aux: bool = False,
    gradients: bool = True,
    selector: Selector = DEFAULT,
    capabilities: Capabilities | None = None,
    share: float | None = None,
) -> Selection:
    """What `calibrate` would choose for each module, and the statistic that made it so.

    Arguments and errors as `calibrate`. `print(amp.advise(...).table())` shows it.
    """
    if share is not None and not (type(share) in (int, float) and 0.0 <= share <= 1.0):
        raise PolyampError(f"share must be from 0 to 1, got {share!r}")
    can = capabilities_of() if capabilities is None else capabilities
    check_arguments(selector, can)
    run = _Calibration(model, loss_fn, params, has_aux, gradients)
    statistics = run.measure(batches)
    start = selector.start(families(run.units), can)
    if gradients:
        statistics = run.with_errors(statistics, selector, start, can)
    chosen = selector.calibrated(statistics, start, can)
    return chosen if share is None else budgeted(chosen, statistics, run.macs, share)


class _Pass(NamedTuple):
    gradient: np.ndarray[Any, Any]
    """All gradients, flat, unscaled, f32."""
    statistics: dict[str, ModuleStatistics]


class _Calibration:
    """Batches through a model."""

    def __init__(
        self, model: Any, loss_fn: Callable[..., Any], params: Any, has_aux: bool, gradients: bool
    ) -> None:
        self.units, self.params, self.gradients = units_of(model), params, gradients
        self.loss_fn = _first(loss_fn) if has_aux and gradients else loss_fn
        self.macs: dict[str, float] = {}
        self.noise, self.scale = math.inf, 1.0
        self._batch: tuple[Any, ...] | None = None
        self._called: list[str] = []
        self._reference = np.zeros(0, np.float32)
        fun = functools.partial(self.loss_fn if gradients else _total(loss_fn), WIDE)
        self._sample = jax.jit(
            lambda scale, params, *batch: measured(
                fun, tuple(self.units), scale, 0 if gradients else (), False, self._called
            )(params, *batch)
        )

    def measure(self, batches: Iterable[Any]) -> dict[str, ModuleStatistics]:
        """All batches in float32; see the module."""
        rule = Predictive()
        state = rule.init()
        samples: list[dict[str, ModuleStatistics]] = []
        gradients = []
        for given in batches:
            batch = tuple(given) if isinstance(given, (tuple, list)) else (given,)
            if self._batch is None:
                self._batch = batch
                for _ in range(3):  # until the rule knows it
                    state = transition(rule, state, self._signal(self._pass(batch, state)))
            found = self._pass(batch, state)
            samples.append(found.statistics)
            gradients.append(found.gradient)
            state = transition(rule, state, self._signal(found))
        if not samples:
            raise PolyampError("there was no batch to calibrate with; a generator is read once")
        self._reference, self.noise = gradients[0], noise_of(gradients)
        self.macs = {
            path: (one.work or 0.0) * (one.output.size if one.output else 0)
            for sample in reversed(samples)
            for path, one in sample.items()
        }
        known = {path for sample in samples for path in sample}
        order = [path for path in dict.fromkeys(self._called) if path in known]
        return {path: worst([s[path] for s in samples if path in s]) for path in order}

    def _pass(self, batch: tuple[Any, ...], state: Any) -> _Pass:
        self.scale = float(state.loss_scale) if self.gradients else 1.0
        loss, grads, numbers = self._sample(jnp.float32(self.scale), self.params, *batch)
        found = read_statistics(numbers, self.units)
        if not self.gradients:
            nothing: dict[str, Any] = {"gradient": None, "weight_gradient": None}
            return _Pass(self._flat(()), {p: s._replace(**nothing) for p, s in found.items()})
        if not math.isfinite(float(loss)):
            raise PolyampError(f"the loss is {loss} in float32; calibrate on sound batches")
        flat = self._flat(grads)
        if not np.isfinite(flat).all():
            raise PolyampError("a gradient is not finite in float32; calibrate on sound batches")
        return _Pass(flat, found)

    def _signal(self, found: _Pass) -> Signal:
        amax = float(np.abs(found.gradient).max(initial=0.0)) * self.scale
        return Signal(True, amax=amax)

    def _flat(self, grads: Any) -> np.ndarray[Any, Any]:
        leaves = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(grads) if is_floating(leaf)]
        flat = np.concatenate([*leaves, np.zeros(0, np.float32)]) / np.float32(self.scale)
        return np.asarray(flat, np.float32)

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
            if start.modules[path].family is None:
                errors = [
                    (choice.format, self._error(alone(path, choice, self.units)) / self.noise)
                    for choice in to_try(first.modules[path].choice, can)
                ]
                found[path] = one._replace(errors=tuple(errors))
        return found

    def _error(self, rules: PolicyMap) -> float:
        """Relative error of the first batch's gradient under `rules`."""
        fun = functools.partial(self.loss_fn, rules)
        _, grads = seeded(fun, jnp.float32(self.scale), 0, False)(self.params, *(self._batch or ()))
        return relative_error(self._flat(grads), self._reference)


def _first(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: loss_fn(*args)[0]


def _total(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The sum of what `fun` gives: its derivative makes the modules' numbers come back."""

    def total(*args: Any) -> jax.Array:
        leaves = [leaf for leaf in jax.tree.leaves(fun(*args)) if is_floating(leaf)]
        return sum((leaf.astype(jnp.float32).sum() for leaf in leaves), jnp.float32(0.0))

    return total
