"""The two-line way: compile a model with loss scaling where it needs it, and load it again."""

from __future__ import annotations

from typing import Any

import keras

from polyamp._errors import RuleError
from polyamp._interchange import check_scale
from polyamp._policy import Policy
from polyamp._policy_map import PolicyMap
from polyamp._presets import resolve_rule
from polyamp._scaling import Rule
from polyamp_keras import _state
from polyamp_keras._modules import apply_policy
from polyamp_keras._ops import number
from polyamp_keras._places import computes_in_float16
from polyamp_keras._restore import LossMean, RestoringStep
from polyamp_keras._scaler import LossScaleOptimizer


def compile(
    model: Any,
    optimizer: Any = "rmsprop",
    loss: Any = None,
    *,
    policy: Policy | PolicyMap | keras.DTypePolicy | str | None = None,
    rule: Rule | str | None = None,
    restore_seeds: bool = True,
    **kwargs: Any,
) -> None:
    """`model.compile`, with loss scaling where a layer computes in float16.

        amp.compile(model, "adam", loss="mse")
        model.fit(x, y)

    The optimizer is wrapped in a `LossScaleOptimizer` (Keras' own is replaced by it), also for a
    policy map or per-layer policies, which Keras passes over. A skipped step then leaves no trace:
    BatchNorm statistics, seeds and metrics are put back, so that the epoch's mean loss counts the
    batches that were applied; it is NaN if there were none.

    Args:
        model: a Keras model. Of one that is not built yet only the layers it has are looked at.
        optimizer, loss, **kwargs: as `model.compile` takes them; with `auto_scale_loss=False` the
            optimizer stays as it is.
        policy: a policy, a policy map, a policy string or a Keras policy to apply to the model
            first (`apply_policy`).
        rule: a rule or a system's name, as in `LossScaleOptimizer`; given, it asks for scaling.
        restore_seeds: put seed generators (dropout) back too on a skip, so that later steps equal
            those of a run without the batch.

    Raises:
        PolicyError: `policy` is not one, or cannot be applied; nothing is changed.
        RuleError: `rule` is not one, or another than that of the LossScaleOptimizer given.
        TypeError: `model` is not a Keras model.
        ValueError: as Keras.

    The wrapper sits on this model object: a model that `keras.models.load_model`, pickle or
    `clone_model` made needs `amp.load_model` or `amp.compile` again. `steps_per_execution` and
    `MirroredStrategy` work; there the batch's own logs (not the epoch's) still show the skip.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"compile() takes a keras.Model, got {type(model).__name__}")
    if policy is not None:
        apply_policy(model, policy)
    chosen = keras.optimizers.get(optimizer)
    scaled = isinstance(chosen, keras.optimizers.LossScaleOptimizer)
    wanted = kwargs.pop("auto_scale_loss", True)
    if wanted and (rule or scaled or computes_in_float16(model)):
        chosen = _wrapped(chosen, rule)
    model.compile(optimizer=chosen, loss=loss, auto_scale_loss=False, **kwargs)
    restore_on_skip(model, restore_seeds, watched=wanted)


def load_model(filepath: Any, *, restore_seeds: bool = True, **kwargs: Any) -> Any:
    """`keras.models.load_model`, for a model that was compiled with `amp.compile`.

    Args:
        filepath, **kwargs: as Keras takes them.
        restore_seeds: as in `amp.compile`.

    Returns:
        The model, with optimizer, scale and counters as they were saved.
    """
    model = keras.models.load_model(filepath, **kwargs)
    if isinstance(getattr(model, "optimizer", None), LossScaleOptimizer):
        restore_on_skip(model, restore_seeds)
    return model


def restore_on_skip(model: Any, restore_seeds: bool, watched: bool = True) -> None:
    """Make the model's train step leave no trace where it is skipped; once, however often asked.

    Where `watched`, it warns if the optimizer does not scale and float16 layers have come since.
    """
    step = model.train_step
    original = step.original if isinstance(step, RestoringStep) else step
    model.train_step = RestoringStep(model, original, restore_seeds, watched)
    if isinstance(model.optimizer, LossScaleOptimizer) and model._loss_tracker is not None:
        tracker = LossMean(name=model._loss_tracker.name)
        object.__setattr__(model, "_loss_tracker", tracker)  # Keras does not track it either


def _wrapped(optimizer: Any, rule: Rule | str | None) -> LossScaleOptimizer:
    if isinstance(optimizer, LossScaleOptimizer):
        if rule is not None and resolve_rule(rule) != optimizer.rule:
            raise RuleError(
                f"the optimizer has a rule already, {optimizer.rule!r}: give the one wanted to"
                " LossScaleOptimizer, or compile its inner_optimizer with rule="
            )
        return optimizer
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return LossScaleOptimizer(optimizer, rule=rule)
    inner, scale = optimizer.inner_optimizer, optimizer.initial_scale
    if rule is not None:
        return LossScaleOptimizer(inner, rule=rule)
    made = LossScaleOptimizer(inner, scale, optimizer.dynamic_growth_steps)
    if optimizer.built:
        live = check_scale(number(optimizer.dynamic_scale.value), made.rule)
        clean = int(number(optimizer.step_counter.value))
        _state.write(made._state, made.state._replace(loss_scale=live, clean=clean))
    return made
