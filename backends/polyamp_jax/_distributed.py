"""Agreement over devices: all of an axis must take the same decision at the same step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyamp._state import Signal
from polyamp_jax._cast import has_derivative, wide


def reduce(signal: Signal, group: Any = None) -> Signal:
    """`signal` agreed over a named axis: finite only if so everywhere, largest amax.

    Args:
        signal: what this device measured, 0-d arrays or Python values.
        group: name or names of an axis of shard_map, pmap or vmap; None leaves the signal as it is
            (under jit with shardings the arrays are whole already).

    Returns:
        The agreed signal. `sub` is the largest over the axis.
    """
    if group is None:
        return signal
    return Signal(
        finite=_everywhere(signal.finite, group),
        loss_finite=(
            True if signal.loss_finite is True else _everywhere(signal.loss_finite, group)
        ),
        amax=None if signal.amax is None else jax.lax.pmax(signal.amax, group),
        sub=jax.lax.pmax(jnp.asarray(signal.sub, jnp.float32), group),
    )


def _everywhere(flag: Any, group: Any) -> Any:
    return jax.lax.pmin(jnp.asarray(flag).astype(jnp.int32), group) > 0


def pmean(grads: Any, axis_name: Any) -> Any:
    """`jax.lax.pmean` in float32 or wider: four float16 values of 30000 average to 30000, not inf.

    Args:
        grads: any pytree; leaves without a derivative are passed through.
        axis_name: as in `jax.lax.pmean`.
    """
    return jax.tree.map(
        lambda grad: jax.lax.pmean(wide(grad), axis_name) if has_derivative(grad) else grad, grads
    )


def varying(leaf: Any) -> frozenset[Any]:
    """Names of the axes along which `shard_map` knows an array to differ; empty elsewhere."""
    kind = jax.typeof(leaf)
    known = getattr(kind, "manual_axis_type", None)  # before jax 0.10 the type itself has `vma`
    return getattr(kind, "vma", frozenset()) if known is None else known.varying


def vary(tree: Any, axes: frozenset[Any]) -> Any:
    """`tree` with its arrays declared to differ along `axes`."""

    def declare(leaf: Any) -> Any:
        missing = tuple(sorted(axes - varying(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(declare, tree)
