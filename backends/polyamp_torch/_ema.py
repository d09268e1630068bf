"""An exponential moving average of weights, kept in float32 whatever format the model is in."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

Module = torch.nn.Module
Tensor = torch.Tensor


class ExponentialMovingAverage:
    """average = decay * average + (1 - decay) * weights, in float32 (float64 where the model is).

    Args:
        model: copied; the copy is for evaluation.
        decay: 0 <= decay < 1.
        master_of: gives the float32 master of a low-precision parameter.

    Attributes:
        module: the copy of the model, with the average rounded to the model's formats. Buffers are
            those of the model at the last update.
    """

    def __init__(
        self, model: Module, decay: float, master_of: Callable[[Tensor], Tensor] = lambda p: p
    ) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"ema_decay must be at least 0 and below 1, got {decay!r}")
        self.module = copy.deepcopy(model).requires_grad_(False)
        self._model, self._decay, self._master_of = model, decay, master_of
        self._average = [self._wide(p).clone() for p in model.parameters()]

    def _wide(self, param: Tensor) -> Tensor:
        master = self._master_of(param).detach()
        return master if master.dtype == torch.float64 else master.to(torch.float32)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the model as it is now."""
        now = [self._wide(p) for p in self._model.parameters()]
        torch._foreach_lerp_(self._average, now, 1.0 - self._decay)
        self._write()

    @torch.no_grad()
    def _write(self) -> None:
        for param, average in zip(self.module.parameters(), self._average, strict=True):
            param.copy_(average)
        for mine, theirs in zip(self.module.buffers(), self._model.buffers(), strict=True):
            mine.copy_(theirs)

    def state_dict(self) -> dict[str, Tensor]:
        """The average by parameter name, in float32."""
        names = (name for name, _ in self._model.named_parameters())
        return dict(zip(names, self._average, strict=True))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Tensor]) -> None:
        """Go on from a saved average.

        Raises:
            ValueError: names that are not the model's; nothing is changed.
        """
        mine = self.state_dict()
        if set(mine) != set(state_dict):
            wrong = sorted(set(mine) ^ set(state_dict))
            raise ValueError(f"the average is not of this model: {wrong[:3]} are not in both")
        for name, average in mine.items():
            average.copy_(state_dict[name])
        self._write()
