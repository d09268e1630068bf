"""What a selector decided: a level for every module, why, and what it remembers of it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from polyamp._errors import StateError
from polyamp._formats import shown
from polyamp._policy import LARGEST_SHIFT, Policy
from polyamp._policy_map import PolicyMap
from polyamp._policy_pattern import OP_FAMILIES

HALF, BRAIN, SINGLE = "float16", "bfloat16", "float32"
LADDER = ("float16", "float16 with 2**j", "bfloat16", "float32")
"""The levels a module can be on, the fastest first."""
START = "start"
"""In the place of a statistic, before anything was measured."""
OUTPUT = "output"
"""In the place of a family, of layers that a backend keeps in float32 as those that make a model's
outputs (Keras)."""


class Capabilities(NamedTuple):
    """What a device can do; the backends' `capabilities(device)` finds out."""

    formats: frozenset[str] = frozenset((HALF, BRAIN))
    """Low formats it computes in."""
    slow: frozenset[str] = frozenset()
    """Those in which a matrix product takes longer than in float32."""
    shifts: bool = True
    """Whether the backend can give a module a 2**j of its own."""

    @classmethod
    def from_times(cls, times: Mapping[str, Sequence[float]], shifts: bool = True) -> Capabilities:
        """What follows from the times that a matrix product took in each format.

        Args:
            times: seconds, by format: of float32, and of the low formats that the device has. One
                whose median is above float32's is slow.
            shifts: as in the class.
        """
        from statistics import median

        medians = {name: median(found) for name, found in times.items()}
        low = frozenset(times) - {SINGLE}
        slow = frozenset(name for name in low if medians[name] > medians[SINGLE])
        return cls(low, slow, shifts)


class Choice(NamedTuple):
    """The decision for one module, and what made it."""

    level: int = 0
    """Index into `LADDER`."""
    shift: int = 0
    """j: gradients inside the module are multiplied by 2**j; 0 but on level 1."""
    statistic: str = START
    """Such as "output.amax"."""
    value: float = 0.0
    """Of the statistic."""
    threshold: float = 0.0
    """What the value was compared with."""

    @property
    def format(self) -> str:
        """Canonical name of the format the module computes in."""
        return (HALF, HALF, BRAIN, SINGLE)[self.level]

    def __str__(self) -> str:
        own = f" with 2**{self.shift}" if self.level == 1 else ""
        return f"{self.format}{own}: {self.statistic} {self.value:.4g} ({self.threshold:.4g})"


class ModuleState(NamedTuple):
    """What the selector remembers of one module."""

    choice: Choice = Choice()
    family: str | None = None
    """Family of operations that the module is, such as "norm"; None: any other."""
    bad: int = 0
    """Samples in a row that wanted a safer level."""
    good: int = 0
    """Samples in a row that wanted a faster one."""
    ready: int = -1
    """Step of the third such sample, -1: not yet."""
    dwell: int = 0
    """Steps from there until the module moves; doubled by every relapse; 0: never moved down."""
    promoted: bool = False
    """Whether it ever moved up: the next move down is a relapse."""
    amax: float = 0.0
    """Largest |output| of the last sample."""


class Selection(NamedTuple):
    """The selector's state: what it decided for every module."""

    modules: Mapping[str, ModuleState]
    step: int = 0
    """Of the last sample."""
    flips: int = 0
    """Decisions changed so far."""

    @property
    def choices(self) -> dict[str, Choice]:
        """The decision of every module, by path."""
        return {path: state.choice for path, state in self.modules.items()}

    def policy_map(self) -> PolicyMap:
        """The decisions as policies: parameters and outputs in float32, computation as decided.

        The default is what the model itself has, or else what most modules have; modules of a
        family have no rule, the operation families see to them.
        """
        decided = {p: _policy(s.choice) for p, s in self.modules.items() if s.family is None}
        plain = Counter(policy for policy in decided.values() if not policy.shift)
        most = plain.most_common(1)[0][0] if plain else _policy(Choice(3))
        default = decided.get("", most)
        return PolicyMap(exact_rules(decided, default), default)

    def table(self) -> str:
        """The decisions as text, one module a line: path, format, why."""
        rows = [(path or "(model)", _why(state)) for path, state in self.modules.items()]
        width = max((len(path) for path, _ in rows), default=0)
        return "\n".join(f"{path.ljust(width)}  {why}" for path, why in rows)

    def to_dict(self) -> dict[str, Any]:
        """The selection as a JSON-ready dict: `polyamp` (version), `kind`, `step`, `flips`,
        `modules`."""
        from polyamp._interchange import VERSION

        modules = {
            path: {**state._asdict(), "choice": state.choice._asdict()}
            for path, state in self.modules.items()
        }
        header = {"polyamp": VERSION, "kind": "selection"}
        return {**header, "step": self.step, "flips": self.flips, "modules": modules}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Selection:
        """The selection that `to_dict` wrote.

        Raises:
            StateError: unknown version or kind, a missing or unknown key, a value of the wrong
                type; names it.
        """
        from polyamp._interchange import check_header, check_keys

        values = check_header(data, "selection")
        check_keys(values, ["step", "flips", "modules"], "selection")
        modules = values["modules"]
        if not isinstance(modules, Mapping):
            raise StateError(f"selection: modules must be a mapping, got {shown(modules)}")
        found = {str(path): _module_state(path, state) for path, state in modules.items()}
        step, flips = (_whole(values[key], f"selection: {key}") for key in ("step", "flips"))
        return cls(found, step, flips)


def _policy(choice: Choice) -> Policy:
    return Policy(SINGLE, choice.format, SINGLE, shift=choice.shift)


def exact_rules(decided: Mapping[str, Policy], default: Policy) -> list[tuple[str, Policy]]:
    """Rules that give these paths their policies; none where it is inherited."""
    rules: dict[str, Policy] = {}
    for path in sorted(decided, key=lambda path: path.count(".")):
        if path and decided[path] != _inherited(path, rules, default):
            rules[path] = decided[path]
    return [(_pattern(path), policy) for path, policy in rules.items()]


def _inherited(path: str, rules: Mapping[str, Policy], default: Policy) -> Policy:
    while path:
        path = path.rpartition(".")[0]
        if path in rules:
            return rules[path]
    return default


def _pattern(path: str) -> str:
    """A pattern for this path alone."""
    plain = re.fullmatch(r"[\w.\- ]+", path) and not path.startswith(("re:", "op:"))
    return path if plain else f"re:{re.escape(path)}"


def _why(state: ModuleState) -> str:
    if state.family == OUTPUT:
        return f"{SINGLE}: makes an output of the model"
    if state.family is not None:
        return f"{SINGLE}: {state.family} computes in {SINGLE}"
    if state.choice.statistic == START:
        return f"{state.choice.format}: not measured"
    return str(state.choice)


def _module_state(path: Any, data: Any) -> ModuleState:
    from polyamp._interchange import check_keys

    where = f"selection: module {shown(path)}"
    if not isinstance(data, Mapping):
        raise StateError(f"{where} must be a mapping, got {shown(data)}")
    check_keys(data, list(ModuleState._fields), where)
    choice = data["choice"]
    if not isinstance(choice, Mapping):
        raise StateError(f"{where}: choice must be a mapping, got {shown(choice)}")
    check_keys(choice, list(Choice._fields), where)
    level = _whole(choice["level"], f"{where}: level")
    if level >= len(LADDER):
        raise StateError(f"{where}: level must be 0 to {len(LADDER) - 1}, got {level}")
    family, statistic = data["family"], choice["statistic"]
    if not isinstance(statistic, str) or not isinstance(family, str | None):
        raise StateError(f"{where}: statistic and family must be strings")
    if family not in (None, OUTPUT, *OP_FAMILIES):
        raise StateError(f"{where}: no family {shown(family)}; allowed: {', '.join(OP_FAMILIES)}")
    if not isinstance(data["promoted"], bool):
        raise StateError(f"{where}: promoted must be true or false")
    numbers = {name: _number(choice[name], f"{where}: {name}") for name in ("value", "threshold")}
    shift = _whole(choice["shift"], f"{where}: shift", low=-LARGEST_SHIFT)
    if shift > LARGEST_SHIFT or (shift and level != 1):
        raise StateError(
            f"{where}: shift must be at most {LARGEST_SHIFT}, and 0 but on level 1, got {shift} on"
            f" level {level}"
        )
    counts = {n: _whole(data[n], f"{where}: {n}") for n in ("bad", "good", "dwell")}
    return ModuleState(
        choice=Choice(level, shift, statistic, **numbers),
        family=family,
        ready=_whole(data["ready"], f"{where}: ready", low=-1),
        promoted=data["promoted"],
        amax=_number(data["amax"], f"{where}: amax"),
        **counts,
    )


def _whole(value: Any, what: str, low: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise StateError(f"{what} must be a whole number from {low}, got {shown(value)}")
    return value


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise StateError(f"{what} must be a number, got {shown(value)}")
    return float(value)
