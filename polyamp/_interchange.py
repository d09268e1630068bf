"""polyamp's portable form: rules, states, policies and policy maps as plain JSON dicts.

    {"polyamp": 1, "kind": "rule", "rule": "Dynamic", "init_scale": 65536.0, ...}
    {"polyamp": 1, "kind": "state", "loss_scale": 32768.0, "clean": 5, ..., "memory": []}
    {"polyamp": 1, "kind": "policy", ...}

The same in every framework. Reading checks everything before it builds anything, so a failed read
leaves every live object as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from polyamp._dynamic import Dynamic
from polyamp._errors import RuleError, StateError, closest
from polyamp._history import DelayedScaling, TwoPhase
from polyamp._logmax import LogMax
from polyamp._predictive import Predictive
from polyamp._scaling import Rule, Static
from polyamp._state import Fault, Reason, ScalerState
from polyamp._xp import F32_MAX, f32, host

VERSION = 1
"""Version of the portable form."""

RULES: dict[str, type[Rule]] = {
    rule.__name__: rule for rule in (Static, Dynamic, Predictive, LogMax, DelayedScaling, TwoPhase)
}
"""Rules by the name they are saved under."""

_COUNTS = {"left": 1, "step": 0, "skipped": 0, "skipped_in_a_row": 0}


def rule_to_dict(rule: Rule) -> dict[str, Any]:
    """A rule as a JSON-ready dict."""
    if type(rule) not in RULES.values():
        raise StateError(f"cannot save {rule!r}: not one of the rules {sorted(RULES)}")
    values = {f.name: getattr(rule, f.name) for f in fields(rule)}  # type: ignore[arg-type]
    return {"polyamp": VERSION, "kind": "rule", "rule": type(rule).__name__, **values}


def rule_from_dict(data: Any) -> Rule:
    """The rule that `rule_to_dict` wrote.

    Raises:
        StateError: unknown version or rule, a missing or unknown key, a value of the wrong type or
            outside its range.
    """
    values = check_header(data, "rule")
    name = values.pop("rule", None)
    if not isinstance(name, str) or name not in RULES:
        raise StateError(f"unknown rule {name!r}; this version knows {sorted(RULES)}")
    cls = RULES[name]
    check_keys(values, [f.name for f in fields(cls)], f"rule {name}")  # type: ignore[arg-type]
    try:
        return cls(**values)
    except RuleError as error:
        raise StateError(f"saved rule is not valid: {error}") from error


def state_to_dict(state: ScalerState) -> dict[str, Any]:
    """A state as a JSON-ready dict of Python numbers (reads device scalars)."""
    head = {name: int(getattr(state, name)) for name in ScalerState._fields[1:-1]}
    return {
        "polyamp": VERSION,
        "kind": "state",
        "loss_scale": float(state.loss_scale),
        **head,
        "memory": [int(m) for m in state.memory],
    }


def state_from_dict(data: Any, rule: Rule) -> ScalerState:
    """The state, in Python numbers, that `state_to_dict` wrote, checked against `rule`.

    A scale below the rule's floor (a collapsed run saves 0) is lifted to it, with a warning.

    Raises:
        StateError: unknown version, a missing or unknown key, NaN, a negative number, or a bool or
            string in a number's place.
    """
    values = check_header(data, "state")
    check_keys(values, list(ScalerState._fields), "state")
    fresh = rule.init(host)
    memory = values["memory"]
    if not isinstance(memory, (list, tuple)) or len(memory) != len(fresh.memory):
        raise StateError(
            f"state: memory must be a list of {len(fresh.memory)} integers for {rule!r},"
            f" got {memory!r}"
        )
    counts = {name: _integer(values[name], name, low) for name, low in _COUNTS.items()}
    counts["left"] = min(counts["left"], fresh.left)
    return ScalerState(
        loss_scale=check_scale(values["loss_scale"], rule),
        clean=_integer(values["clean"], "clean", min(fresh.clean, 0)),
        **counts,
        reason=_integer(values["reason"], "reason", 0, max(Reason)),
        fault=_integer(values["fault"], "fault", 0, max(Fault)),
        memory=tuple(
            _integer(m, "memory", low, high)
            for m, (low, high) in zip(memory, rule.memory_range(), strict=True)
        ),
    )


def scaler_to_dict(rule: Rule, state: ScalerState) -> dict[str, Any]:
    """A whole scaler, rule and state, as a JSON-ready dict."""
    return {
        "polyamp": VERSION,
        "kind": "scaler",
        "rule": rule_to_dict(rule),
        "state": state_to_dict(state),
    }


def scaler_from_dict(data: Any) -> tuple[Rule, ScalerState]:
    """The rule and the state, in Python numbers, that `scaler_to_dict` wrote.

    "modules", which a backend may have added (`polyamp._module_scales.SavedShifts`), is for it to
    read.

    Raises:
        StateError: as `rule_from_dict` and `state_from_dict`.
    """
    values = check_header(data, "scaler")
    values.pop("modules", None)
    check_keys(values, ["rule", "state"], "scaler")
    rule = rule_from_dict(values["rule"])
    return rule, state_from_dict(values["state"], rule)


def check_scale(value: Any, rule: Rule) -> float:
    """A loaded scale as a float32-exact float, lifted to the floor of `rule` with a warning.

    Raises:
        StateError: not a number, NaN, infinite or negative.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise StateError(f"loss_scale must be a positive finite number, got {value!r}")
    if not 0 <= value <= F32_MAX:
        raise StateError(f"loss_scale must be a positive finite number, got {value!r}")
    floor = f32(rule.min_scale)
    if value < floor:
        warnings.warn(
            f"loaded loss scale {value:g} is below the floor; lifted to {floor:g}."
            " The run that saved it had collapsed: expect skipped steps while the scale adapts",
            UserWarning,
            stacklevel=3,
        )
        return floor
    return f32(value)


def check_header(data: Any, kind: str) -> dict[str, Any]:
    """A copy of `data` without its header keys, once version and kind are right."""
    if not isinstance(data, Mapping):
        raise StateError(f"a saved {kind} is a dict, got {type(data).__name__}")
    values = dict(data)
    if "polyamp" not in values:
        raise StateError(
            f"not a saved polyamp {kind}: the key 'polyamp' (format version) is missing"
        )
    version = values.pop("polyamp")
    if isinstance(version, Mapping):
        raise StateError(
            f"this is a state_dict, not a saved {kind} of to_dict(): load it with load_state_dict()"
        )
    if isinstance(version, bool) or version != VERSION:
        raise StateError(
            f"format version {version!r} is not known; this polyamp reads version {VERSION}."
            " A newer polyamp may have written it: upgrade to read it"
        )
    found = values.pop("kind", None)
    if found != kind:
        raise StateError(f"expected a saved {kind}, got kind {found!r}")
    return values


def check_keys(values: Mapping[str, Any], allowed: list[str], what: str) -> None:
    """Refuse missing and unknown keys, naming them."""
    missing = [key for key in allowed if key not in values]
    if missing:
        raise StateError(f"{what}: missing key{'s' * (len(missing) > 1)} {', '.join(missing)}")
    for key in values:
        if key not in allowed:
            near = closest(str(key), allowed)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise StateError(f"{what}: unknown key {key!r}{hint}")


def _integer(value: Any, name: str, low: int, high: int = 2**31 - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise StateError(f"state: {name} must be an integer from {low} to {high}, got {value!r}")
    return value
