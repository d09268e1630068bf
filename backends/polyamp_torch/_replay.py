"""A rule's transition over whole sequences of signals, for the contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from polyamp._scaling import Rule, bind
from polyamp._state import ScalerState, Signal
from polyamp_torch._ops import Ops, compiled

if TYPE_CHECKING:
    from polyamp.testing import Signals

Tensor = torch.Tensor


def modes(kind: str) -> list[str]:
    """The ways in which `replay` ("transition") and `toy_train` ("training") run here."""
    return ["eager", "compiled"] if kind == "transition" else ["eager", "compiled", "channels_last"]


def replay(rule: Rule, sequences: Sequence[Signals], mode: str, device: str) -> list[ScalerState]:
    """See `polyamp.Backend.replay`. One compiled step is driven: a call of it costs 0.03 ms."""
    return replay_with(Ops(device), rule, sequences, mode, device)


def replay_with(
    xp: Any, rule: Rule, sequences: Sequence[Signals], mode: str, device: str
) -> list[ScalerState]:
    """`replay` with the array functions `xp`, on tensors of `device`."""
    step: Any = bind(rule, xp)
    if mode == "compiled":
        torch._dynamo.reset()  # every bound rule has the same code, of which few are remembered
        step = compiled(step)
    with torch.no_grad():
        return [_stacked(list(_states(step, rule.init(xp), s, device))) for s in sequences]


def _states(step: Any, state: ScalerState, signals: Signals, device: str) -> Iterator[ScalerState]:
    for signal in zip(*_columns(signals, device), strict=True):
        state = step(state, Signal(*signal))
        yield state


def _columns(signals: Signals, device: str) -> list[Any]:
    columns = [
        torch.tensor(signals.finite, device=device).unbind(),
        torch.tensor(signals.loss_finite, device=device).unbind(),
    ]
    for values in (signals.amax, signals.sub):
        if values is not None:
            columns.append(torch.tensor(values, dtype=torch.float32, device=device).unbind())
    return columns


def _stacked(states: list[ScalerState]) -> ScalerState:
    *head, memory = zip(*states, strict=True)
    arrays = [torch.stack(values).cpu().numpy() for values in (*head, *zip(*memory, strict=True))]
    return ScalerState._make([*arrays[: len(head)], tuple(arrays[len(head) :])])
