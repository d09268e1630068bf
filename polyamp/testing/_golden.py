"""The scales that 17 real scaler configurations produced, as data: golden.json.

Each sequence of overflows says why it is there; each configuration says which rule of polyamp it
is. The traces were recorded by running the systems themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from polyamp._dynamic import Dynamic
from polyamp._state import Fault, ScalerState

ABORT = "ABORT"
"""In a trace: here the system raises."""


@cache
def golden() -> dict[str, Any]:
    """The content of golden.json: params, sequences, configurations, traces."""
    import json
    from importlib.resources import files

    data: dict[str, Any] = json.loads(files(__package__).joinpath("golden.json").read_text())
    return data


def golden_rule(configuration: str) -> Dynamic:
    """The rule that a recorded configuration is."""
    found, params = golden()["configurations"][configuration], golden()["params"]
    first = {"init_scale": params["init"], "growth_interval": params["window"]}
    return Dynamic.like(found["like"], **first, **found["overrides"])


def overflows() -> dict[str, list[int]]:
    """The sequences by name: 0 clean, 1 overflow."""
    return {name: found["overflows"] for name, found in golden()["sequences"].items()}


def scales(states: Sequence[ScalerState]) -> list[float | str]:
    """The scales of a trace, cut off by `ABORT` at the first fault."""
    found: list[float | str] = []
    for state in states:
        if state.fault != Fault.NONE:
            return [*found, ABORT]
        found.append(state.loss_scale)
    return found
