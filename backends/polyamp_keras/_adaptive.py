"""Adaptive: the selector at work in `fit`.

    fit begins     the model's train function is replaced by one that has two: the model's own, and
                   one whose train step measures (`Watch`); the second runs in one of `every` steps
    after it       decide (`polyamp.Selector`); if a decision changed: apply the new policy map,
                   make both functions anew
    fit ends       the model has its own train function back

On JAX and TensorFlow each function is traced and compiled at its first call: a change costs one
compilation, and one more at the next sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from polyamp._adapting import DEFAULT, Adapting
from polyamp._errors import PolicyError, PolyampError
from polyamp._policy_map import PolicyMap
from polyamp._select import Selector
from polyamp._selection import HALF, Capabilities, Selection
from polyamp_keras._capabilities import capabilities as capabilities_of
from polyamp_keras._modules import apply_policy, has_policy
from polyamp_keras._ops import FRAMEWORK, number, number_in
from polyamp_keras._scaler import LossScaleOptimizer
from polyamp_keras._units import containers_of, policy_map_of
from polyamp_keras._watch import Watch


class Adaptive(Adapting, keras.callbacks.Callback):  # type: ignore[misc]
    """Choose each layer's format while the model trains: a callback of `fit`.

        adaptive = amp.Adaptive(model)
        amp.compile(model, "adam", loss="mse", rule="auto")
        model.fit(x, y, callbacks=[adaptive])

    Args:
        model: built, with float32 variables; its layers start in the fastest format of the device.
        selector: the thresholds.
        capabilities: of the model's device; None: measured (`capabilities`).
        every: steps between two samples, 1 or more. With `steps_per_execution` all steps of an
            execution measure; the last one's numbers count.
        max_changes: policies applied at most; then the model keeps what it has, with a warning.
        float32_outputs: as in `apply_policy`. None and True: the layers that make the outputs of a
            Functional or Sequential model stay in float32.

    Attributes:
        selection: `polyamp.Selection`: the decision for every layer, and why.
        statistics: of the last sample, by path.
        steps: steps done.
        changes: policies applied so far, the first one not counted.

    A train step of the model's own must give `self.optimizer` the gradients of
    `self.trainable_variables`. Other loops are not measured.

    Raises:
        PolyampError: the model is not built, or `every` is below 1.
        PolicyError: as `apply_policy`; or the model has a policy of `apply_policy` already.
    """

    def __init__(
        self,
        model: Any,
        *,
        selector: Selector = DEFAULT,
        capabilities: Capabilities | None = None,
        every: int = 50,
        max_changes: int = 64,
        float32_outputs: bool | None = None,
    ) -> None:
        keras.callbacks.Callback.__init__(self)
        self.watch = Watch(model, float32_outputs)
        if has_policy(model):
            raise PolicyError(
                "the model has a policy already, which Adaptive would replace; call"
                " remove_policy(model) first"
            )
        can = capabilities_of() if capabilities is None else capabilities
        if isinstance(can, Capabilities):
            can = can._replace(shifts=False)
        Adapting.__init__(self, self.watch.families, can, selector, every, max_changes)
        self.float32_outputs = float32_outputs
        self._containers = containers_of(model, self.watch.units)
        self._skipped = 0
        self._switch: _Switch | None = None
        self._rules = self._apply(self.selection)
        self.set_model(model)

    @property
    def policy(self) -> PolicyMap:
        """What the model computes under now."""
        return self._rules

    def set_model(self, model: Any) -> None:
        """Called by `fit`.

        Raises:
            PolyampError: another model than the one this was made for.
        """
        if model is not self.watch.model:
            raise PolyampError(
                f"this Adaptive was made for the model {self.watch.model.name!r}, and fit was"
                f" called on {model.name!r}: give each model its own"
            )
        super().set_model(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by `fit`.

        Raises:
            PolicyError: layers compute in float16, and the loss is not scaled.
        """
        scaled = isinstance(self.watch.model.optimizer, keras.optimizers.LossScaleOptimizer)
        if not scaled and any(c.format == HALF for c in self.selection.choices.values()):
            raise PolicyError(
                "Adaptive chose float16, and the model's optimizer does not scale the loss: compile"
                ' with amp.compile(model, optimizer, loss, rule="auto"), or leave float16 out with'
                ' Adaptive(capabilities=Capabilities(frozenset({"bfloat16"})))'
            )
        self._install()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Called by `fit`.

        Raises:
            PolicyError: the model's policy was changed by another.
        """
        if not isinstance(self.watch.model.train_function, _Switch):
            raise PolicyError(
                "the model's policy or train function was changed by hand under Adaptive: leave it"
                " out of fit, or make a new one after"
            )

    def on_train_end(self, logs: Any = None) -> None:
        """Called by `fit`."""
        self.remove()

    def remove(self) -> None:
        """Stop: the model keeps its policy, and has its own train function back.

        `fit` does this at its end; to be called where it was interrupted.
        """
        switch = self.watch.model.train_function
        if isinstance(switch, _Switch):
            self.watch.model.train_function = switch.plain

    def to_dict(self) -> dict[str, Any]:
        """What to save: a JSON-ready dict of the selection and the counts."""
        return {**super().to_dict(), "skipped": self._skipped}

    def from_dict(self, data: Mapping[str, Any]) -> None:
        """Go on from what `to_dict` gave: the policies are applied to the model.

        Raises:
            StateError: not such a dict, or of a model with other layers. Nothing is changed.
        """
        selection, counts = self.read_dict(data, also=("skipped",))
        self._rules = self._apply(selection)
        self.selection = selection
        self.steps, self.changes = counts["steps"], counts["changes"]
        self._skipped = counts["skipped"]

    def _install(self) -> None:
        self.remove()
        model = self.watch.model
        model.make_train_function()
        plain = model.train_function
        if self._switch is None or self._switch.plain is not plain:
            self._switch = _Switch(self, plain, *self._measuring())
        model.train_function = self._switch

    def _measuring(self) -> tuple[Callable[..., Any], _Sampled]:
        """A train function of a step that measures, and the step."""
        model = self.watch.model
        plain, step = model.train_function, model.train_step
        model.train_step = sampled = _Sampled(self.watch, step)
        try:
            model.make_train_function(force=True)
            return model.train_function, sampled
        finally:
            model.train_function = plain
            _put_back(model, step)

    def _apply(self, selection: Selection) -> PolicyMap:
        rules = policy_map_of(selection, self.watch.units, self._containers)
        apply_policy(self.watch.model, rules, float32_outputs=self.float32_outputs)
        return rules

    @property
    def sampling(self) -> bool:
        """Whether the next step measures."""
        return self.steps % self.every < self._at_once

    @property
    def _at_once(self) -> int:
        return int(getattr(self.watch.model, "steps_per_execution", 1))

    def before(self, args: tuple[Any, ...]) -> None:
        """A step comes that is not measured."""
        if self.is_to_count(self._at_once):
            self._skipped = self._count(args)

    def after(self, numbers: Any, state: tuple[Any, ...]) -> None:
        """A step is over, applied or skipped; `numbers` is None where it was not measured."""
        self.steps += self._at_once
        if numbers is None:
            return
        skipped = self._count(state)
        fresh, self._skipped = skipped > self._skipped, skipped
        if self.decide(self.watch.statistics(numbers), gradients=not fresh):
            self._rules = self._apply(self.selection)
            self._install()
            self.changed()

    def _count(self, state: tuple[Any, ...]) -> int:
        """Steps skipped so far, as far as polyamp's optimizer counts them."""
        optimizer = self.watch.model.optimizer
        if not isinstance(optimizer, LossScaleOptimizer):
            return 0
        variable = optimizer._state.skipped
        if FRAMEWORK != "jax":
            return int(number_in(variable))
        place = next(i for i, v in enumerate(optimizer.variables) if v is variable)
        return int(number(state[0][2][place]))


class _Sampled:
    """A model's train step that measures."""

    def __init__(self, watch: Watch, step: Callable[..., Any]) -> None:
        self.watch, self.step = watch, step

    def __call__(self, *args: Any) -> Any:
        """What the step gives, with the numbers beside its logs."""
        self.watch.begin()
        if FRAMEWORK != "jax":
            logs = self.step(*args)
            return {"logs": logs, "numbers": self.watch.finish()}
        (trainable, *others), data = args
        values = iter(trainable)
        ours = {id(sink): sink.value for sink in self.watch.sinks.values()}
        extended = [ours[id(v)] if id(v) in ours else next(values) for v in self._variables()]
        logs, state = self.step((extended, *others), data)
        return {"logs": logs, "numbers": self.watch.finish()}, state

    def _variables(self) -> list[Any]:
        return list(self.watch.model.trainable_variables)


class _Switch:
    """A model's train function that runs one of two."""

    def __init__(
        self,
        adaptive: Adaptive,
        plain: Callable[..., Any],
        measuring: Callable[..., Any],
        sampled: _Sampled,
    ) -> None:
        self.adaptive, self.plain, self.measuring, self.sampled = (
            adaptive,
            plain,
            measuring,
            sampled,
        )

    def __call__(self, *args: Any) -> Any:
        """As the model's own."""
        if not self.adaptive.sampling:
            self.adaptive.before(args)
            result = self.plain(*args)
            self.adaptive.after(None, ())
            return result
        model = self.adaptive.watch.model
        step = model.train_step
        model.train_step = self.sampled
        try:
            with self.adaptive.watch.installed(model.optimizer):
                result = self.measuring(*args)
        finally:
            _put_back(model, step)
        found, *state = result if FRAMEWORK == "jax" else (result,)
        self.adaptive.after(found["numbers"], tuple(state))
        return (found["logs"], *state) if state else found["logs"]


def _put_back(model: Any, step: Callable[..., Any]) -> None:
    """The train step that a model had: one of its own, or its class's."""
    if getattr(step, "__func__", None) is type(model).train_step:
        del model.train_step
    else:
        model.train_step = step
