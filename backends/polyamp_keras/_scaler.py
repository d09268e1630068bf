"""LossScaleOptimizer: Keras' interface over polyamp's state machine, on any Keras backend."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from polyamp._errors import BackendError, RuleError, StateError
from polyamp._interchange import (
    check_scale,
    rule_from_dict,
    rule_to_dict,
    scaler_from_dict,
    scaler_to_dict,
)
from polyamp._scaling import Rule, Static
from polyamp._state import ScalerState, raise_on_fault, warn_of_skips, warn_on_skip
from polyamp_keras import _state
from polyamp_keras._arguments import (
    check_epsilon,
    check_gradient_count,
    check_inner,
    rule_from,
)
from polyamp_keras._cast import unscale, wide
from polyamp_keras._ops import FRAMEWORK, baked, read, twin, unconverted
from polyamp_keras._stepping import step

_Keras = keras.optimizers.LossScaleOptimizer


@keras.saving.register_keras_serializable(package="polyamp")
class LossScaleOptimizer(_Keras):  # type: ignore[misc, valid-type]
    """Keras' LossScaleOptimizer under any polyamp rule.

        optimizer = amp.LossScaleOptimizer(keras.optimizers.Adam(1e-3))
        model.compile(optimizer, loss="mse")     # or amp.compile(model, optimizer, ...)
        model.fit(x, y)

    A step whose gradients are not finite, as they came or unscaled, changes neither weights nor
    the inner optimizer, `iterations` included; replicas take the decision together. (What the
    forward pass changed is put back by `amp.compile`.) With `gradient_accumulation_steps` on the
    inner optimizer each micro-batch is judged by itself: one that is not finite is left out, and
    the window closes after that many finite ones.

    A custom loop scales the loss with `scale_loss` and gives the gradients as they come to
    `apply`. In a jitted JAX function it takes `stateless_scale_loss` and `stateless_apply`.

    Args:
        inner_optimizer: the optimizer to wrap. Clipping, weight decay, EMA and accumulation are
            set there; they see unscaled gradients.
        initial_scale, dynamic_growth_steps: as in Keras; 2**15 and 2000 where neither they nor a
            rule is given. The scale stays between 2**-126 and 2**126.
        name: as in Keras.
        rule: a `polyamp.Rule` or the name of a system ("torch", "megatron", ...) in place of the
            two numbers.

    The state is in variables (`scale`, `skipped`, ...), saved and loaded with the optimizer. While
    `fit` runs on JAX, `model.jax_state_sync()` brings them up to date. A callback that reads one
    after every step makes the host wait for it, which costs about 5 % of a small step.

    Raises:
        TypeError: `inner_optimizer` is not an optimizer.
        BackendError: `inner_optimizer` is a LossScaleOptimizer itself.
        RuleError: a parameter out of range, or both a rule and one of Keras' two numbers.
        ValueError: an argument that belongs to the inner optimizer (as Keras).
    """

    def __init__(
        self,
        inner_optimizer: Any,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        name: str | None = None,
        *,
        rule: Rule | str | None = None,
        **kwargs: Any,
    ) -> None:
        check_inner(inner_optimizer)
        chosen = rule_from(rule, initial_scale, dynamic_growth_steps)
        object.__setattr__(self, "_rule", chosen)
        super().__init__(
            inner_optimizer, chosen.init_scale, self.dynamic_growth_steps, name, **kwargs
        )
        self._keras_arguments = rule is None
        self._told = 0
        self._loss_scaled = self._warned = self._narrow = False
        object.__setattr__(self, "_state", _state.make_variables(self, chosen))

    def build(self, variables: Sequence[Any]) -> None:
        """Make the inner optimizer's variables for those it is to train.

        Raises:
            PolicyError: the inner optimizer's epsilon is zero in the dtype of a variable.
        """
        check_epsilon(self.inner_optimizer, variables)
        self._narrow = any(keras.backend.standardize_dtype(v.dtype) == "float16" for v in variables)
        self.inner_optimizer.build(variables)
        super(_Keras, self).build(variables)

    # The rule and its state.

    @property
    def rule(self) -> Rule:
        """The rule in force."""
        return self._rule  # type: ignore[no-any-return]

    @property
    def initial_scale(self) -> float:
        """Scale before the first step. Setting it changes the rule, not the scale in force."""
        self._loss_scaled = True
        return self._rule.init_scale  # type: ignore[no-any-return]

    @initial_scale.setter
    def initial_scale(self, value: float) -> None:
        self._change_rule("init_scale", value)

    @property
    def dynamic_growth_steps(self) -> int | None:
        """Clean steps until the scale grows; None where the rule has no such number."""
        return getattr(self._rule, "growth_interval", None)

    @dynamic_growth_steps.setter
    def dynamic_growth_steps(self, value: int | None) -> None:
        self._change_rule("growth_interval", value)

    def _change_rule(self, name: str, value: Any) -> None:
        if getattr(self._rule, name, None) == value:
            return
        if not hasattr(self._rule, name):
            raise RuleError(f"{type(self._rule).__name__} has no {name} to set")
        object.__setattr__(self, "_rule", dataclasses.replace(self._rule, **{name: value}))

    @property
    def scale(self) -> Any:
        """Variable, f32, 0-d: what the next loss is multiplied by, here or by hand."""
        self._loss_scaled = True
        return self._state.loss_scale

    @property
    def dynamic_scale(self) -> Any:
        """Keras' name for `scale`."""
        return self.scale

    @property
    def step_counter(self) -> Any:
        """Variable, i32, 0-d: clean steps since the scale last changed."""
        return self._state.clean

    @property
    def skipped(self) -> Any:
        """Variable, i32, 0-d: steps skipped in all."""
        return self._state.skipped

    @property
    def last_applied(self) -> Any:
        """Tensor, bool, 0-d: the last step was applied, not skipped. True before the first."""
        return ops.equal(self._state.skipped_in_a_row, 0)

    @property
    def state(self) -> ScalerState:
        """The whole state in Python numbers; waits for the device."""
        return _state.numbers(self._state)

    @property
    def variables(self) -> list[Any]:
        """Own variables, then the inner optimizer's."""
        return [*self._variables, *self.inner_optimizer.variables]

    def check(self) -> None:
        """Read the state and report what happened since the last look.

        Warns (`SkippedStepWarning`) of skipped steps. Eager steps report by themselves; those in
        a graph or under jit cannot, so call this between epochs, or use `amp.CheckScaling`.

        Raises:
            ScaleFloorError: the rule gave up. The optimizer stays usable.
        """
        self._report(self.state, stacklevel=2)

    def _report(self, state: ScalerState, stacklevel: int) -> None:
        fresh = state.skipped - self._told
        if fresh:
            self._told = state.skipped
        if state.fault:
            self._state.fault.assign(0)
            raise_on_fault(state)
        if fresh > 1:
            warn_of_skips(fresh, state.loss_scale, stacklevel=stacklevel + 1)
        elif fresh == 1:
            warn_on_skip(state.skipped_in_a_row, state.loss_scale, stacklevel=stacklevel + 1)

    # Scaling and stepping.

    @unconverted
    def scale_loss(self, loss: Any) -> Any:
        """`loss` times the scale, in float32 (float64 where the loss is).

        Raises:
            BackendError: in a jitted JAX function that is not given the scale, which would be
                compiled in as a constant.
        """
        if not self._loss_scaled:  # Keras tracks every attribute that is set, at a price
            self._loss_scaled = True
        scale = self._state.loss_scale.value
        if baked(scale) and not isinstance(self._rule, Static):
            raise BackendError(
                "scale_loss() under jax.jit would compile today's scale in as a constant. Pass the"
                " state: optimizer.stateless_scale_loss(optimizer_variables, loss)"
            )
        value = wide(ops.convert_to_tensor(loss))
        if FRAMEWORK == "torch":
            return value * scale
        return ops.multiply(value, ops.cast(scale, value.dtype))

    get_scaled_loss = scale_loss

    def stateless_scale_loss(self, optimizer_variables: Sequence[Any], loss: Any) -> Any:
        """`loss` times the scale in `optimizer_variables`, for jitted JAX loops.

        Args:
            optimizer_variables: values of `self.variables`, as `stateless_apply` takes them.
            loss: the loss of any floating dtype.
        """
        with keras.StatelessScope(list(zip(self.variables, optimizer_variables, strict=True))):
            return self.scale_loss(loss)

    @unconverted
    def unscale(self, grads: Iterable[Any]) -> list[Any]:
        """The true gradients, to look at; `apply` itself takes them as they came."""
        return unscale(grads, 1.0 / read(self._state.loss_scale))

    @unconverted
    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Unscale the gradients and apply them, or skip the step.

        Args:
            grads: gradients of the scaled loss, in the order of the variables; tensors,
                `tf.IndexedSlices` or None. Not changed, but on torch those that are a variable's
                own `.grad` are unscaled in place, as by torch's GradScaler; a skip leaves them.
            trainable_variables: their variables; by default those the optimizer was built with.

        Raises:
            ValueError: every gradient is None; not built; or (TensorFlow) in a cross-replica
                context.
            BackendError: inside jax.jit, where `stateless_apply` must be used.
            ScaleFloorError: the rule gave up (where steps run eagerly; else see `check`).
        """
        grads = list(grads)
        if not grads:
            return
        variables = self._resolve(grads, trainable_variables)
        if all(g is None for g in grads):
            raise ValueError("No gradients provided for any variable.")
        if baked(self._state.loss_scale.value):
            raise BackendError(
                "apply() inside jax.jit cannot change variables; use stateless_apply(), which"
                " returns their new values"
            )
        if not self._loss_scaled and not self._warned:
            self._warned = True
            warnings.warn(
                "apply() divides the gradients by the loss scale, but nothing was multiplied by it:"
                " call loss = optimizer.scale_loss(loss) before computing gradients",
                UserWarning,
                stacklevel=2,
            )
        step(self, grads, variables)

    def _resolve(self, grads: Sequence[Any], variables: Iterable[Any] | None) -> list[Any]:
        """The variables that belong to `grads`; builds on them if this is the first call."""
        if variables is not None:
            variables = list(variables)
            if not self.built:
                with keras.name_scope(self.name):
                    self.build(variables)
            check_gradient_count(grads, variables, "given with them")
            return variables
        if not self.built:
            raise ValueError(
                "apply() without variables needs a built optimizer: call"
                " optimizer.build(model.trainable_variables) first"
            )
        check_gradient_count(grads, self._trainable_variables, "that the optimizer was built with")
        return list(self._trainable_variables)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any:
        """As `apply`, on pairs of gradient and variable; returns `iterations`."""
        pairs = list(grads_and_vars)
        self.apply([g for g, _ in pairs], [v for _, v in pairs])
        return self.iterations

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """`apply` as a function: new values of trainable and of optimizer variables.

        Its arguments are not changed, on torch neither. Raises as Keras' does.
        """
        if FRAMEWORK == "torch":  # whose optimizers write into the tensors of the scope
            optimizer_variables = [twin(v) for v in optimizer_variables]
            trainable_variables = [twin(v) for v in trainable_variables]
        result = super(_Keras, self).stateless_apply(
            optimizer_variables, grads, trainable_variables
        )
        return result  # type: ignore[no-any-return]

    # Saving.

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set every variable, the inner optimizer's included.

        Args:
            weights: arrays in the order of `variables`.

        Raises:
            ValueError: not built (as Keras).
            StateError: wrong count or shape, or a scale that is no positive finite number; nothing
                is changed.
        """
        if not self.built:
            raise ValueError(
                "set_weights() needs a built optimizer: call"
                " optimizer.build(model.trainable_variables) first"
            )
        shapes = [tuple(v.shape) for v in self.variables]
        found = [tuple(getattr(w, "shape", None) or np.shape(w)) for w in weights]
        if shapes != found:
            raise StateError(
                f"set_weights(): the shapes must be those of optimizer.variables, {shapes};"
                f" got {found}"
            )
        scale = check_scale(float(weights[self._place_of_scale()]), self._rule)
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)
        self._state.loss_scale.assign(scale)

    def _place_of_scale(self) -> int:
        return [id(v) for v in self.variables].index(id(self._state.loss_scale))

    def load_own_variables(self, store: Any) -> None:
        """As Keras; skips that were told of before saving are not told again.

        Raises:
            StateError: the saved scale is no positive finite number (one of 0 is lifted to the
                rule's floor, with a warning). Nothing is changed.
        """
        place, scale = str(self._place_of_scale()), None
        if len(store.keys()) == len(self.variables):
            scale = check_scale(float(np.asarray(store[place])), self._rule)
        super().load_own_variables(store)
        if scale is not None:
            self._state.loss_scale.assign(scale)
        self._told = self.state.skipped

    def get_config(self) -> dict[str, Any]:
        """As Keras, with the rule in portable form unless Keras' own two numbers say it all."""
        config: dict[str, Any] = super().get_config()
        if not self._keras_arguments:
            del config["initial_scale"], config["dynamic_growth_steps"]
            config["rule"] = rule_to_dict(self._rule)
        return config

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> LossScaleOptimizer:
        """The optimizer that `get_config`, Keras' or ours, describes."""
        values = dict(config)
        if values.get("rule") is not None:
            values["rule"] = rule_from_dict(values["rule"])
        made: LossScaleOptimizer = super().from_config(values, custom_objects)
        return made

    def to_dict(self) -> dict[str, Any]:
        """Rule and state in polyamp's portable JSON form."""
        return scaler_to_dict(self._rule, self.state)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], inner_optimizer: Any) -> LossScaleOptimizer:
        """An optimizer around `inner_optimizer` that goes on from `to_dict` of any framework.

        Raises:
            StateError: `data` is not a saved scaler.
        """
        rule, state = scaler_from_dict(data)
        made = cls(inner_optimizer, rule=rule)
        _state.write(made._state, state)
        made._told = state.skipped
        return made
