"""Statistics of a model's layers, in the train steps that are asked for.

    with installed():           while such a step is traced or run
      call of a unit            its outputs go through a tap beside the unit's sink
      model.trainable_variables has the sinks too, so that any train step differentiates them
      optimizer.apply           takes the sinks' gradients out: what was measured

A sink is a variable of zeros whose gradient is what was measured: a sum over the calls of a unit,
the turns of a loop and replicas, which `_measure.summed` reads. Outside of `installed` nothing of
the model is changed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
from keras import ops

from polyamp._errors import PolyampError
from polyamp._statistics import RAW, ModuleStatistics, Statistics
from polyamp_keras._distributed import replica_context
from polyamp_keras._measure import WIDTH, ends, is_measured, raw, summable, summed
from polyamp_keras._ops import FRAMEWORK, to_numpy
from polyamp_keras._tap import tap
from polyamp_keras._units import units_of

TAPPED = ("inputs", "output", "gradient")
"""Fields of `ModuleStatistics` that a sink brings back, in its order."""
KINDS = (*TAPPED, "weight_gradient", "weights")
"""Those that a step gives, f32 (5, 8) for every unit."""


Kept = tuple[list[Any], list[Any]]


class Watch:
    """Measures the units of a model; see the module.

    Args:
        model: built.
        float32_outputs: as in `units_of`.

    Raises:
        PolyampError: as `units_of`.
    """

    def __init__(self, model: Any, float32_outputs: bool | None = None) -> None:
        self.model = model
        self.units = units_of(model, float32_outputs)
        self._paths = {id(unit.layer): path for path, unit in self.units.items()}
        with _scope(model):
            self.sinks = {path: _sink() for path in self.units}
        self._ids = {id(sink): path for path, sink in self.sinks.items()}
        self._called: dict[str, None] = {}
        self._local = threading.local()  # replicas of TensorFlow are traced in threads

    @property
    def families(self) -> dict[str, str | None]:
        """The family of each unit, by path."""
        return {path: unit.family for path, unit in self.units.items()}

    @contextlib.contextmanager
    def installed(self, optimizer: Any = None) -> Iterator[None]:
        """While open, calls of units are measured, and `optimizer` takes the sinks' gradients."""
        call = keras.Layer.__call__

        def observed(layer: Any, *args: Any, **kwargs: Any) -> Any:
            out = call(layer, *args, **kwargs)
            path = self._paths.get(id(layer))
            return out if path is None else self._tapped(path, (args, kwargs), out)

        own: list[Any] = self.model._trainable_variables
        keras.Layer.__call__ = observed
        for sink in reversed(self.sinks.values()):
            list.insert(own, 0, sink)  # what a locked layer tracks it would refuse
        held = vars(optimizer) if optimizer is not None else {}
        kept = {name: held[name] for name in _ENTRIES if name in held}
        if optimizer is not None:
            held.update({name: wrap(self, optimizer) for name, wrap in _ENTRIES.items()})
        try:
            yield
        finally:
            for name in _ENTRIES:
                held.pop(name, None)
            held.update(kept)
            for _ in self.sinks:
                list.pop(own, 0)
            keras.Layer.__call__ = call

    def begin(self) -> None:
        """A train step begins, in this thread."""
        self._local.outputs = {}
        self._local.numbers = None
        if FRAMEWORK == "torch":
            for sink in self.sinks.values():
                sink.value.grad = None

    def finish(self) -> Any:
        """The train step that `begin` began is over: what it measured, as `table` gives it.

        Raises:
            PolyampError: its optimizer was not given the gradients of `model.trainable_variables`.
        """
        found, self._local.numbers = self._local.numbers, None
        self._local.outputs = {}
        if found is None:
            raise PolyampError(
                "a step with statistics gave model.optimizer no gradients of all"
                " model.trainable_variables; a train_step of one's own must do so"
            )
        return found

    def take(self, grads: Sequence[Any], variables: Sequence[Any], values: Sequence[Any]) -> Kept:
        """The gradients and values without those of the sinks, whose numbers are kept.

        Args:
            grads, values: of `variables`, in their order.
        """
        sinks, known, rest = {}, {}, []
        for grad, variable, value in zip(grads, variables, values, strict=True):
            if id(variable) in self._ids:
                sinks[self._ids[id(variable)]] = grad
            else:
                known[id(variable)] = (grad, value)
                rest.append((grad, value))
        if sinks:
            self._local.numbers = self.table(sinks, known)
        return [grad for grad, _ in rest], [value for _, value in rest]

    def table(self, sinks: Mapping[str, Any], known: Mapping[int, tuple[Any, Any]]) -> Any:
        """f32 (units * 5, 8).

        Args:
            sinks: gradients of the sinks, by path.
            known: gradients and values of the other variables, by id.
        """
        blank = ops.zeros((len(TAPPED), WIDTH), "float32")
        rows = []
        for path, unit in self.units.items():
            pairs = [known[id(v)] for v in unit.variables if id(v) in known]
            grads = [grad for grad, _ in pairs if grad is not None]
            weights = ends([ops.convert_to_tensor(value) for _, value in pairs])
            tapped = sinks.get(path)
            rows += [
                blank if tapped is None else tapped,
                summable(ops.stack([raw(grads), weights])),
            ]
        return summed(_agreed(ops.concatenate(rows)))

    def statistics(self, numbers: Any) -> dict[str, ModuleStatistics]:
        """By path, in the order of the first calls; waits. Units not called are left out."""
        found = {}
        shape = (len(self.units), len(KINDS), len(RAW))
        table = dict(zip(self.units, to_numpy(numbers).reshape(shape).tolist(), strict=True))
        for path in (path for path in self._called if path in table):
            values = {
                kind: Statistics.from_raw(row) if row[2] else None
                for kind, row in zip(KINDS, table[path], strict=True)
            }
            if values["output"] is not None:
                one = ModuleStatistics(work=self.units[path].work)
                found[path] = one._replace(**values)  # type: ignore[arg-type]
        return found

    def _tapped(self, path: str, given: Any, out: Any) -> Any:
        flat = keras.tree.flatten(out)
        places = [i for i, value in enumerate(flat) if is_measured(value)]
        if not places or not hasattr(self._local, "outputs"):
            return out
        self._called[path] = None
        known: dict[int, Any] = self._local.outputs
        inputs = [value for value in keras.tree.flatten(given) if is_measured(value)]
        outputs = [flat[i] for i in places]
        numbers = [self._of_inputs(inputs, known), raw(outputs)]
        taps = tap(ops.convert_to_tensor(self.sinks[path].value), ops.stack(numbers), outputs)
        for place, value in zip(places, taps, strict=True):
            mask = getattr(flat[place], "_keras_mask", None)
            if mask is not None:
                value._keras_mask = mask
            flat[place] = value
        if len(taps) == 1:
            known[id(taps[0])] = (taps[0], numbers[1])
        return keras.tree.pack_sequence_as(out, flat)

    def _of_inputs(self, inputs: Sequence[Any], known: Mapping[int, Any]) -> Any:
        """The inputs' numbers; what another unit put out was measured there."""
        if len(inputs) == 1 and id(inputs[0]) in known:
            numbers = known[id(inputs[0])][1]
            return numbers * ops.convert_to_tensor(_ENDS)
        return ends(inputs)


_ENDS = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
"""Of `RAW`, what `ends` gives."""


def _sink() -> Any:
    shape = (len(TAPPED), WIDTH)
    return keras.Variable("zeros", shape=shape, dtype="float32", autocast=False, name="statistics")


def _scope(model: Any) -> Any:
    if FRAMEWORK != "tensorflow" or not isinstance(model, keras.Model):
        return contextlib.nullcontext()
    return model.distribute_strategy.scope()


def _agreed(rows: Any) -> Any:
    """Sums over the replicas that train together."""
    context = replica_context()
    return rows if context is None else context.all_reduce("SUM", rows)


def _apply(watch: Watch, optimizer: Any) -> Callable[..., Any]:
    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        grads, own = list(grads), type(optimizer).apply
        variables = watch.model.trainable_variables
        if trainable_variables is not None:
            variables = list(trainable_variables)
        elif len(grads) != len(variables):
            return own(optimizer, grads)
        return own(optimizer, *watch.take(grads, variables, variables))

    return apply


def _apply_gradients(watch: Watch, optimizer: Any) -> Callable[..., Any]:
    def apply_gradients(grads_and_vars: Any) -> Any:
        pairs = list(grads_and_vars)
        variables = [v for _, v in pairs]
        found = watch.take([g for g, _ in pairs], variables, variables)
        return type(optimizer).apply_gradients(optimizer, zip(*found, strict=True))

    return apply_gradients


def _stateless_apply(watch: Watch, optimizer: Any) -> Callable[..., Any]:
    def stateless_apply(state: Any, grads: Any, values: Any) -> Any:
        variables = watch.model.trainable_variables
        if len(values) == len(variables):
            grads, values = watch.take(grads, variables, values)
        return type(optimizer).stateless_apply(optimizer, state, grads, values)

    return stateless_apply


_ENTRIES: dict[str, Callable[[Watch, Any], Callable[..., Any]]] = {
    "apply": _apply,
    "apply_gradients": _apply_gradients,
    "stateless_apply": _stateless_apply,
}
"""The ways gradients come to an optimizer."""
