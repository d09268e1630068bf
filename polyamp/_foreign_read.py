"""Loss scalers of other systems, read."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from polyamp._dynamic import Dynamic
from polyamp._errors import RuleError, StateError
from polyamp._foreign_find import Found, as_mapping, check_system, find
from polyamp._foreign_state import DIALECTS, Reading
from polyamp._foreign_words import WORDS, read_words, static_scale
from polyamp._interchange import (
    check_scale,
    rule_from_dict,
    scaler_from_dict,
    state_from_dict,
    state_to_dict,
)
from polyamp._presets import PRESETS, like
from polyamp._scaling import Rule, Static
from polyamp._state import ScalerState


class _Draft(NamedTuple):
    """Parameters of a rule to be."""

    said: dict[str, Any]
    """What the configuration or the saved state says, as `like` takes it."""
    fixed: float | None
    given: Rule | None


Scaler = tuple[Rule, ScalerState]


def read_source(
    source: Any, system: str | None, rule: Rule | Mapping[str, Any] | None, at: str | None
) -> tuple[Scaler, list[str]]:
    """See `import_scaler`; its warnings come as a list."""
    if isinstance(source, (str, os.PathLike)):
        from polyamp._foreign_files import read_file

        source = read_file(source)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, notes = read(source, check_system(system), rule, at)
    return found, [*(str(w.message) for w in caught), *notes]


def _portable(data: Mapping[str, Any]) -> Scaler:
    """A portable scaler or rule, or a state_dict of `polyamp.torch` that carries one."""
    inner = data["polyamp"]
    if isinstance(inner, Mapping):
        rule, state = scaler_from_dict(inner)
        if "_growth_tracker" not in data:
            return rule, state
        outer = DIALECTS["torch"].read(data)
        told = {**state_to_dict(state), "loss_scale": outer.scale, "clean": outer.clean}
        return rule, state_from_dict(told, rule)
    if data.get("kind") == "rule":
        rule = rule_from_dict(data)
        return rule, rule.init()
    return scaler_from_dict(data)


def read(
    source: Any, name: str | None, rule: Rule | Mapping[str, Any] | None, at: str | None
) -> tuple[Scaler, list[str]]:
    """The scaler in what is no file, and what to warn of; `check_scale` warns itself."""
    found = find(source, name, at)
    if found.system == "polyamp":
        return _portable(found.saved), []
    draft, notes = _draft(found, rule)
    reading = DIALECTS[found.system].read(found.saved) if found.saved else None
    try:
        made, assumed = _rule(found.system, draft, reading)
    except RuleError as error:
        raise StateError(f"{found.system}: {error}") from error
    tracker = _tracker_notes(found.system, made, assumed, reading)
    if tracker:
        assumed.pop("hysteresis", None)
    if assumed:
        values = ", ".join(f"{key}={value!r}" for key, value in assumed.items())
        notes.append(
            f"{found.system}: {', '.join(assumed)} not found in what was read; its defaults are"
            f" assumed ({values}). Pass rule= (--config) to say otherwise"
        )
    notes += tracker
    if reading is None:
        return (made, made.init()), notes
    if DIALECTS[found.system].unsaved:
        notes.append(
            f"{found.system} does not save {DIALECTS[found.system].unsaved}: they start anew, as"
            f" they do when {found.system} itself loads this"
        )
    return (made, _state(found.system, made, reading)), [*notes, *reading.notes]


_USUAL_HYSTERESIS = 2
"""Of the systems that save how many overflows are left."""


def _tracker_notes(
    system: str, made: Rule, assumed: Mapping[str, Any], reading: Reading | None
) -> list[str]:
    """What to warn of where more overflows are left than the system starts with."""
    left = reading.left if reading else None
    if not left or not isinstance(made, Dynamic):
        return []
    if left > made.hysteresis:
        return [
            f"{system}: {left} overflows were left until the next cut, and the configuration has"
            f" hysteresis={made.hysteresis}: it goes on with {made.hysteresis}. Is it the"
            " configuration of this run?"
        ]
    if left > assumed.get("hysteresis", left):
        return [
            f"{system}: {left} overflows were left until the next cut, more than its default"
            f" hysteresis, {assumed['hysteresis']}: hysteresis={left} is assumed instead. Pass"
            " rule= (--config) if the run had another"
        ]
    return []


def _draft(found: Found, rule: Rule | Mapping[str, Any] | None) -> tuple[_Draft, list[str]]:
    system, notes = found.system, []
    if isinstance(rule, Rule):
        return _Draft({}, None, rule), []
    config = {**found.config}
    if rule is not None:
        if not isinstance(rule, Mapping):
            raise StateError(f"rule must be a rule or a configuration dict, got {rule!r}")
        block = as_mapping(rule.get("fp16")) if system.startswith("deepspeed") else None
        own = rule if block is None else block
        known = {key for word in WORDS[system] for key in word.keys} | {"loss_scale"}
        if not known & set(own):
            raise StateError(f"no configuration of {system}: expected some of {sorted(known)}")
        read_words(system, own, strict=True)
        config |= own
    said = read_words(system, config)
    enabled = config.get("enabled", True)
    if not found.saved and system.startswith("deepspeed") and enabled is False:
        raise StateError("fp16.enabled is false: this configuration has no loss scaler")
    if system == "deepspeed-stage0" and not found.saved:
        if said.get("hysteresis", 1) != 1:
            notes.append(_STAGE0)
        said = {k: v for k, v in said.items() if not k.startswith("hysteresis")}
    return _Draft(said, static_scale(system, config), None), notes


_STAGE0 = (
    "deepspeed-stage0: released versions of DeepSpeed ignore fp16.hysteresis without ZeRO, so it is"
    " left out. Newer ones honour it with the fused optimizer: pass"
    " rule=Dynamic.like('deepspeed-stage0', hysteresis=...) for those"
)


def _rule(system: str, draft: _Draft, reading: Reading | None) -> tuple[Rule, dict[str, Any]]:
    """The rule, and those of its parameters that nobody said."""
    said = {**draft.said, **(reading.parameters if reading else {})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scale = None if reading is None else check_scale(reading.scale, Static())
    if reading is not None and scale is not None and reading.fixed:
        return Static(scale), {}
    if draft.fixed is not None and reading is None:
        return Static(draft.fixed), {}
    if draft.given is not None:
        return _with_saved(system, draft.given, reading), {}
    assumed = _assumed(system, said) if reading else {}
    if reading and reading.left and "hysteresis" in assumed:
        assumed["hysteresis"] = max(assumed["hysteresis"], _USUAL_HYSTERESIS)
        said["hysteresis"] = max(assumed["hysteresis"], reading.left)
    return _fitting(system, said, scale), assumed


def _with_saved(system: str, given: Rule, reading: Reading | None) -> Rule:
    if reading is None or not isinstance(given, Dynamic):
        return given
    saved = dict(reading.parameters)
    if type(saved.get("growth_interval")) is int:
        saved["growth_interval"] += PRESETS[system].extra_interval
    return replace(given, **saved)


def _assumed(system: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of `system` that matter in a run and that nobody said."""
    default = like(system)
    words = dict.fromkeys(word.field for word in WORDS[system])
    values = {f: getattr(default, f) for f in words if f not in said and f != "init_scale"}
    if "growth_interval" in values:
        values["growth_interval"] -= PRESETS[system].extra_interval
    return values


def _fitting(system: str, said: dict[str, Any], scale: float | None) -> Dynamic:
    """`like(system, **said)`; an init_scale nobody said is the nearest allowed to `scale`."""
    if "init_scale" in said or scale is None:
        return like(system, **said)
    limits = {**like(system).__dict__, **said}
    low, high = limits["min_scale"], limits["max_scale"]
    usable = all(isinstance(v, (int, float)) for v in (low, high))
    start = min(max(scale, low), high) if usable else scale
    default = limits["init_scale"]
    if usable and low <= default <= high:
        start = default
    return like(system, **{**said, "init_scale": start})


def _state(system: str, rule: Rule, reading: Reading) -> ScalerState:
    fresh, clean = state_to_dict(rule.init()), reading.clean
    if system.startswith("deepspeed") and isinstance(rule, Dynamic) and clean is not None:
        clean = clean if rule.late_first_window else (clean + 1) % rule.growth_interval
    told = {"clean": clean, "left": reading.left}
    kept = {key: value for key, value in told.items() if value is not None}
    if isinstance(rule, Static):
        kept.pop("left", None)
    scale = check_scale(reading.scale, rule)
    return state_from_dict({**fresh, **kept, "loss_scale": scale}, rule)
