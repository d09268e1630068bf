"""Loss scalers written for other systems.

What a system cannot do is found by reading back what was written for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from polyamp._dynamic import Dynamic
from polyamp._errors import StateError
from polyamp._foreign import Part
from polyamp._foreign_find import PLUGIN, check_system
from polyamp._foreign_read import read
from polyamp._foreign_state import DIALECTS
from polyamp._foreign_words import write_words
from polyamp._interchange import scaler_to_dict
from polyamp._presets import like
from polyamp._scaling import MAX_SCALE, Rule
from polyamp._state import Fault, ScalerState
from polyamp._xp import F32_MAX


def write(
    rule: Rule, state: ScalerState, system: str, part: Part, lossy: bool
) -> tuple[dict[str, Any], list[str]]:
    """See `export_scaler`; its warnings come as a list."""
    if system == "polyamp":
        return scaler_to_dict(rule, state), []
    name = check_system(system) or ""
    if part not in ("state", "config"):
        raise StateError(f"part must be 'state' or 'config', got {part!r}")
    scaler_to_dict(rule, state)  # refuses what is no rule of ours
    config = write_words(name, rule)
    saved = DIALECTS[name].write(rule, state)
    lost, forgotten = _losses(name, rule, state, saved, config, part)
    if lost and not lossy:
        raise StateError(
            f"{system} cannot do what this rule says: {'; '.join(lost)}. Export with lossy=True"
            " (--lossy) to leave that out"
        )
    notes = [*(f"{system}: lost: {text}" for text in lost), *forgotten]
    if part == "config":
        return _config(name, config), notes
    return ({PLUGIN: saved} if system == "lightning" else saved), notes


def _config(system: str, words: dict[str, Any]) -> dict[str, Any]:
    if not system.startswith("deepspeed"):
        return words
    words.pop("raise_error_at_min_scale", None)
    stage = 0 if system == "deepspeed-stage0" else 1
    return {"fp16": {"enabled": True, **words}, "zero_optimization": {"stage": stage}}


def _losses(
    system: str,
    rule: Rule,
    state: ScalerState,
    saved: Mapping[str, Any],
    config: Mapping[str, Any],
    part: Part,
) -> tuple[list[str], list[str]]:
    """What reading it back would show to be missing: of the rule, and of the state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            back, again = _read_back(system, saved, config, part)
        except StateError as error:
            return [str(error)], []
    lost = _differences(rule, back, part)
    forgotten = []
    if part == "state":
        if not lost and _running(rule, state) != _running(back, again):
            what = DIALECTS[system].unsaved or "a fault or a count"
            forgotten.append(f"{system} does not save {what}: lost in this export")
        if isinstance(rule, Dynamic) and not lost and _needs_config(system, rule, saved):
            forgotten.append(
                f"{system} does not save its configuration; set it in the new run:"
                f" {_config(system, dict(config))}"
            )
    return lost, forgotten


def _read_back(
    system: str, saved: Mapping[str, Any], config: Mapping[str, Any], part: Part
) -> tuple[Rule, ScalerState]:
    if part == "config":
        given: Any = _config(system, dict(config))
        if not any(given.values()):
            return like(system), like(system).init()
        return read(given, system, None, None)[0]
    return read(saved, system, config or None, None)[0]


def _needs_config(system: str, rule: Rule, saved: Mapping[str, Any]) -> bool:
    """Whether the saved form alone, under the system's defaults, is another rule."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (back, _), _ = read(saved, system, None, None)
    return bool(_differences(rule, back, "state"))


def _behaviour(rule: Rule, part: Part) -> dict[str, Any]:
    """The parameters that decide what `rule` does from here on."""
    told: dict[str, Any] = {f.name: getattr(rule, f.name) for f in fields(rule)}  # type: ignore[arg-type]
    if part == "state":
        told.pop("init_scale")
    if isinstance(rule, Dynamic):
        if rule.hysteresis == 1:
            told.pop("hysteresis_refill")
        if rule.at_floor != "fault":
            told.pop("fault_when")
        if rule.max_scale >= MAX_SCALE:
            told["max_scale"] = F32_MAX
    return told


def _differences(rule: Rule, back: Rule, part: Part) -> list[str]:
    if type(rule) is not type(back):
        return [f"a {type(rule).__name__} rule"]
    ours, theirs = _behaviour(rule, part), _behaviour(back, part)
    return [
        f"{key}={ours.get(key)!r} (would be {theirs.get(key)!r})"
        for key in ours | theirs
        if ours.get(key) != theirs.get(key)
    ]


def _running(rule: Rule, state: ScalerState) -> tuple[Any, ...]:
    left = int(state.left) if isinstance(rule, Dynamic) and rule.hysteresis > 1 else 1
    fault = int(state.fault) != Fault.NONE
    memory = tuple(int(m) for m in state.memory)
    return float(state.loss_scale), int(state.clean), left, fault, memory
