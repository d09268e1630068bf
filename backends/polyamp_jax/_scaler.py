"""Loss scaling as an optax transformation.

    value_and_grad   seed of the backward pass = loss_scale: the loss itself is never multiplied
    update           finite = every gradient is, unscaled
                     cond(finite, inner update of the unscaled gradients, zeros and the old state)
                     scaler = transition(rule, scaler, finite)
    step             the same, with the parameters updated inside the branch

Reject is branch 0 of the conditional: XLA then needs no copy of parameters and moments
(8.6 MiB of temporaries instead of 28.4 for an MLP of 1.9M parameters under Adam).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from polyamp._dynamic import Dynamic
from polyamp._errors import BackendError, RuleError
from polyamp._presets import resolve_rule
from polyamp._scaling import Rule, bind
from polyamp._state import ScalerState
from polyamp_jax._cast import unscaled
from polyamp_jax._distributed import pmean, reduce
from polyamp_jax._inspect import inspect
from polyamp_jax._ops import select, xp

Skip = Literal["cond", "select"]


class LossScaledState(NamedTuple):
    """State of `loss_scaled`: a pytree; `optax.tree.get(state, "loss_scale")` finds the scale."""

    scaler: ScalerState
    """State of the loss scaler, 0-d arrays (f32, i32)."""
    inner_state: Any
    """State of the wrapped transformation, untouched by skipped steps."""


class LossScaled(optax.GradientTransformationExtraArgs):
    """What `loss_scaled` returns: an optax transformation that `step` can look into.

    Attributes:
        rule: the rule in force.
        inner: the wrapped transformation.
    """

    rule: Rule
    inner: optax.GradientTransformationExtraArgs
    judge: Callable[[Any, LossScaledState, Any], tuple[Any, Any, ScalerState]]
    skip: Skip


def loss_scaled(
    inner: optax.GradientTransformation,
    rule: Rule | str | None = None,
    *,
    axis_name: Any = None,
    skip: Skip = "cond",
) -> LossScaled:
    """Wrap an optax transformation so that it takes scaled gradients and skips what overflows.

        tx = amp.loss_scaled(optax.adamw(1e-3))
        opt_state = tx.init(params)
        loss, grads = amp.value_and_grad(loss_fn)(opt_state, params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)      # or amp.step
        params = optax.apply_updates(params, updates)

    It must be the outermost transformation. On a step with an infinity or a NaN in its gradients,
    raw or unscaled, the updates are zeros, the inner state (moments, counts, schedules) stays as it
    is bit for bit, and the scale is cut as the rule says. `update` takes one keyword of its own,
    `loss=` (the unscaled loss; where it is not finite the step is skipped too), and passes others
    on.

    With `optax.MultiSteps` inside, single micro-batches are judged: a bad one is dropped, and its
    window goes on. Around `loss_scaled` it would mix gradients of different scales.

    Args:
        inner: any optax transformation or chain.
        rule: a `polyamp.Rule` or the name of a system ("torch", "flax", ...); None: `Dynamic()`.
        axis_name: axis of shard_map or pmap over which gradients are averaged, in float32, and the
            decision is common. Under jit with shardings leave it out.
        skip: "cond" runs the inner update only where it counts; "select" always runs it and
            chooses, for vmap over the whole step.

    Raises:
        RuleError: an unknown rule or `skip`.
    """
    if skip not in ("cond", "select"):
        raise RuleError(f'skip must be "cond" or "select", got {skip!r}')
    chosen = Dynamic() if rule is None else resolve_rule(rule)
    wrapped = optax.with_extra_args_support(inner)

    def judge(grads: Any, state: LossScaledState, loss: Any) -> tuple[Any, Any, ScalerState]:
        """(applied, a function that gives the unscaled gradients, the scaler's new state)."""
        scale = state.scaler.loss_scale
        if axis_name is not None:
            grads = pmean(jax.tree.map(lambda g: unscaled(g, scale), grads), axis_name)
            signal = inspect(grads, 1.0, loss, amax=False)
            if chosen.wants_amax:
                signal = signal._replace(amax=inspect(grads, 1.0, amax=True).amax * scale)
            unscaled_grads = lambda: grads  # noqa: E731
        else:
            signal = inspect(grads, scale, loss, amax=chosen.wants_amax)
            unscaled_grads = lambda: jax.tree.map(lambda g: unscaled(g, scale), grads)  # noqa: E731
        signal = reduce(signal, axis_name)
        applied = signal.finite if loss is None else signal.finite & signal.loss_finite
        return applied, unscaled_grads, bind(chosen, xp)(state.scaler, signal)

    def init(params: Any) -> LossScaledState:
        return LossScaledState(chosen.init(xp), wrapped.init(params))

    def update(
        updates: Any, state: LossScaledState, params: Any = None, *, loss: Any = None, **extra: Any
    ) -> tuple[Any, LossScaledState]:
        applied, grads, scaler = judge(updates, state, loss)

        def apply() -> tuple[Any, Any]:
            return wrapped.update(grads(), state.inner_state, params, **extra)

        def reject() -> tuple[Any, Any]:
            shapes, _ = jax.eval_shape(apply)
            return jax.tree.map(jnp.zeros_like, shapes), state.inner_state

        new, inner_state = _chosen(skip, applied, apply, reject)
        return new, LossScaledState(scaler, inner_state)

    made = LossScaled(init, update)
    made.rule, made.inner, made.judge, made.skip = chosen, wrapped, judge, skip
    return made


def _chosen(skip: Skip, applied: Any, apply: Callable[[], Any], reject: Callable[[], Any]) -> Any:
    if skip == "select":
        return select(applied, apply(), reject())
    return jax.lax.cond(applied, apply, reject)


def step(
    tx: LossScaled,
    grads: Any,
    opt_state: LossScaledState,
    params: Any,
    *,
    loss: Any = None,
    extra: tuple[Any, Any] | None = None,
    **more: Any,
) -> tuple[Any, ...]:
    """Update the parameters, or skip: the cheapest way, since nothing is selected afterwards.

        (loss, stats), grads = amp.value_and_grad(loss_fn, has_aux=True)(opt_state, params, batch)
        params, opt_state, batch_stats = amp.step(
            tx, grads, opt_state, params, loss=loss, extra=(batch_stats, stats))

    Args:
        tx: what `loss_scaled` returned.
        grads: scaled gradients, as `value_and_grad` gives them.
        opt_state: of `tx`.
        params: the parameters.
        loss: the unscaled loss, so that a forward pass that is not finite is known as such.
        extra: (old, new) pytrees of whatever else the step makes new (batch statistics, EMA, rng
            keys, counters); the old one is kept on a skip.
        **more: passed on to the inner transformation.

    Returns:
        (params, opt_state), and with `extra` the chosen one.

    Raises:
        BackendError: `tx` was not made by `loss_scaled`.
    """
    if not isinstance(tx, LossScaled):
        raise BackendError(
            f"amp.step needs what amp.loss_scaled returns, got {type(tx).__name__}; loss_scaled"
            " must be the outermost transformation"
        )
    old, new = (None, None) if extra is None else extra
    applied, unscaled_grads, scaler = tx.judge(grads, opt_state, loss)

    def apply() -> tuple[Any, Any, Any]:
        updates, state = tx.inner.update(unscaled_grads(), opt_state.inner_state, params, **more)
        return optax.apply_updates(params, updates), state, new

    def reject() -> tuple[Any, Any, Any]:
        return params, opt_state.inner_state, old

    params, inner_state, kept = _chosen(tx.skip, applied, apply, reject)
    state = LossScaledState(scaler, inner_state)
    return (params, state) if extra is None else (params, state, kept)
