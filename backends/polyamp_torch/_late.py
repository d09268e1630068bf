"""A step's signal on its way to the host, which reads it one step later."""

from __future__ import annotations

from typing import Any

import torch

from polyamp._state import Signal

Tensor = torch.Tensor


class Sent:
    """A signal copied to the host without waiting.

    On CUDA to pinned memory, with an event; elsewhere it is read when it is asked for.

    Attributes:
        used: the scale that its gradients carried.
    """

    def __init__(self, signal: Signal, used: float) -> None:
        self.used, self._signal = used, signal
        self._names = [n for n, v in signal._asdict().items() if isinstance(v, Tensor)]
        parts = [getattr(signal, name).detach().to(torch.float32) for name in self._names]
        self._values = torch.stack(parts)
        self._arrived: torch.cuda.Event | None = None
        if self._values.device.type == "cuda":
            there = torch.empty(len(parts), dtype=torch.float32, device="cpu", pin_memory=True)
            there.copy_(self._values, non_blocking=True)
            self._values, self._arrived = there, torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> Signal:
        """The signal in Python numbers; waits until it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: dict[str, Any] = dict(zip(self._names, self._values.tolist(), strict=True))
        for name in {"finite", "loss_finite"} & found.keys():
            found[name] = found[name] != 0.0
        return self._signal._replace(**found)
