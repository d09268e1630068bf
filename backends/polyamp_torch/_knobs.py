"""The parameters of the rule that torch's GradScaler lets users set, and setting the scale."""

from __future__ import annotations

import dataclasses
from numbers import Real
from typing import Any

import torch

from polyamp._dynamic import Dynamic
from polyamp._errors import RuleError
from polyamp._xp import F32_MAX
from polyamp_torch._arguments import whole
from polyamp_torch._stepping import Stepping

Tensor = torch.Tensor


class Knobs(Stepping):
    """The part of `GradScaler` that users set by hand."""

    _constructed: bool

    @property
    def _growth_factor(self) -> float:
        return getattr(self._keeper.rule, "growth_factor", 1.0)

    @_growth_factor.setter
    def _growth_factor(self, value: float) -> None:
        self._change_rule(growth_factor=value)

    @property
    def _backoff_factor(self) -> float:
        return getattr(self._keeper.rule, "backoff_factor", 1.0)

    @_backoff_factor.setter
    def _backoff_factor(self, value: float) -> None:
        self._change_rule(backoff_factor=value)

    @property
    def _growth_interval(self) -> int:
        return getattr(self._keeper.rule, "growth_interval", 2**31 - 1)

    @_growth_interval.setter
    def _growth_interval(self, value: int) -> None:
        self._change_rule(growth_interval=whole(value))

    def _change_rule(self, **changes: Any) -> None:
        if not self._constructed:
            return
        rule = self._keeper.rule
        if not isinstance(rule, Dynamic):
            raise RuleError(f"{type(rule).__name__} has no {', '.join(changes)} to set")
        self._keeper.use_rule(dataclasses.replace(rule, **changes))

    def _set_scale(self, scale: Tensor, new: Any) -> None:
        floor = self._keeper.rule.min_scale
        if isinstance(new, Tensor):
            if new.device.type != self._device or new.numel() != 1 or new.requires_grad:
                raise AssertionError(
                    f"new_scale must be a number or a one-element float tensor on {self._device}"
                    f" that does not require grad, got {new!r}"
                )
            if new.device.type == "cpu":
                return self._set_scale(scale, new.item())
            value = new.detach().reshape(()).to(scale.device, torch.float32)
            usable = torch.isfinite(value) & (value > 0)
            scale.copy_(torch.where(usable, value.clamp(min=floor), scale))
            return
        if isinstance(new, bool) or not isinstance(new, Real):
            raise RuleError(f"new_scale must be a number or a tensor, got {new!r}")
        new = float(new) if new <= F32_MAX else new
        if not 0.0 < new <= F32_MAX:
            raise RuleError(f"new_scale must be positive and finite in float32, got {new!r}")
        scale.fill_(max(float(new), floor))
