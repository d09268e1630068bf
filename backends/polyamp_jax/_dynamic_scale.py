"""DynamicScale: flax.training.dynamic_scale's interface over polyamp's state machine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization, struct

from polyamp._errors import StateError
from polyamp._presets import like, resolve_rule
from polyamp._scaling import Rule, bind
from polyamp._state import ScalerState
from polyamp._xp import F32_MAX, F32_TINY
from polyamp_jax._cast import divide
from polyamp_jax._distributed import pmean
from polyamp_jax._gradients import seeded
from polyamp_jax._inspect import inspect
from polyamp_jax._ops import xp
from polyamp_jax._state import typed

Array = jax.Array


class DynamicScaleResult(NamedTuple):
    """What `DynamicScale.value_and_grad` gives; flax's names and order."""

    dynamic_scale: DynamicScale
    """The scale of the next step."""
    finite: Array
    """0-d bool: every gradient is finite. Where it is not, keep the old parameters."""
    aux: Any
    """The loss, or (loss, aux); not scaled."""
    grad: Any
    """Unscaled gradients, float32 or wider."""


class DynamicScale(struct.PyTreeNode):
    """A drop-in for `flax.training.dynamic_scale.DynamicScale`.

        dynamic_scale, finite, loss, grads = dynamic_scale.value_and_grad(loss_fn)(params, batch)
        params = jax.tree.map(partial(jnp.where, finite), new_params, params)

    The same fields, result and decisions, but: the loss is never multiplied, so one in float16
    stays finite; the scale is float32 from the first step on and no lower than 2**-126; a count
    already past the interval still grows the scale. `loss_scaled` costs less: it has no select over
    parameters and moments.

    Attributes:
        growth_factor, backoff_factor, growth_interval, minimum_scale: as in flax, static. The scale
            grows on the step after `growth_interval` finite ones, flax's own way.
        fin_steps: i32, finite steps since the last change.
        scale: f32.
        rule: another rule, or the name of a system, in place of the four numbers; static.
        state: under `rule`, the rest of its state; `scale` and `fin_steps` are two fields of it.
    """

    growth_factor: float = struct.field(pytree_node=False, default=2.0)
    backoff_factor: float = struct.field(pytree_node=False, default=0.5)
    growth_interval: int = struct.field(pytree_node=False, default=2000)
    fin_steps: Any = 0
    scale: Any = 65536.0
    minimum_scale: float | None = struct.field(pytree_node=False, default=F32_TINY)
    rule: Rule | str | None = struct.field(pytree_node=False, default=None)
    state: ScalerState | None = None

    def __post_init__(self) -> None:
        if self.rule is not None and self.state is None and isinstance(self.scale, Real):
            start = resolve_rule(self.rule).init(xp)
            _set(self, scale=start.loss_scale, fin_steps=start.clean, state=start)
        arrays = (np.ndarray, np.generic, jax.Array)
        if isinstance(self.scale, (float, *arrays)):
            _set(self, scale=jnp.asarray(self.scale, jnp.float32))
            if isinstance(self.fin_steps, (int, *arrays)):
                _set(self, fin_steps=jnp.asarray(self.fin_steps, jnp.int32))

    def value_and_grad(
        self,
        fun: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: Any = None,
    ) -> Callable[..., DynamicScaleResult]:
        """`jax.value_and_grad` with loss scaling.

        Args:
            fun, argnums, has_aux: as in `jax.value_and_grad`.
            axis_name: axis of shard_map or pmap over which gradients are averaged, in float32.

        Returns:
            A function of the arguments of `fun` that gives a `DynamicScaleResult`.
        """
        rule, state = self._now()
        scale = state.loss_scale

        @functools.wraps(fun)
        def wrapped(*args: Any) -> DynamicScaleResult:
            value, grads = seeded(fun, scale, argnums, has_aux)(*args)
            grads = divide(grads, scale)
            if axis_name is not None:
                grads = pmean(grads, axis_name)
            signal = inspect(grads, 1.0, amax=rule.wants_amax)
            if rule.wants_amax:
                signal = signal._replace(amax=signal.amax * scale)
            new = self._next(bind(rule, xp)(state, signal))
            return DynamicScaleResult(new, signal.finite, value, grads)

        return wrapped

    def _now(self) -> tuple[Rule, ScalerState]:
        rule = self._flax_rule() if self.rule is None else resolve_rule(self.rule)
        state = rule.init(xp) if self.state is None else self.state
        return rule, typed(state._replace(loss_scale=self.scale, clean=self.fin_steps))

    def _flax_rule(self) -> Rule:
        floor = max(F32_TINY, float(self.minimum_scale or 0.0))
        return like(
            "flax",
            init_scale=max(floor, 2.0**16),
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            min_scale=floor,
            max_scale=F32_MAX,
        )

    def _next(self, state: ScalerState) -> DynamicScale:
        new: DynamicScale = self.replace(
            fin_steps=state.clean,
            scale=state.loss_scale,
            state=None if self.rule is None else state,
        )
        return new


def _set(frozen: DynamicScale, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(frozen, name, value)


def _to_state_dict(dynamic_scale: DynamicScale) -> dict[str, Any]:
    """flax's two fields, so that its checkpoints and these are alike, and what a rule adds."""
    names = ["fin_steps", "scale"] + ["state"] * (dynamic_scale.state is not None)
    return {name: serialization.to_state_dict(getattr(dynamic_scale, name)) for name in names}


def _from_state_dict(dynamic_scale: DynamicScale, saved: dict[str, Any]) -> DynamicScale:
    known = _to_state_dict(dynamic_scale)
    if saved.keys() != known.keys():
        raise StateError(f"DynamicScale: expected the keys {list(known)}, got {list(saved)}")
    return dynamic_scale.replace(
        **{
            name: serialization.from_state_dict(getattr(dynamic_scale, name), value)
            for name, value in saved.items()
        }
    )


serialization.register_serialization_state(
    DynamicScale, _to_state_dict, _from_state_dict, override=True
)
