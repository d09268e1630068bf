"""A transition made one step late, on the host: the signal was seen under an earlier scale.

    step n is scaled by s(n), and applied or skipped by its own flags
    update n:  state(n + 1) = late(state(n), signal(n - 1), s(n - 1)),   s(n + 1) = its scale

An overflow counts as it came. Judging it at s(n - 1), so that two overflows at one scale are one
cut, was tried: over jumps of +20 bits it skips more (torch's rule 15 steps in place of 9).

Source: worked out for polyamp.
"""

from __future__ import annotations

from polyamp._scaling import Transition
from polyamp._state import ScalerState, Signal
from polyamp._xp import F32_MAX, f32


def late(step: Transition, state: ScalerState, signal: Signal, used: float) -> ScalerState:
    """The state after a signal of an earlier step.

    Args:
        step: a rule's transition on the host (`bind(rule)`).
        state: in Python numbers.
        signal: likewise; a finite amax is moved by state.loss_scale / used.
        used: the scale that the signal's gradients carried.
    """
    if signal.finite and signal.amax is not None and used != state.loss_scale:
        moved = min(signal.amax * (state.loss_scale / used), F32_MAX)
        signal = signal._replace(amax=f32(moved))
    return step(state, signal)
