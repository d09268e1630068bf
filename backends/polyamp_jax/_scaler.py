"""Loss scaling as an optax transformation.

    value_and_grad   seed of the backward pass = loss_scale: the loss itself is never multiplied
    update           unscaled = grads / loss_scale, averaged over axis_name
                     scaler = transition(rule, scaler, signal of unscaled and loss)
                     cond(applied, inner update of unscaled, zeros and the old state)
    step             the same, with the parameters updated inside the branch

Reject is branch 0 of the conditional: XLA then needs no copy of parameters and moments
(8.6 MiB of temporaries instead of 28.4 for an MLP of 1.9M parameters under Adam). The gradients are
unscaled outside of it: inside, XLA would contract the product into the optimizer's arithmetic,
which then rounds otherwise than without loss scaling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from polyamp._errors import BackendError, RuleError, StateError
from polyamp._presets import resolve_rule
from polyamp._scaling import MAX_SCALE, Rule, Static, bind
from polyamp._state import ScalerState, Signal, decision
from polyamp_jax._cast import divide, is_floating, unscale
from polyamp_jax._distributed import axes, pmean, reduce
from polyamp_jax._inspect import all_finite, arrays, largest, share
from polyamp_jax._ops import select, xp
from polyamp_jax._state import typed

Skip = Literal["cond", "select"]
SAMPLED = 4096
"""Entries of each gradient that its share of underflow is estimated from."""


class LossScaledState(NamedTuple):
    """State of `loss_scaled`: a pytree; `optax.tree.get(state, "loss_scale")` finds the scale."""

    scaler: ScalerState
    """State of the loss scaler, 0-d arrays (f32, i32)."""
    inner_state: Any
    """State of the wrapped transformation, untouched by skipped steps."""


class Judged(NamedTuple):
    """A step decided on."""

    grads: Any
    """Unscaled gradients."""
    scaler: ScalerState
    """The scaler's new state."""
    applied: Any
    """0-d bool."""


class LossScaled(optax.GradientTransformationExtraArgs):
    """What `loss_scaled` returns: an optax transformation that `step` can look into.

    Attributes:
        rule: the rule in force.
        inner: the wrapped transformation.
    """

    rule: Rule
    inner: optax.GradientTransformationExtraArgs
    judge: Callable[[Any, LossScaledState, Any], Judged]
    skip: Skip


def loss_scaled(
    inner: optax.GradientTransformation,
    rule: Rule | str | None = None,
    *,
    axis_name: Any = None,
    agree_axis_name: Any = None,
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
        axis_name: name, or names, of the axes of shard_map or pmap over which gradients are
            averaged, in float32, and the decision is common: parameters are replicated over them.
            Under jit with shardings leave it out.
        agree_axis_name: the same for axes over which only the decision is common and no gradient is
            averaged: parameters are split over them (FSDP, tensor parallelism).
        skip: "cond" runs the inner update only where it counts; "select" always runs it and
            chooses, for vmap over the whole step.

    Raises:
        RuleError: an unknown rule or `skip`.
        TypeError: `inner` is no transformation.
        StateError (`update`): a state that is not of this transformation.
    """
    if skip not in ("cond", "select"):
        raise RuleError(f'skip must be "cond" or "select", got {skip!r}')
    chosen, inner_tx = resolve_rule(rule), _optax(inner)
    wide, averaged, agreed = _may_exceed(chosen), axes(axis_name), axes(agree_axis_name)

    def judge(grads: Any, state: LossScaledState, loss: Any) -> Judged:
        if not isinstance(state, LossScaledState):
            raise StateError(
                "update(grads, opt_state, params) and amp.step(tx, grads, opt_state, params) need"
                f" the state of tx.init after the gradients, got {type(state).__name__}"
            )
        old = typed(state.scaler)
        grads = jax.tree.map(_array, grads)
        amax, by = None, old.loss_scale
        sound: Any = True
        if chosen.wants_amax:
            amax = largest(arrays(grads))
            sound = jnp.isfinite(amax) & jnp.isfinite(amax / by)
            # Dependent on amax, or XLA may unscale first, into a second copy of the gradients.
            by = jnp.where(sound, by, 1.0)
        unscaled = divide(grads, by) if wide else unscale(grads, 1.0 / by)
        if averaged:
            unscaled = pmean(unscaled, averaged)
        together = reduce(Signal(all_finite(arrays(unscaled))), agreed or None)
        loss_finite = True if loss is None else jnp.isfinite(loss).all()
        each = Signal(sound, loss_finite, amax, _share_if_due(chosen, old, grads))
        each = reduce(each, axes(averaged, agreed) or None)
        signal = each._replace(finite=together.finite & each.finite)
        new = bind(chosen, xp)(old, signal)
        return Judged(unscaled, new, decision(old, new).applied)

    def init(params: Any) -> LossScaledState:
        return LossScaledState(chosen.init(xp), inner_tx.init(params))

    def update(
        updates: Any, state: LossScaledState, params: Any = None, *, loss: Any = None, **extra: Any
    ) -> tuple[Any, LossScaledState]:
        judged = judge(updates, state, loss)

        def apply() -> tuple[Any, Any]:
            return inner_update(inner_tx, judged.grads, state.inner_state, params, extra)

        def reject() -> tuple[Any, Any]:
            shapes, _ = jax.eval_shape(apply)
            return jax.tree.map(jnp.zeros_like, shapes), state.inner_state

        new, inner_state = _chosen(skip, judged.applied, apply, reject)
        return new, LossScaledState(judged.scaler, inner_state)

    made = LossScaled(init, update)
    made.rule, made.inner, made.judge, made.skip = chosen, inner_tx, judge, skip
    return made


def _optax(inner: Any) -> optax.GradientTransformationExtraArgs:
    if isinstance(inner, LossScaled):
        raise TypeError("loss_scaled got an optimizer that is loss_scaled already; once is enough")
    if isinstance(inner, optax.MultiSteps):
        return inner.gradient_transformation()
    if not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise TypeError(
            "loss_scaled needs an optax transformation such as optax.adam(1e-3), or"
            f" optax.MultiSteps, got {inner!r}"
        )
    return optax.with_extra_args_support(inner)


def _share_if_due(rule: Rule, state: ScalerState, grads: Any) -> Any:
    """`Signal.sub` on the steps the rule wants it, else -1.

    It is estimated from a few thousand entries of each array: a conditional around a pass over all
    of them makes XLA keep a second copy of the gradients.
    """
    if not rule.sub_interval:
        return -1.0
    found = share([_some(value) for value in arrays(grads)])
    return jnp.where(state.step % rule.sub_interval == 0, found, jnp.float32(-1.0))


def _some(value: Any) -> jax.Array:
    """Every n-th entry, 1-d: all of up to `SAMPLED`."""
    flat = jnp.ravel(value)
    return flat[:: -(-flat.size // SAMPLED) | 1] if flat.size > SAMPLED else flat


def _array(grad: Any) -> Any:
    """A gradient of Python or numpy as an array of JAX, in JAX's dtypes."""
    if not isinstance(grad, (float, complex, np.ndarray, np.generic)):
        return grad
    return jnp.asarray(grad) if jnp.issubdtype(jnp.result_type(grad), jnp.inexact) else grad


def _may_exceed(rule: Rule) -> bool:
    """Whether the scale may go where its reciprocal is subnormal, which XLA flushes to 0."""
    return (rule.init_scale if isinstance(rule, Static) else rule.max_scale) > MAX_SCALE


def inner_update(
    tx: optax.GradientTransformationExtraArgs, grads: Any, state: Any, params: Any, extra: Any
) -> tuple[Any, Any]:
    """(updates, new state) of the wrapped transformation, the state in the dtypes it had.

    Unscaled gradients are float32 where the parameters, and so the moments, may be narrower.
    """
    updates, new = tx.update(grads, state, params, **extra)
    return updates, jax.tree.map(_in_dtype_of, new, state)


def _in_dtype_of(new: Any, old: Any) -> Any:
    return new.astype(old.dtype) if is_floating(new) and is_floating(old) else new


def _chosen(skip: Skip, applied: Any, apply: Callable[[], Any], reject: Callable[[], Any]) -> Any:
    if skip == "select":
        return select(applied, apply(), reject())
    if not isinstance(applied, jax.core.Tracer):
        return apply() if applied else reject()
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
        StateError: `opt_state` is not of `tx`.
    """
    if not isinstance(tx, LossScaled):
        raise BackendError(
            f"amp.step needs what amp.loss_scaled returns, got {type(tx).__name__}; loss_scaled"
            " must be the outermost transformation"
        )
    old, new = (None, None) if extra is None else extra
    judged = tx.judge(grads, opt_state, loss)

    def apply() -> tuple[Any, Any, Any]:
        updates, state = inner_update(tx.inner, judged.grads, opt_state.inner_state, params, more)
        return optax.apply_updates(params, updates), state, new

    def reject() -> tuple[Any, Any, Any]:
        return params, opt_state.inner_state, old

    params, inner_state, kept = _chosen(tx.skip, judged.applied, apply, reject)
    state = LossScaledState(judged.scaler, inner_state)
    return (params, state) if extra is None else (params, state, kept)
