"""One face for the kinds of numbers a transition runs on, so that a test is written once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

import polyamp

Flags = tuple[bool, bool]
"""What happened in one step: gradients finite, loss finite."""


class Arithmetic(NamedTuple):
    """A namespace of array functions, with the way in (`flag`) and the way out (`read`)."""

    name: str
    xp: Any

    def flag(self, value: bool) -> Any:
        """A bool of the framework."""
        return self.xp.c(int(value), "i32") > self.xp.c(0, "i32")

    def signal(self, flags: Flags) -> polyamp.Signal:
        return polyamp.Signal(self.flag(flags[0]), self.flag(flags[1]))

    def read(self, state: polyamp.ScalerState) -> tuple[Any, ...]:
        """The state as Python numbers, after a check that every field still has its dtype."""
        head = [self._number(v, "i32" if i else "f32") for i, v in enumerate(state[:-1])]
        return (*head, tuple(self._number(v, "i32") for v in state.memory))

    def write(self, state: polyamp.ScalerState) -> polyamp.ScalerState:
        """A state of Python numbers in this framework."""
        counts = {name: self.xp.c(getattr(state, name), "i32") for name in state._fields[1:-1]}
        memory = tuple(self.xp.c(v, "i32") for v in state.memory)
        return polyamp.ScalerState(self.xp.c(state.loss_scale, "f32"), **counts, memory=memory)

    def run(
        self, rule: polyamp.Rule, events: Iterable[Flags], step: Any = None
    ) -> list[tuple[Any, ...]]:
        """The states after each event, read."""
        step = polyamp.bind(rule, self.xp) if step is None else step
        state, seen = rule.init(self.xp), []
        for flags in events:
            state = step(state, self.signal(flags))
            seen.append(self.read(state))
        return seen

    def _number(self, value: Any, kind: str) -> Any:
        if self.name == "python":
            wanted: type = float if kind == "f32" else int
            assert type(value) is wanted, (value, kind)
            return value
        array = np.asarray(value)
        assert array.shape == (), array
        assert array.dtype == {"f32": np.float32, "i32": np.int32}[kind], array.dtype
        return array.item()


class _Python(Arithmetic):
    """Python numbers, whose flags are bools."""

    def flag(self, value: bool) -> bool:
        return value


PYTHON = _Python("python", polyamp.host)


def flags(overflows: Sequence[int]) -> list[Flags]:
    """Events from a list of 0 (clean) and 1 (overflow)."""
    return [(not o, True) for o in overflows]
