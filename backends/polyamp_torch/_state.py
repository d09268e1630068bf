"""A scaler's state beside torch's two tensors, on the host or on the device.

torch's GradScaler keeps `_scale` (f32) and `_growth_tracker` (i32) as 0-d tensors, and users reach
into both. They stay the truth for those two fields; the rest of `polyamp.ScalerState` is here, as
Python numbers where the tensors are on the CPU, as 0-d tensors elsewhere, so that nothing waits
for an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyamp._scaling import Rule, Transition, bind
from polyamp._state import Decision, ScalerState, Signal, decision
from polyamp_torch._ops import Ops

Tensor = torch.Tensor


class Keeper:
    """Holds a rule and the state that goes with it; advances both tensors in place."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.state = rule.init()
        self._bound: dict[torch.device | None, Transition] = {}
        self._mirrored: tuple[Tensor, int, Tensor, int] | None = None

    def use_rule(self, rule: Rule) -> None:
        """Go on under another rule with the same kind of memory."""
        self.rule = rule
        self._bound = {}

    def load(self, state: ScalerState) -> None:
        """Go on from `state`, in Python numbers; the tensors are the caller's to fill."""
        self.state = state
        self._mirrored = None

    def advance(self, scale: Tensor, tracker: Tensor, found_inf: Tensor, device: bool) -> Decision:
        """One transition, written to both tensors in place.

        Args:
            scale: f32, 0-d. tracker: i32, 0-d.
            found_inf: f32, 0-d, above 0 where the step overflowed.
            device: compute on the tensors' device without waiting for it; else on the host.

        Returns:
            The decision: 0-d tensors in device mode, else Python numbers.
        """
        if device:
            return self._advance_on_device(scale, tracker, found_inf)
        old = self.read(scale, tracker)
        new = self._transition(None)(old, Signal(found_inf.item() == 0.0))
        self.state = new
        if new.loss_scale != old.loss_scale:
            scale.fill_(new.loss_scale)
        tracker.fill_(new.clean)
        self._mirrored = (scale, scale._version, tracker, tracker._version)
        return decision(old, new)

    def read(self, scale: Tensor | None, tracker: Tensor | None) -> ScalerState:
        """The whole state in Python numbers; waits for the device where it lives there."""
        if scale is None or tracker is None:
            return self.state
        now = (scale, scale._version, tracker, tracker._version)
        seen = self._mirrored
        if seen and seen[0] is scale and seen[2] is tracker and (seen[1], seen[3]) == now[1::2]:
            return self.state
        host = _to_host(self.state)._replace(loss_scale=scale.item(), clean=int(tracker.item()))
        if scale.device.type == "cpu" and not isinstance(self.state.step, Tensor):
            self.state, self._mirrored = host, now
        return host

    def clear_fault(self) -> None:
        """Forget a fault that somebody has acted on."""
        fault = self.state.fault
        self.state = self.state._replace(
            fault=torch.zeros_like(fault) if isinstance(fault, Tensor) else 0
        )

    def _advance_on_device(self, scale: Tensor, tracker: Tensor, found_inf: Tensor) -> Decision:
        state = self.state
        if not isinstance(state.step, Tensor):
            state = _mapped(state, Ops(scale.device).typed)
        old = state._replace(loss_scale=scale.clone(), clean=tracker)
        new = self._transition(scale.device)(old, Signal(found_inf == 0.0))
        scale.copy_(new.loss_scale)
        tracker.copy_(new.clean)
        self.state, self._mirrored = new, None
        return decision(old, new)

    def _transition(self, device: torch.device | None) -> Transition:
        if device not in self._bound:
            self._bound[device] = (
                bind(self.rule) if device is None else bind(self.rule, Ops(device))
            )
        return self._bound[device]

    def __getstate__(self) -> dict[str, Any]:
        return {"rule": self.rule, "state": _to_host(self.state)}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.__init__(saved["rule"])  # type: ignore[misc]
        self.load(saved["state"])


def _to_host(state: ScalerState) -> ScalerState:
    if not isinstance(state.step, Tensor):
        return state
    return _mapped(state, lambda v: v.item())


def _mapped(state: ScalerState, fn: Callable[[Any], Any]) -> ScalerState:
    head = {name: fn(getattr(state, name)) for name in ScalerState._fields[:-1]}
    return ScalerState(**head, memory=tuple(fn(m) for m in state.memory))
