"""Choose a policy map before training, from a few batches.

    for each batch, in float32:  forward, backward of loss * 2**k (k of the predictive rule),
                                 measure
    noise = how much the gradient differs from batch to batch
    for each layer and low format:  the first batch again with only this layer in the format
    decide once, over all samples together

Nothing of the model changes: every pass is a stateless call; policies are put back.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from polyamp._adapting import DEFAULT, check_arguments
from polyamp._calibration import alone, budgeted, noise_of, relative_error, to_try, worst
from polyamp._errors import PolyampError
from polyamp._policy_map import PolicyMap
from polyamp._predictive import Predictive
from polyamp._scaling import transition
from polyamp._select import Selector
from polyamp._selection import Capabilities, Choice, Selection
from polyamp._state import Signal
from polyamp._statistics import ModuleStatistics
from polyamp_keras._capabilities import capabilities as capabilities_of
from polyamp_keras._cast import cast
from polyamp_keras._gradients import value_and_gradients
from polyamp_keras._modules import APPLIED, apply_policy
from polyamp_keras._ops import FRAMEWORK, number, to_numpy
from polyamp_keras._places import places
from polyamp_keras._units import containers_of, policy_map_of
from polyamp_keras._watch import Watch

_FUNCTIONS = ("train_function", "test_function", "predict_function")


def calibrate(
    model: Any,
    batches: Iterable[Any],
    loss: Any = None,
    *,
    training: bool = True,
    selector: Selector = DEFAULT,
    capabilities: Capabilities | None = None,
    share: float | None = None,
    float32_outputs: bool | None = None,
) -> PolicyMap:
    """The policy map that the model's numbers on some batches call for; `advise` says why.

        rules = amp.calibrate(model, batches, "mse")
        Path("precision.toml").write_text(rules.to_toml())      # to keep, and use again
        amp.apply_policy(model, rules)

    Args:
        model: built, with float32 variables.
        batches: a few, representative: `(x, y)` or `(x, y, sample_weight)` as `fit` takes them,
            or a `tf.data.Dataset` of such; only read once. Without loss `x` alone will do, several
            inputs as `(inputs,)`.
        loss: a Keras loss, its name, or `loss(y_true, y_pred)`, a mean over the batch. None: only
            forward ranges are judged, as for inference.
        training: the model's argument of that name.
        selector: the thresholds.
        capabilities: of the model's device; None: measured (`capabilities`).
        share: of the model's multiply-adds, 0..1, that shall be in a low format if that can be,
            with the least error of the gradient; None: all that is safe.
        float32_outputs: as in `apply_policy`.

    Returns:
        Policies to give to `apply_policy`; variables and outputs in float32.

    Raises:
        PolyampError: not a built model, no batch, a share outside 0..1, or a loss that is not a
            finite number in float32.
    """
    run = _Calibration(model, loss, training, float32_outputs)
    chosen = run.choose(batches, selector, capabilities, share)
    return policy_map_of(chosen, run.watch.units, containers_of(model, run.watch.units))


def advise(
    model: Any,
    batches: Iterable[Any],
    loss: Any = None,
    *,
    training: bool = True,
    selector: Selector = DEFAULT,
    capabilities: Capabilities | None = None,
    share: float | None = None,
    float32_outputs: bool | None = None,
) -> Selection:
    """What `calibrate` would choose for each layer, and the statistic that made it so.

    Arguments and errors as `calibrate`. `print(amp.advise(...).table())` shows it; nothing is
    changed.
    """
    run = _Calibration(model, loss, training, float32_outputs)
    return run.choose(batches, selector, capabilities, share)


class _Pass(NamedTuple):
    gradient: np.ndarray[Any, Any]
    """All gradients, flat, unscaled, f32."""
    statistics: dict[str, ModuleStatistics]


class _Calibration:
    """Batches through a model that is put back as it was."""

    def __init__(self, model: Any, loss: Any, training: bool, float32_outputs: bool | None) -> None:
        self.watch = Watch(model, float32_outputs)
        self.model, self.float32_outputs = model, float32_outputs
        self.loss = keras.losses.get(loss)
        self.keywords = {"training": training} if model._call_has_training_arg else {}
        self.macs: dict[str, float] = {}
        self.noise, self.scale = math.inf, 1.0
        self._first: Any = None
        self._reference = np.zeros(0, np.float32)

    def choose(
        self,
        batches: Iterable[Any],
        selector: Selector,
        capabilities: Capabilities | None,
        share: float | None,
    ) -> Selection:
        """See `advise`."""
        if share is not None and not (type(share) in (int, float) and 0.0 <= share <= 1.0):
            raise PolyampError(f"share must be from 0 to 1, got {share!r}")
        can = capabilities_of() if capabilities is None else capabilities
        check_arguments(selector, can)
        can = can._replace(shifts=False)
        with self.undisturbed():
            apply_policy(self.model, "float32")
            statistics = self.measure(batches)
            start = selector.start(self.watch.families, can)
            if self.loss is not None:
                statistics = self.with_errors(statistics, selector, start, can)
        chosen = selector.calibrated(statistics, start, can)
        return chosen if share is None else budgeted(chosen, statistics, self.macs, share)

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Policies and compiled functions are put back at the end."""
        layers = {id(place.layer): place.layer for place in places(self.model)}.values()
        policies = [(layer, layer._dtype_policy, vars(layer).get(APPLIED)) for layer in layers]
        models = [layer for layer in layers if isinstance(layer, keras.Model)]
        functions = [(m, name, getattr(m, name)) for m in models for name in _FUNCTIONS]
        try:
            yield
        finally:
            for layer, policy, applied in policies:
                layer._dtype_policy = policy
                vars(layer).pop(APPLIED, None)
                if applied is not None:
                    vars(layer)[APPLIED] = applied
            for owner, name, function in functions:
                setattr(owner, name, function)

    def measure(self, batches: Iterable[Any]) -> dict[str, ModuleStatistics]:
        """All batches in float32; see the module."""
        rule = Predictive()
        state = rule.init()
        samples: list[dict[str, ModuleStatistics]] = []
        gradients: list[np.ndarray[Any, Any]] = []
        for batch in batches:
            if self._first is None:
                self._first = batch
                for _ in range(3):  # until the rule knows it
                    state = transition(rule, state, self._signal(self._pass(batch, state)))
            found = self._pass(batch, state)
            samples.append(found.statistics)
            gradients.append(found.gradient)
            state = transition(rule, state, self._signal(found))
        if not samples:
            raise PolyampError("there was no batch to calibrate with; a generator is read once")
        self.noise = noise_of(gradients)
        self.macs = {
            path: (one.work or 0.0) * (one.output.size if one.output else 0)
            for sample in reversed(samples)
            for path, one in sample.items()
        }
        paths = dict.fromkeys(path for sample in samples for path in sample)
        return {path: worst([s[path] for s in samples if path in s]) for path in paths}

    def _signal(self, found: _Pass) -> Signal:
        return Signal(True, amax=float(np.abs(found.gradient).max(initial=0.0)) * self.scale)

    def _pass(self, batch: Any, state: Any = None) -> _Pass:
        """One batch; measured where a state is given, whose loss scale it then gets."""
        if state is not None:
            self.scale = float(state.loss_scale) if self.loss is not None else 1.0
        self.watch.begin()
        with self.watch.installed(), _same_numbers():
            variables = self.model.trainable_variables
            loss, grads = value_and_gradients(
                lambda values: self._loss(values, batch) * self.scale, [v.value for v in variables]
            )
            kept, variables = self.watch.take(grads, variables, variables)
        if state is not None and self.loss is not None and not math.isfinite(number(loss)):
            raise PolyampError(
                f"the loss is {number(loss) / self.scale} in float32; calibrate on sound batches"
            )
        numbers = self.watch.finish()
        found = self.watch.statistics(numbers) if state is not None else {}
        if self.loss is None:
            nothing: dict[str, Any] = {"gradient": None, "weight_gradient": None}
            found = {path: one._replace(**nothing) for path, one in found.items()}
            kept, variables = [], []
        flat = self._flat(kept, variables)
        if state is not None and not np.isfinite(flat).all():
            raise PolyampError("a gradient is not finite in float32; calibrate on sound batches")
        return _Pass(flat, found)

    def _loss(self, values: Any, batch: Any) -> Any:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        fixed = [v.value for v in self.model.non_trainable_variables]
        out, _ = self.model.stateless_call(values, fixed, x, **self.keywords)
        out = cast(out, "float32")
        if self.loss is None:
            return sum((ops.sum(leaf) for leaf in keras.tree.flatten(out)), 0.0)
        if y is None:
            raise PolyampError("with a loss a batch is (x, y) or (x, y, sample_weight)")
        weights = {} if weight is None else {"sample_weight": weight}
        loss = self.loss(y, out, **weights)
        return ops.mean(ops.convert_to_tensor(loss))

    def _flat(self, grads: Any, variables: Any) -> np.ndarray[Any, Any]:
        leaves = [
            np.zeros(math.prod(v.shape))
            if g is None
            else to_numpy(ops.convert_to_tensor(g)).ravel()
            for g, v in zip(grads, variables, strict=True)
        ]
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
        with _without_dropout(self.model):
            self._reference = self._pass(self._first).gradient
            for path, one in statistics.items():
                if start.modules[path].family is None:
                    errors = [
                        (choice.format, self._error(path, choice) / self.noise)
                        for choice in to_try(first.modules[path].choice, can)
                    ]
                    found[path] = one._replace(errors=tuple(errors))
        return found

    def _error(self, path: str, choice: Choice) -> float:
        """Relative error of the first batch's gradient with only one layer as chosen."""
        rules = alone(path, choice, self.watch.units)
        apply_policy(self.model, rules, float32_outputs=self.float32_outputs)
        return relative_error(self._pass(self._first).gradient, self._reference)


def _same_numbers() -> Any:
    """Torch's random numbers, which are no variables of the model, as in every other pass."""
    if FRAMEWORK != "torch":
        return contextlib.nullcontext()
    import torch

    @contextlib.contextmanager
    def seeded() -> Iterator[None]:
        devices = list(range(torch.cuda.device_count()))
        with torch.random.fork_rng(devices):
            torch.manual_seed(0)
            yield

    return seeded()


@contextlib.contextmanager
def _without_dropout(model: Any) -> Iterator[None]:
    """Layers that drop at random drop nothing: in another format they would drop other entries."""
    layers = [
        layer
        for layer in model._flatten_layers()
        if layer._seed_generators and isinstance(getattr(layer, "rate", None), float)
    ]
    rates = [layer.rate for layer in layers]
    try:
        for layer in layers:
            layer.rate = 0.0
        yield
    finally:
        for layer, rate in zip(layers, rates, strict=True):
            layer.rate = rate
