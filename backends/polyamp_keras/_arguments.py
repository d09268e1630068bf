"""What LossScaleOptimizer's constructor is given, and the rule that comes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from polyamp._errors import BackendError, PolicyError, RuleError
from polyamp._presets import like, resolve_rule
from polyamp._scaling import Rule


def rule_from(rule: Rule | str | None, scale: float | None, steps: int | None) -> Rule:
    """The rule that the constructor's arguments mean.

    Args:
        rule: as users pass it.
        scale: Keras' `initial_scale`; None where it was not given.
        steps: Keras' `dynamic_growth_steps`; None where it was not given.

    Raises:
        RuleError: a rule and one of Keras' arguments, or a parameter out of range.
    """
    given = {"initial_scale": scale, "dynamic_growth_steps": steps}
    named = [name for name, value in given.items() if value is not None]
    if rule is not None:
        if named:
            raise RuleError(
                f"give either rule= or {', '.join(named)}, not both; a rule takes them itself, as"
                " in Dynamic(init_scale=1024.0, growth_interval=500)"
            )
        return resolve_rule(rule)
    ours = {"init_scale": scale, "growth_interval": steps}
    return like("keras", **{key: value for key, value in ours.items() if value is not None})


def check_inner(optimizer: Any) -> None:
    """Refuse what cannot be wrapped.

    Raises:
        TypeError: not an optimizer object.
        BackendError: it scales losses itself, and would divide by its own scale too.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise BackendError(
            f"the inner optimizer is a {type(optimizer).__name__} itself and would divide the"
            " gradients a second time: pass its inner_optimizer"
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            "the inner optimizer must be a keras.optimizers.Optimizer, such as"
            f" keras.optimizers.Adam(1e-3); got {optimizer!r}. keras.optimizers.get(name) makes"
            " one of a name"
        )


def check_epsilon(optimizer: Any, variables: Iterable[Any]) -> None:
    """Refuse an epsilon that is zero in the dtype of the variables: 0 / 0 would write NaN.

    Raises:
        PolicyError: such an epsilon, and what to do.
    """
    epsilon = getattr(optimizer, "epsilon", None)
    if not isinstance(epsilon, float) or epsilon == 0.0:
        return
    dtypes = {keras.backend.standardize_dtype(v.dtype) for v in variables}
    if "float16" in dtypes and np.float16(epsilon) == 0.0:
        raise PolicyError(
            f"{type(optimizer).__name__}(epsilon={epsilon:g}) on float16 variables: that epsilon is"
            " zero in float16, and a zero gradient would write NaN. Keep variables in float32"
            ' (dtype policy "mixed_float16"), or take an epsilon of 1e-4 or more'
        )


def check_gradient_count(grads: Sequence[Any], variables: Sequence[Any], whose: str) -> None:
    """Refuse more or fewer gradients than variables."""
    if len(grads) != len(variables):
        raise ValueError(f"got {len(grads)} gradients for the {len(variables)} variables {whose}")
