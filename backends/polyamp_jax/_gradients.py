"""value_and_grad with the loss scale as the seed of the backward pass, and with statistics."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyamp._errors import PolyampError
from polyamp._policy_map import PolicyMap
from polyamp_jax._cast import unscale
from polyamp_jax._compat import varying
from polyamp_jax._distributed import axes, vary
from polyamp_jax._measure import ends, measured_of, raw, summed
from polyamp_jax._plan import is_a
from polyamp_jax._state import scale_of
from polyamp_jax._units import owned
from polyamp_jax._watch import sinks_of, watching

MIN_SEED_F16, MAX_SEED_F16 = 2.0**-14, 2.0**15
"""Smallest and largest power of two that float16 holds as a normal number."""


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """`jax.value_and_grad` whose gradients carry the loss scale of an optimizer state.

    Args:
        fun: as in `jax.value_and_grad`: gives a real floating 0-d loss, with `has_aux` a pair of
            it and anything else.
        argnums: which arguments of `fun` to differentiate.
        has_aux: see `fun`.

    Returns:
        A function `(opt_state, *args, **kwargs)` that gives `(loss, grads)` or
        `((loss, aux), grads)`: the loss as it is, unscaled, in its own dtype; the gradients times
        the scale in `opt_state` (of `loss_scaled`, wherever it is in there).

    The scale never meets the loss, so it cannot overflow there. A loss in float16 takes
    no seed above 2**15 (or below 2**-14), and one in bfloat16 only a rounded one: what is missing
    is multiplied into the gradients, in float32. Let `fun` return float32.

    In `shard_map` the gradients of a loss that differs between devices are each device's own, as in
    `pmap`, for `loss_scaled(..., axis_name=...)` to average in float32. (`jax.grad` would add them
    up, in the dtype in which the parameters meet the data.)

    Raises (the function):
        TypeError: the loss is not a real floating scalar, or an argument is a live nnx module with
            more state than parameters.
        StateError: no `loss_scale` in `opt_state`.
    """

    def wrapped(opt_state: Any, *args: Any, **kwargs: Any) -> Any:
        for arg in args:
            _refuse_live(arg)
        return seeded(fun, scale_of(opt_state), argnums, has_aux)(*args, **kwargs)

    wrapped.__name__ = getattr(fun, "__name__", "wrapped")
    wrapped.__doc__ = fun.__doc__
    with contextlib.suppress(TypeError, ValueError):
        wrapped.__signature__ = _signature(fun)  # type: ignore[attr-defined]
    return wrapped


def _signature(fun: Callable[..., Any]) -> inspect.Signature:
    """That of `fun` after `opt_state`, by which jit counts its static and donated arguments."""
    own = inspect.signature(fun)
    first = inspect.Parameter("opt_state", inspect.Parameter.POSITIONAL_ONLY)
    params = [
        p.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if p.kind is inspect.Parameter.POSITIONAL_ONLY
        else p
        for p in own.parameters.values()
    ]
    return inspect.Signature([first, *params])


def _refuse_live(arg: Any) -> None:
    """Refuse an nnx module whose statistics or random state the call would change and lose."""
    if not is_a(arg, "flax.nnx", "Module"):
        return
    from flax import nnx

    if jax.tree.leaves(nnx.state(arg, nnx.Not(nnx.Param))):
        raise TypeError(
            f"value_and_grad got a live {type(arg).__name__} with batch statistics or random state,"
            " whose changes would be lost: graph, params, rest = nnx.split(model, nnx.Param, ...),"
            " merge it inside (copy=True), and return nnx.state(merged, nnx.Not(nnx.Param)) as aux"
        )


class Plan(NamedTuple):
    """What one step is to be, of `Adaptive.plan`: hashable, a static argument of `jax.jit`."""

    policy: PolicyMap
    """For `apply_policy`, inside the function that is differentiated."""
    sampling: bool
    """Whether the modules are measured."""
    units: tuple[str, ...]
    """Paths of the modules that are."""


def value_grad_and_statistics(
    fun: Callable[..., Any],
    plan: Plan,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    axis_name: Any = None,
) -> Callable[..., Any]:
    """`value_and_grad` that also measures the modules, in the steps in which `plan` says so.

        def loss_fn(params, x, y):
            module = amp.apply_policy(model, plan.policy)
            return criterion(module.apply({"params": params}, x), y)

        measured = amp.value_grad_and_statistics(loss_fn, plan)
        loss, grads, statistics = measured(opt_state, params, x, y)

    Args:
        fun, argnums, has_aux: as of `value_and_grad`. The policy is applied inside `fun`: only
            there do the modules know that they are measured.
        plan: of `Adaptive`, static.
        axis_name: name, or names, of the axes of shard_map or pmap over which the statistics are
            put together. Under jit with shardings leave it out.

    Returns:
        A function `(opt_state, *args, **kwargs)` that gives what that of `value_and_grad` gives,
        and the statistics for `Adaptive.update`: `{}`, or by path f32 (5, 8), the numbers of
        `polyamp._statistics.RAW` of inputs, outputs, the outputs' scaled gradients, and the
        parameters' gradients and values; of inputs and values amax, size and nonfinite alone.
        Under vmap the whole batch is measured as one. Of a module
        called several times amax may be a quarter too large (`_measure.summed`). A module whose
        outputs have no part in the loss has size 0.

    Raises (the function):
        PolyampError: no module was measured.
        Others as `value_and_grad`.
    """

    def wrapped(opt_state: Any, *args: Any, **kwargs: Any) -> Any:
        for arg in args:
            _refuse_live(arg)
        scale = scale_of(opt_state)
        if not plan.sampling:
            value, grads = seeded(fun, scale, argnums, has_aux)(*args, **kwargs)
            return value, grads, {}
        value, grads, statistics = measured(fun, plan.units, scale, argnums, has_aux, [])(
            *args, **kwargs
        )
        return value, grads, _over(statistics, axes(axis_name))

    return wrapped


def measured(
    fun: Callable[..., Any],
    units: tuple[str, ...],
    scale: Any,
    argnums: int | Sequence[int],
    has_aux: bool,
    called: list[str],
) -> Callable[..., Any]:
    """As `seeded`, and the statistics of every unit, f32 (5, 8).

    Args:
        called: is given the paths of the units in the order of their calls, when it is traced.
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        called.clear()

        def of(sinks: Any, *inner: Any, **keywords: Any) -> Any:
            with watching(sinks) as watch:
                out = fun(*inner, **keywords)
            called.extend(watch.called)
            return out

        places = (0, *(number + 1 for number in numbers))
        value, (sinks, *grads) = seeded(of, scale, places, has_aux, plain=1)(
            sinks_of(units), *args, **kwargs
        )
        if not called:
            raise PolyampError(
                "no module was measured: apply the policy inside the function that is"
                " differentiated, amp.apply_policy(model, plan.policy)"
            )
        of_grads, of_params = (
            owned_by(trees, units) for trees in (grads, [args[n] for n in numbers])
        )
        table = jnp.concatenate(
            [
                summed(jnp.stack([sinks[path] for path in units])),
                jnp.stack([raw(measured_of(of_grads[path])) for path in units])[:, None],
                jnp.stack([ends(measured_of(of_params[path])) for path in units])[:, None],
            ],
            axis=1,
        )
        statistics = dict(zip(units, table, strict=True))
        return value, grads[0] if isinstance(argnums, int) else tuple(grads), statistics

    return wrapped


def owned_by(trees: Sequence[Any], units: tuple[str, ...]) -> dict[str, list[Any]]:
    """The arrays of several trees by the unit that holds them."""
    found: dict[str, list[Any]] = {path: [] for path in units}
    for tree in trees:
        for path, leaves in owned(tree, units).items():
            found[path] += leaves
    return found


def _over(statistics: dict[str, Any], names: tuple[Any, ...]) -> dict[str, Any]:
    """Over axes of shard_map or pmap: amax MAX, the other numbers SUM."""
    if not names:
        return statistics
    largest, total = jax.lax.pmax(statistics, names), jax.lax.psum(statistics, names)
    return jax.tree.map(lambda top, sums: sums.at[:, 0].set(top[:, 0]), largest, total)


def seeded(
    fun: Callable[..., Any],
    scale: Any,
    argnums: int | Sequence[int],
    has_aux: bool,
    plain: int = 0,
) -> Callable[..., Any]:
    """`jax.value_and_grad` with `scale` (0-d f32) in the place of the seed 1.

    Args:
        plain: how many of `argnums`, from the first, have gradients that do not carry the scale.
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        def of(*chosen: Any) -> Any:
            every = list(args)
            for number, value in zip(numbers, chosen, strict=True):
                every[number] = value
            return fun(*every, **kwargs)

        vjp_of: Any = jax.vjp
        chosen = tuple(args[number] for number in numbers)
        loss, vjp, *aux = vjp_of(of, *chosen, has_aux=has_aux)
        seed, rest = _seed(loss, scale)
        if axes := varying(loss):
            loss, vjp, *aux = vjp_of(of, *vary(chosen, axes), has_aux=has_aux)
        grads = vjp(vary(seed, axes))
        if rest is not None:
            grads = (*grads[:plain], *unscale(grads[plain:], rest))
        value = (loss, *aux) if has_aux else loss
        return value, grads[0] if isinstance(argnums, int) else grads

    return wrapped


def _seed(loss: Any, scale: Any) -> tuple[Any, Any]:
    """(the seed in the loss's dtype, what it lacks as a factor or None)"""
    dtype = jnp.result_type(loss)
    if jnp.shape(loss) != () or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"value_and_grad needs a real floating scalar loss, got shape {jnp.shape(loss)} and"
            f" dtype {dtype}; take its mean"
        )
    if jnp.finfo(dtype).bits >= 32:
        return scale.astype(dtype), None
    half = dtype == jnp.float16
    low, top = (MIN_SEED_F16, MAX_SEED_F16) if half else (0.0, float(jnp.finfo(dtype).max))
    seed = jnp.clip(scale, low, top).astype(dtype)
    return seed, scale / seed.astype(jnp.float32)
