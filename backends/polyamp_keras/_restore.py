"""A train step that leaves no trace when it is skipped: BatchNorm statistics, seeds, metrics."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from polyamp_keras._distributed import cross_replica, first_local, replica_context
from polyamp_keras._ops import FRAMEWORK, cond, number_in, read, select
from polyamp_keras._places import computes_in_float16
from polyamp_keras._scaler import LossScaleOptimizer


class LossMean(keras.metrics.Mean):  # type: ignore[misc]
    """Keras' mean of the batch losses, but NaN, not 0, where no batch was counted."""

    def result(self) -> Any:
        """Total / count; NaN for 0 / 0."""
        return self.total / self.count


class RestoringStep:
    """A model's `train_step`, after which a skipped step has changed nothing.

    Args:
        model: a compiled model. Its own step runs unless its optimizer is a LossScaleOptimizer.
        original: the model's train step.
        restore_seeds: put the states of seed generators back too.
        watched: warn, once, if the model's present optimizer does not scale the loss and the model
            has layers in float16 when it comes to train.
    """

    def __init__(
        self, model: Any, original: Callable[..., Any], restore_seeds: bool, watched: bool
    ) -> None:
        self.model, self.original, self.restore_seeds = model, original, restore_seeds
        self.watched = model.optimizer if watched else None

    def __call__(self, *args: Any) -> Any:
        """Keras' `train_step`: (data), on JAX (state, data)."""
        if not isinstance(self.model.optimizer, LossScaleOptimizer):
            result = self.original(*args)
            self._watch()  # on TensorFlow the first step may have built the model
            return result
        return self._stateless(*args) if FRAMEWORK == "jax" else self._stateful(*args)

    def _watch(self) -> None:
        watched, self.watched = self.watched, None
        if watched is not self.model.optimizer or not computes_in_float16(self.model):
            return
        warnings.warn(
            f"{self.model.name!r} computes in float16, in layers that were not there when"
            " amp.compile looked at it, and its loss is not scaled: build the model before"
            ' amp.compile, or ask for scaling with amp.compile(..., rule="keras")',
            UserWarning,
            stacklevel=2,
        )

    def _changing(self) -> list[Any]:
        """Variables that a forward pass may change. A frozen layer's weights are not among them."""
        found: dict[int, Any] = {}
        for layer in self.model._flatten_layers():
            generators = layer._seed_generators if self.restore_seeds else ()
            for v in (*layer._non_trainable_variables, *(g.state for g in generators)):
                found[id(v)] = v
        return list(found.values())

    def _stateful(self, data: Any) -> Any:
        optimizer = self.model.optimizer
        variables = [*self._changing(), *self.model.metrics_variables]
        before, count = [_copy(v) for v in variables], _count(optimizer)
        logs = self.original(data)
        now = _count(optimizer)
        skipped = now != count if FRAMEWORK == "torch" else ops.not_equal(now, count)
        context = replica_context()
        if context is not None:
            _restore_together(context, variables, before, skipped)
            return logs

        def restored() -> Any:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            return self._logs(logs)

        return cond(skipped, restored, lambda: logs)

    def _stateless(self, state: Sequence[Any], data: Any) -> Any:
        logs, new = self.original(state, data)
        model, optimizer = self.model, self.model.optimizer
        place = _places([optimizer._state.skipped], optimizer.variables)[0]
        skipped = ops.not_equal(new[2][place], state[2][place])
        fixed = list(new[1])
        for i in _places(self._changing(), model.non_trainable_variables):
            fixed[i] = select(skipped, state[1][i], fixed[i])
        metrics = select(skipped, list(state[3]), list(new[3]))
        mapping = list(zip(model.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(mapping):
            logs = select(skipped, self._logs(logs), logs)
        return logs, (new[0], fixed, new[2], metrics)

    def _logs(self, logs: Any) -> Any:
        """What the metrics say now, if that is what the step returns."""
        now = self.model.get_metrics_result()
        if not isinstance(logs, dict) or now.keys() != logs.keys():
            return logs
        return {key: ops.cast(now[key], _dtype(value)) for key, value in logs.items()}


def _dtype(value: Any) -> str:
    return str(keras.backend.standardize_dtype(ops.convert_to_tensor(value).dtype))


def _count(optimizer: Any) -> Any:
    """Steps skipped so far: a number on torch, where that costs least, else a tensor."""
    variable = optimizer._state.skipped
    return number_in(variable) if FRAMEWORK == "torch" else read(variable)


def _copy(variable: Any) -> Any:
    value = read(variable)
    return value.detach().clone() if FRAMEWORK == "torch" else value


def _places(some: Sequence[Any], among: Sequence[Any]) -> list[int]:
    wanted = {id(v) for v in some}
    return [i for i, v in enumerate(among) if id(v) in wanted]


def _restore_together(
    context: Any, variables: Sequence[Any], before: Sequence[Any], skipped: Any
) -> None:
    def assign(variable: Any, value: Any) -> None:
        variable.assign(value)

    def decide(distribution: Any, skipped: Any, before: Sequence[Any]) -> None:
        def back() -> None:
            for variable, value in zip(variables, before, strict=True):
                if distribution is None:
                    variable.assign(value)
                else:
                    distribution.extended.update(variable.value, assign, args=(value,), group=False)

        cond(first_local(distribution, skipped), back, lambda: None)

    cross_replica(context, decide, skipped, list(before))
