"""A scaler's state beside torch's two tensors, on the host or on the device.

torch's GradScaler keeps `_scale` (f32) and `_growth_tracker` (i32) as 0-d tensors, and users reach
into both. They stay the truth for those two fields; the rest of `polyamp.ScalerState` is here, as
Python numbers where the tensors are on the CPU, as 0-d tensors elsewhere, so that nothing waits
for an accelerator.
"""

from __future__ import annotations

import torch

from polyamp._late import late
from polyamp._scaling import Rule, Transition, bind
from polyamp._state import Decision, ScalerState, Signal, decision
from polyamp._xp import host
from polyamp_torch._late import Sent
from polyamp_torch._ops import Ops

Tensor = torch.Tensor


_HEAD = ScalerState._fields[2:-1]
"""The fields that torch's two tensors do not hold, `memory` aside."""


class Keeper:
    """Holds a rule and the state that goes with it; advances torch's two tensors in place.

    In device mode the rest of the state is one i32 tensor, also changed in place, so that a
    captured graph goes on from where it was and reading everything waits once.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._host = rule.init()
        self._packed: Tensor | None = None
        self._made = self._host.step
        self._bound: dict[torch.device | None, Transition] = {}
        self._sent: Sent | None = None

    def use_rule(self, rule: Rule) -> None:
        """Go on under another rule with the same kind of memory."""
        self.rule = rule
        self._bound = {}

    def load(self, state: ScalerState) -> None:
        """Go on from `state`, in Python numbers; the tensors are the caller's to fill."""
        self._host, self._packed, self._made = state, None, state.step
        self._sent = None

    def advance(self, scale: Tensor, tracker: Tensor, signal: Signal, device: bool) -> Decision:
        """One transition, written to both tensors in place.

        Args:
            scale: f32, 0-d. tracker: i32, 0-d.
            signal: what was measured; 0-d tensors.
            device: compute on the tensors' device without waiting for it; else on the host.

        Returns:
            The decision: 0-d tensors in device mode, else Python numbers.
        """
        self._made += 1
        if device:
            return self._advance_on_device(scale, tracker, signal)
        old = self.read(scale, tracker)
        values = [v.item() if isinstance(v, Tensor) else v for v in signal]
        new = self._transition(None)(old, Signal(*values))
        self._host, self._packed = new, None
        if new.loss_scale != old.loss_scale:
            scale.fill_(new.loss_scale)
        tracker.fill_(new.clean)
        return decision(old, new)

    def advance_late(self, scale: Tensor, tracker: Tensor, signal: Signal) -> Decision | None:
        """Send this step's signal to the host and make the transition of the step before.

        Without one on its way, after `load` and `settle`, the state is read from the tensors.

        Returns:
            The decision of the step before, in Python numbers; None if there was none.
        """
        self._made += 1
        if self._sent is None:
            self._host = self.read(scale, tracker)
        used = self._host.loss_scale
        made = self.settle(scale, tracker)
        self._sent = Sent(signal, used)
        return made

    def settle(self, scale: Tensor, tracker: Tensor) -> Decision | None:
        """Make the transition whose signal is on its way, if there is one; waits for it."""
        if self._sent is None:
            return None
        sent, self._sent, old = self._sent, None, self._host
        new = self._host = late(self._transition(None), old, sent.read(), sent.used)
        if new.loss_scale != old.loss_scale:
            scale.fill_(new.loss_scale)
        tracker.fill_(new.clean)
        return decision(old, new)._replace(scale_used=sent.used)

    def sub_is_due(self) -> bool:
        """Whether the share of underflow is to be measured in this step; known without waiting."""
        interval = self.rule.sub_interval
        return interval > 0 and self._made % interval == 0

    def read(self, scale: Tensor | None, tracker: Tensor | None) -> ScalerState:
        """The whole state in Python numbers; waits for the device where it lives there.

        Without the tensors, which are made at the first `scale`, it is what was loaded or what the
        last transition on the host made.
        """
        if scale is None or tracker is None:
            return self._host
        return self._unpacked()._replace(loss_scale=scale.item(), clean=int(tracker.item()))

    def clear_fault(self) -> None:
        """Forget a fault that somebody has acted on."""
        if self._packed is None:
            self._host = self._host._replace(fault=0)
        else:
            self._packed[_HEAD.index("fault")].zero_()

    def _unpacked(self) -> ScalerState:
        if self._packed is None:
            return self._host
        values = self._packed.tolist()
        head = dict(zip(_HEAD, values, strict=False))
        return self._host._replace(**head, memory=tuple(values[len(_HEAD) :]))

    def _advance_on_device(self, scale: Tensor, tracker: Tensor, signal: Signal) -> Decision:
        if self._packed is None:
            start = [*(getattr(self._host, name) for name in _HEAD), *self._host.memory]
            constant = Ops(scale.device).c
            with torch.inference_mode(False):
                self._packed = torch.stack([constant(value, "i32") for value in start])
        parts = self._packed.unbind()
        head = dict(zip(_HEAD, parts, strict=False))
        memory = parts[len(_HEAD) :]
        old = ScalerState(loss_scale=scale.clone(), clean=tracker, **head, memory=memory)
        new = self._transition(scale.device)(old, signal)
        made = decision(old, new)
        self._packed.copy_(torch.stack([*(getattr(new, name) for name in _HEAD), *new.memory]))
        scale.copy_(new.loss_scale)
        tracker.copy_(new.clean)
        return made

    def _transition(self, device: torch.device | None) -> Transition:
        if device not in self._bound:
            self._bound[device] = bind(self.rule, host if device is None else Ops(device))
        return self._bound[device]
