"""Statistics of a model's modules, in the steps that are traced for it.

    with watching(sinks):       around the trace of the loss function
      apply_policy              gives every unit a ticket: its path, and which trace this is
      call of a unit            its inputs and outputs go through a tap beside the unit's sink
    gradient of a sink          = what was measured of inputs, outputs and the outputs' gradients

A unit is a module that has parameters of its own. The taps are the identity; a step traced without
`watching` has none. Sinks are zeros: their gradients are sums over the calls of a unit, the turns
of a scan and devices, which `_measure.summed` reads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyamp_jax._measure import WIDTH, ends, is_measured, raw, summable
from polyamp_jax._shift import times

Array = jax.Array

TAPPED = ("inputs", "output", "gradient")
"""Fields of `ModuleStatistics` that a sink brings back, in its order."""
KINDS = (*TAPPED, "weight_gradient", "weights")
"""Those that a step returns: f32 (5, 8) for every unit."""
_tokens = itertools.count()


class Ticket(NamedTuple):
    """Which unit of which trace a module is. Static: what is traced for another is traced anew."""

    path: str
    token: int


@dataclass(eq=False)
class Watch:
    """One trace."""

    sinks: Mapping[str, Array]
    token: int = field(default_factory=lambda: next(_tokens))
    called: list[str] = field(default_factory=list)
    """Paths of the units, in the order of their calls."""


_active: ContextVar[Watch | None] = ContextVar("polyamp_watch", default=None)


def sinks_of(units: tuple[str, ...]) -> dict[str, Array]:
    """Zeros, f32 (3, WIDTH) for every unit."""
    return {path: jnp.zeros((len(TAPPED), WIDTH), jnp.float32) for path in units}


@contextmanager
def watching(sinks: Mapping[str, Array]) -> Iterator[Watch]:
    """While open, what is traced is measured."""
    watch = Watch(sinks)
    token = _active.set(watch)
    try:
        yield watch
    finally:
        _active.reset(token)


def active_token() -> int | None:
    """Of the trace that is measured; None: none is."""
    watch = _active.get()
    return None if watch is None else watch.token


def ticket(path: str) -> Ticket | None:
    """For the module at `path`; None where it is not measured."""
    watch = _active.get()
    return None if watch is None or path not in watch.sinks else Ticket(path, watch.token)


def tapped(ticket: Ticket, shift: int, given: Any, out: Any, opaque: Callable[[Any], bool]) -> Any:
    """`out`, measured together with its gradient and what was `given`.

    Args:
        shift: of the region around the module: its gradients are measured without 2**shift.
        given: arguments of the call.
        opaque: whether a node of either tree is not to be looked into.
    """
    watch = _active.get()
    if watch is None or watch.token != ticket.token:
        return out
    leaves, tree = jax.tree.flatten(out, is_leaf=opaque)
    places = [i for i, leaf in enumerate(leaves) if is_measured(leaf) and not opaque(leaf)]
    if not places:
        return out
    watch.called.append(ticket.path)
    inputs = [
        jax.lax.stop_gradient(leaf)
        for leaf in jax.tree.leaves(given, is_leaf=opaque)
        if is_measured(leaf) and not opaque(leaf)
    ]
    sink = watch.sinks[ticket.path]
    for place, value in zip(
        places, _tap(shift, sink, inputs, [leaves[i] for i in places]), strict=True
    ):
        leaves[place] = value
    return jax.tree.unflatten(tree, leaves)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tap(shift: int, sink: Array, inputs: list[Array], outputs: list[Array]) -> list[Array]:
    return outputs


def _forward(
    shift: int, sink: Array, inputs: list[Array], outputs: list[Array]
) -> tuple[list[Array], tuple[Array, Array]]:
    return outputs, (ends(inputs), raw(outputs))


def _backward(shift: int, known: tuple[Array, Array], grads: list[Array]) -> tuple[Any, ...]:
    plain = [times(grad, -shift) for grad in grads] if shift else list(grads)
    return summable(jnp.stack([*known, raw(plain)])), None, grads


_tap.defvjp(_forward, _backward)
