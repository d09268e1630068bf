"""LossScaler: loss scaling for GradientTape loops over polyamp's state machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from polyamp._errors import BackendError
from polyamp._formats import FORMATS
from polyamp._interchange import scaler_from_dict, scaler_to_dict
from polyamp._presets import resolve_rule
from polyamp._scaling import MAX_SCALE, Rule, Transition, bind
from polyamp._state import (
    Decision,
    ScalerState,
    Signal,
    decision,
    raise_on_fault,
    warn_of_skips,
    warn_on_skip,
)
from polyamp_tensorflow._cast import divide, unscale, wide
from polyamp_tensorflow._distributed import apply_where, reduce
from polyamp_tensorflow._inspect import Part, measure, parts, share
from polyamp_tensorflow._ops import xp

_COUNTS = ScalerState._fields[1:-1]
_ZERO_IN_F16 = FORMATS["float16"].smallest_subnormal / 2
_plain = tf.autograph.experimental.do_not_convert

Transform = Callable[[list[Any]], Iterable[Any]]
"""Takes unscaled gradients, gives those to apply; in the same order, None where there is none."""


class LossScaler(tf.Module):  # type: ignore[misc]
    """Loss scaling for custom training loops, eager, in `tf.function` and under XLA.

        scaler = amp.LossScaler()

        @tf.function
        def train_step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
                scaled = scaler.scale(loss)
            grads = tape.gradient(scaled, model.trainable_variables)
            scaler.apply(optimizer, zip(grads, model.trainable_variables), loss)
            return loss

    A step whose gradients or loss are not finite changes nothing but the scaler. Under a
    `tf.distribute` strategy make the scaler in its scope and call `apply` in `strategy.run`: all
    replicas apply a step, or none does.

    The state lives in variables that `tf.train.Checkpoint` saves with the module: the scale, and
    all counts in one int64 vector (TensorFlow keeps int32 variables off the GPU, where XLA does
    not find them). The rule is not saved there; see `to_dict`.

    In eager mode skips are warned about and faults raised by `apply`. A `tf.function` can do
    neither: call `check` or `get_scale` outside it now and then.

    Args:
        rule: a `polyamp.Rule` or the name of a system ("keras", "torch", "megatron", ...); by
            default `polyamp.Dynamic()`.
        name: of the module.

    Raises:
        RuleError: `rule` is neither.
    """

    def __init__(self, rule: Rule | str | None = None, name: str = "loss_scaler") -> None:
        super().__init__(name=name)
        self._rule = resolve_rule(rule)
        self._on_host: Transition = bind(self._rule)
        start = self._rule.init()
        self._loss_scale = _variable(start.loss_scale, tf.float32, "loss_scale")
        self._counts = _variable(_packed(start), tf.int64, "counts")
        self._told = _variable(0, tf.int64, "told")

    @property
    def rule(self) -> Rule:
        """The rule in force."""
        return self._rule

    @property
    def loss_scale(self) -> tf.Variable:
        """f32 variable: what the next loss is multiplied by."""
        return self._loss_scale

    @property
    def skipped(self) -> tf.Tensor:
        """i32 tensor: steps skipped in all."""
        return tf.cast(self._counts[_COUNTS.index("skipped")], tf.int32)

    @property
    def state(self) -> ScalerState:
        """The whole state in Python numbers; reading it waits for the device.

        Raises:
            BackendError: read while a `tf.function` is traced.
        """
        self._outside("state")
        return _unpacked(float(self._loss_scale.numpy()), self._counts.numpy().tolist())

    @_plain  # type: ignore[untyped-decorator]
    def scale(self, loss: Any) -> Any:
        """`loss` times the scale, to take gradients of.

        Args:
            loss: a real floating tensor, or a `tf.nest` structure of them.

        Returns:
            The same structure; float16 and bfloat16 come back as float32. The gradient of a
            float16 loss is float16 all the same and cannot carry a scale above 2**15.

        Raises:
            TypeError: there is something else in `loss`.
        """
        factor = self._loss_scale.read_value()

        def one(value: Any) -> Any:
            value = tf.convert_to_tensor(value)
            if not value.dtype.is_floating:
                raise TypeError(f"scale() needs floating losses, got {value.dtype.name}")
            value = wide(value)
            return value * tf.cast(factor, value.dtype)

        return tf.nest.map_structure(one, loss)

    @_plain  # type: ignore[untyped-decorator]
    def unscale(self, grads: Iterable[Any]) -> list[Any]:
        """New gradients without the scale, in float32 or wider, to look at.

        `apply` wants them as they came; see its `transform` for how to clip.

        Args:
            grads: tensors, `tf.IndexedSlices` or None, carrying the present scale.
        """
        return self._unscaled(grads, self._loss_scale.read_value())

    def _unscaled(self, grads: Iterable[Any], scale: tf.Tensor) -> list[Any]:
        if self._rule.max_scale > MAX_SCALE:
            return divide(grads, scale)
        return unscale(grads, 1.0 / scale)

    @_plain  # type: ignore[untyped-decorator]
    def apply(
        self,
        optimizer: Any,
        grads_and_vars: Iterable[tuple[Any, Any]],
        loss: Any = None,
        *,
        transform: Transform | None = None,
    ) -> Decision:
        """Check the gradients, unscale and apply them or skip the step, and move the scale.

        Args:
            optimizer: a Keras optimizer, or anything with `apply_gradients` that has made its
                variables. It is built here, outside of the branch, if it is not yet.
            grads_and_vars: pairs of a gradient, as it came from the scaled loss (a tensor,
                `tf.IndexedSlices` or None), and its variable.
            loss: the unscaled loss; a step is skipped too if it is not finite.
            transform: takes the list of unscaled gradients and returns those to apply: clipping
                goes here, so that an infinity is seen before it is clipped away. Only called on
                what is applied (in a graph: traced once).

        Returns:
            The decision: Python numbers in eager mode, 0-d tensors in a graph.

        Raises:
            ValueError: there is no gradient at all, or `transform` loses one.
            TypeError: `optimizer` cannot apply gradients, `grads_and_vars` are no pairs, a gradient
                is not floating, or `transform` returns no list.
            BackendError: `optimizer` scales losses itself, cannot work in a variable's dtype, or
                the call is not where the strategy in force wants it.
            ScaleFloorError: the rule gave up (eager mode). The scaler stays usable.
        """
        grads, variables = _pairs(grads_and_vars)
        _check_optimizer(optimizer, variables)
        replica = self._replica()
        if not getattr(optimizer, "built", True):
            with tf.init_scope():
                optimizer.build(variables)

        def update(grads: Sequence[Any], scale: tf.Tensor) -> None:
            ready: Iterable[Any] = self._unscaled(grads, scale)
            if transform is not None:
                ready = _transformed(transform, list(ready))
            optimizer.apply_gradients(list(zip(ready, variables, strict=True)))

        replicas = 1 if replica is None else replica.num_replicas_in_sync
        scale = self._loss_scale.read_value()
        found = parts(grads, [v.dtype for v in variables], replicas)
        signal = measure(found, scale, loss, amax=self._rule.wants_amax)
        signal = reduce(signal._replace(sub=self._share_if_due(found)), replica)
        old, new = self._next(scale, signal)
        made = decision(old, new)
        apply_where(made.applied, update, grads, scale)
        self._write(new)
        if tf.executing_eagerly():
            self._report(new, stacklevel=3)
        return made

    def _share_if_due(self, found: Sequence[Part]) -> Any:
        """`Signal.sub` on the steps the rule wants it, else -1."""
        interval = self._rule.sub_interval
        if not interval:
            return -1.0
        step = self._counts.read_value()[_COUNTS.index("step")]
        return tf.cond(step % interval == 0, lambda: share(found), lambda: tf.constant(-1.0))

    def _replica(self) -> Any:
        """The replica context, None where there is one replica.

        Raises:
            BackendError: called across replicas, or the scaler was made outside of the scope.
        """
        replica = tf.distribute.get_replica_context()
        if replica is None:
            raise BackendError("call apply() inside strategy.run(...), once on every replica")
        if replica.num_replicas_in_sync == 1:
            return None
        if not replica.strategy.extended.variable_created_in_scope(self._loss_scale):
            raise BackendError(
                "this LossScaler was made outside of the strategy in force: make it inside"
                " `with strategy.scope():`, as the model and the optimizer"
            )
        return replica

    def _next(self, scale: tf.Tensor, signal: Signal) -> tuple[ScalerState, ScalerState]:
        counts = self._counts.read_value()
        if tf.executing_eagerly():
            old = _unpacked(float(scale), counts.numpy().tolist())
            return old, self._on_host(old, _on_host(signal))
        old = _unpacked(scale, tf.unstack(tf.cast(counts, tf.int32)))
        return old, bind(self._rule, xp)(old, signal)

    def _write(self, state: ScalerState) -> None:
        self._loss_scale.assign(state.loss_scale)
        self._counts.assign(tf.cast(tf.stack(_packed(state)), tf.int64))

    # State.

    def check(self) -> None:
        """Read the state and report what happened since the last look: warn of skips, raise faults.

        Eager steps have reported already.

        Raises:
            ScaleFloorError: the rule gave up. The fault is cleared, the scaler stays usable.
            BackendError: called while a `tf.function` is traced.
        """
        self._report(self.state, stacklevel=2)

    def get_scale(self) -> float:
        """The present scale as a float, after `check`.

        Raises:
            ScaleFloorError, BackendError: as `check`.
        """
        state = self.state
        self._report(state, stacklevel=2)
        return float(state.loss_scale)

    def _report(self, state: ScalerState, stacklevel: int) -> None:
        if state.fault:
            self._write(state._replace(fault=0))
            raise_on_fault(state)
        fresh = state.skipped - int(self._told.numpy())
        if fresh:
            self._told.assign(state.skipped)
        if fresh > 1:  # several since the last look
            warn_of_skips(fresh, state.loss_scale, stacklevel=stacklevel + 1)
        elif fresh == 1:
            warn_on_skip(state.skipped_in_a_row, state.loss_scale, stacklevel=stacklevel + 1)

    def _outside(self, what: str) -> None:
        if not tf.executing_eagerly():
            raise BackendError(
                f"LossScaler.{what} reads the state, which a tf.function cannot while it is traced:"
                " use it outside, or loss_scale and skipped, which are tensors"
            )

    def to_dict(self) -> dict[str, Any]:
        """Rule and state, counters included, in polyamp's portable JSON form.

        Raises:
            BackendError: called while a `tf.function` is traced.
        """
        return scaler_to_dict(self._rule, self.state)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LossScaler:
        """A new scaler that goes on from `to_dict` of any framework.

        Raises:
            StateError: `data` is not a saved scaler.
        """
        rule, state = scaler_from_dict(data)
        scaler = cls(rule)
        scaler._write(state)
        scaler._told.assign(state.skipped)
        return scaler


def _variable(value: Any, dtype: tf.DType, name: str) -> tf.Variable:
    """A variable of which every replica has and writes its own copy: all write the same."""
    return tf.Variable(
        value,
        dtype=dtype,
        name=name,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def _packed(state: ScalerState) -> list[Any]:
    """All but the scale."""
    return [*(getattr(state, name) for name in _COUNTS), *state.memory]


def _unpacked(scale: Any, counts: Sequence[Any]) -> ScalerState:
    head = dict(zip(_COUNTS, counts, strict=False))
    return ScalerState(scale, **head, memory=tuple(counts[len(_COUNTS) :]))


def _on_host(signal: Signal) -> Signal:
    amax = None if signal.amax is None else float(signal.amax)
    return Signal(bool(signal.finite), bool(signal.loss_finite), amax, float(signal.sub))


def _pairs(grads_and_vars: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Gradients and variables.

    Raises:
        TypeError: they are no pairs.
        ValueError: there is no gradient.
    """
    pairs = list(grads_and_vars)
    if any(not isinstance(pair, (tuple, list)) or len(pair) != 2 for pair in pairs):
        raise TypeError(
            "apply() takes pairs of gradient and variable: zip(grads, model.trainable_variables)"
        )
    if all(grad is None for grad, _ in pairs):
        raise ValueError(
            f"apply() got no gradient for any of its {len(pairs)} variables: take them of"
            " scaler.scale(loss), inside the tape"
        )
    return [grad for grad, _ in pairs], [variable for _, variable in pairs]


def _transformed(transform: Transform, grads: list[Any]) -> list[Any]:
    """What `transform` makes of `grads`.

    Raises:
        TypeError, ValueError: it does not return one gradient, or None, for each.
    """
    made: Any = transform(grads)
    if not isinstance(made, Iterable):
        raise TypeError(f"transform must return the gradients to apply, got {type(made).__name__}")
    ready = list(made)
    if len(ready) != len(grads):
        raise ValueError(
            f"transform must return one gradient, or None, for each of the {len(grads)} it gets, in"
            f" their order; it returned {len(ready)}"
        )
    return ready


def _check_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Refuse an optimizer that cannot do its part.

    Raises:
        TypeError, BackendError: see `LossScaler.apply`.
    """
    if not callable(getattr(optimizer, "apply_gradients", None)):
        raise TypeError(
            f"apply() needs a Keras optimizer or another object with apply_gradients, got"
            f" {optimizer!r}"
        )
    if any(cls.__name__ == "LossScaleOptimizer" for cls in type(optimizer).__mro__):
        raise BackendError(
            f"{type(optimizer).__name__} scales losses itself and would divide by its own scale"
            " too: pass its inner_optimizer, or make the optimizer without it"
        )
    epsilon = getattr(optimizer, "epsilon", None)
    if isinstance(epsilon, float) and epsilon <= _ZERO_IN_F16:
        for variable in variables:
            if tf.as_dtype(variable.dtype) == tf.float16:
                raise BackendError(
                    f"epsilon={epsilon:g} of {type(optimizer).__name__} is 0 in float16, the dtype"
                    f" of {variable.name}: it would divide by 0. Keep variables in float32"
                    " (mixed_float16 does), or pass epsilon=1e-4"
                )
