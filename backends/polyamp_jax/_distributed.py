"""Agreement over devices: all of an axis must take the same decision at the same step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from polyamp._state import Signal
from polyamp_jax._cast import has_derivative, wide
from polyamp_jax._compat import varying


def reduce(signal: Signal, group: Any = None) -> Signal:
    """`signal` agreed over a named axis: finite only if so everywhere, largest amax.

    Args:
        signal: what this device measured, 0-d arrays or Python values.
        group: name or names of an axis of shard_map, pmap or vmap; None leaves the signal as it is
            (under jit with shardings the arrays are whole already).

    Returns:
        The agreed signal. `sub` is the largest over the axis. Python values stay as they are.
    """
    if group is None:
        return signal
    return Signal(
        finite=_everywhere(signal.finite, group),
        loss_finite=_everywhere(signal.loss_finite, group),
        amax=_largest(signal.amax, group),
        sub=_largest(signal.sub, group),
    )


def _everywhere(flag: Any, group: Any) -> Any:
    return jax.lax.pmin(flag.astype(jnp.int32), group) > 0 if _measured(flag) else flag


def _largest(value: Any, group: Any) -> Any:
    return jax.lax.pmax(value, group) if _measured(value) else value


def _measured(value: Any) -> bool:
    """Whether devices may differ in it: numbers of Python are the same on all."""
    return isinstance(value, jax.Array)


def axes(*names: Any) -> tuple[Any, ...]:
    """The axes that one or several arguments name: None, a name, or a tuple or list of names."""
    given = [n if isinstance(n, (tuple, list)) else () if n is None else (n,) for n in names]
    return tuple(dict.fromkeys(name for group in given for name in group))


def pmean(grads: Any, axis_name: Any) -> Any:
    """`jax.lax.pmean` in float32 or wider: four float16 values of 30000 average to 30000, not inf.

    Args:
        grads: any pytree; leaves without a derivative are passed through.
        axis_name: as in `jax.lax.pmean`.
    """
    return jax.tree.map(
        lambda grad: jax.lax.pmean(wide(grad), axis_name) if has_derivative(grad) else grad, grads
    )


def vary(tree: Any, axes: frozenset[Any]) -> Any:
    """`tree` with its arrays declared to differ along `axes`."""

    def declare(leaf: Any) -> Any:
        missing = tuple(sorted(axes - varying(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(declare, tree)
