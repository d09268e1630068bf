"""state_dict of GradScaler: torch's five keys, and a sixth where they do not suffice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from polyamp._dynamic import Dynamic
from polyamp._errors import RuleError, StateError
from polyamp._interchange import check_scale, scaler_from_dict, scaler_to_dict
from polyamp._presets import like
from polyamp._scaling import Rule
from polyamp._state import ScalerState
from polyamp_torch._per_module import Modules

EXTRA = "polyamp"
"""The sixth key: rule and state in polyamp's portable form."""

_RULE_KEYS = ("growth_factor", "backoff_factor", "growth_interval")
_KEYS = ("scale", *_RULE_KEYS, "_growth_tracker")


def expressible(rule: Rule) -> bool:
    """Whether torch's five keys say all of `rule` that later decisions depend on."""
    if not isinstance(rule, Dynamic):
        return False
    said = {key: getattr(rule, key) for key in ("init_scale", *_RULE_KEYS)}
    return rule == replace(like("torch"), **said)


def portable(rule: Rule, state: ScalerState, modules: Modules | None) -> dict[str, Any]:
    """The portable form, with what is saved of the modules where there are some."""
    saved = scaler_to_dict(rule, state)
    return saved if modules is None else {**saved, "modules": modules.save()._asdict()}


def export_state(rule: Rule, state: ScalerState, modules: Modules | None = None) -> dict[str, Any]:
    """The state_dict of a scaler; `state` in Python numbers."""
    saved: dict[str, Any] = {
        "scale": state.loss_scale,
        "growth_factor": getattr(rule, "growth_factor", 1.0),
        "backoff_factor": getattr(rule, "backoff_factor", 1.0),
        "growth_interval": getattr(rule, "growth_interval", 2**31 - 1),
        "_growth_tracker": state.clean,
    }
    if not expressible(rule):
        saved[EXTRA] = portable(rule, state, modules)
    return saved


def import_state(saved: Mapping[str, Any], rule: Rule) -> tuple[Rule, ScalerState]:
    """Rule and state out of a state_dict, torch's or ours.

    Rule and state come from the sixth key if it is there, scale and count of clean steps always
    from torch's.

    Args:
        saved: torch's five keys, or ours, or the portable form of `to_dict`. Values may be Python
            numbers, numpy scalars or 0-d tensors.
        rule: the rule in force, which torch's keys change in three parameters.

    Raises:
        RuntimeError: `saved` is empty, as a disabled scaler's is (as torch).
        StateError: a key is missing, or a value is not what it should be.
    """
    if not isinstance(saved, Mapping):
        raise StateError(f"a state_dict is a dict, got {type(saved).__name__}")
    if len(saved) == 0:
        raise RuntimeError(
            "this state_dict is empty, as that of a disabled GradScaler is. Save while scaling is"
            " enabled, or disable this scaler too"
        )
    if saved.get("kind") == "scaler":
        return scaler_from_dict(saved)
    missing = [key for key in _KEYS if key not in saved]
    if missing:
        raise StateError(f"scaler state_dict: missing {', '.join(missing)}; it has {list(saved)}")
    values = {key: _plain(saved[key]) for key in _KEYS}
    state = rule.init()
    if EXTRA in saved:
        rule, state = scaler_from_dict(saved[EXTRA])
    elif isinstance(rule, Dynamic):
        try:
            rule = replace(rule, **{key: values[key] for key in _RULE_KEYS})
        except RuleError as error:
            raise StateError(f"scaler state_dict: {error}") from error
    scale, clean = check_scale(values["scale"], rule), values["_growth_tracker"]
    lowest = min(rule.init().clean, 0)
    if isinstance(clean, bool) or not isinstance(clean, int) or not lowest <= clean < 2**31:
        raise StateError(
            f"scaler state_dict: _growth_tracker must be an integer from {lowest} on, got {clean!r}"
        )
    return rule, state._replace(loss_scale=scale, clean=clean)


def _plain(value: Any) -> Any:
    """A Python number out of a one-element tensor or a numpy scalar; else `value`."""
    if not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (RuntimeError, ValueError):
        return value
