"""What other systems save of a loss scaler while it runs, and how it is read and written.

A reader takes the saved dict and the rule's parameters known so far, and returns a `Reading`; a
writer returns what the system itself would have saved. `DIALECTS` has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from polyamp._dynamic import Dynamic
from polyamp._errors import StateError
from polyamp._foreign_words import plain, read_words, write_words
from polyamp._scaling import Rule, Static
from polyamp._state import ScalerState

Saved = Mapping[str, Any]


class Reading(NamedTuple):
    """What a saved dict says."""

    scale: Any
    parameters: dict[str, Any]
    """Parameters of `Dynamic`, growth_interval as the system counts; empty for a fixed scale."""
    clean: Any = None
    """`ScalerState.clean`; None where it was not saved."""
    left: Any = None
    """`ScalerState.left`; None where it was not saved or means nothing."""
    fixed: bool = False
    """The scale never changes."""
    notes: tuple[str, ...] = ()


class Dialect(NamedTuple):
    """One system's saved form."""

    signs: tuple[frozenset[str], ...]
    """Keys of which all (of one of the sets) are there."""
    read: Callable[[Saved], Reading]
    write: Callable[[Rule, ScalerState], dict[str, Any]]
    unsaved: str = ""
    """What the system forgets of the running state, in words."""
    tensors: tuple[str, ...] = ()
    """Keys under which the system expects a float32 tensor of shape (1,)."""
    fixed: bool = False
    """Whether the saved form can say that the scale never changes."""
    needs: frozenset[str] = frozenset()
    """Keys that the state of a scale that changes has beside its signs."""


def _get(saved: Saved, key: str) -> Any:
    if key not in saved:
        raise StateError(f"saved scaler: missing key {key}; it has {', '.join(map(str, saved))}")
    return plain(saved[key])


def _flag(saved: Saved, key: str) -> bool:
    value = _get(saved, key)
    if not isinstance(value, bool):
        raise StateError(f"saved scaler: {key} must be true or false, got {value!r}")
    return value


def _refuse_missing(saved: Saved, keys: frozenset[str]) -> None:
    missing = sorted(keys - set(saved))
    if missing:
        has = ", ".join(map(str, saved))
        raise StateError(f"saved scaler: missing {', '.join(missing)}; it has {has}")


def _count(saved: Saved, key: str) -> int:
    value = _get(saved, key)
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**31) <= value < 2**31:
        raise StateError(f"saved scaler: {key} must be an integer below 2**31, got {value!r}")
    return value


def _factors(saved: Saved, key: str = "scale_factor") -> dict[str, Any]:
    """Both factors from one, as systems have it that multiply and divide by the same."""
    factor = _get(saved, key)
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 1:
        raise StateError(f"saved scaler: {key} must be a number above 1, got {factor!r}")
    return {"growth_factor": factor, "backoff_factor": 1.0 / factor}


def _words(system: str, saved: Saved) -> dict[str, Any]:
    """Parameters that stand among the running values, the scale apart."""
    said = read_words(system, saved)
    said.pop("init_scale", None)
    return said


def _clean(state: ScalerState) -> int:
    return max(int(state.clean), 0)


def _read_torch(saved: Saved) -> Reading:
    keys = ("growth_factor", "backoff_factor", "growth_interval")
    said = {key: _get(saved, key) for key in keys}
    fixed = said["growth_factor"] == 1 and said["backoff_factor"] == 1
    clean = _count(saved, "_growth_tracker")
    return Reading(_get(saved, "scale"), {} if fixed else said, clean, fixed=fixed)


def _write_torch(rule: Rule, state: ScalerState) -> dict[str, Any]:
    return {
        "scale": float(state.loss_scale),
        "growth_factor": getattr(rule, "growth_factor", 1.0),
        "backoff_factor": getattr(rule, "backoff_factor", 1.0),
        "growth_interval": getattr(rule, "growth_interval", 2**31 - 1),
        "_growth_tracker": _clean(state),
    }


_WRITTEN, _MISSPELT = "_hysteresis_tracker", "_hysterisis_tracker"


def _read_nemo(saved: Saved) -> Reading:
    left = _count(saved, _WRITTEN if _WRITTEN in saved else _MISSPELT)
    notes: tuple[str, ...] = ()
    if _MISSPELT not in saved and left > 1:
        notes = (
            f"nemo saves {_WRITTEN} but looks for {_MISSPELT} when it loads: NeMo itself would go"
            f" on with 1 overflow until the next cut, here it is {left}, as saved",
        )
    return _read_torch(saved)._replace(left=max(left, 1), notes=notes)


def _write_nemo(rule: Rule, state: ScalerState) -> dict[str, Any]:
    left = int(state.left)
    return {**_write_torch(rule, state), _WRITTEN: left, _MISSPELT: left}


def _read_keras(saved: Saved) -> Reading:
    said = read_words("keras", saved)
    return Reading(_get(saved, "dynamic_scale"), said, _count(saved, "step_counter"))


def _write_keras(rule: Rule, state: ScalerState) -> dict[str, Any]:
    running = {"dynamic_scale": float(state.loss_scale), "step_counter": _clean(state)}
    return {**write_words("keras", rule), **running}


def _read_flax(saved: Saved) -> Reading:
    return Reading(_get(saved, "scale"), _words("flax", saved), _count(saved, "fin_steps"))


def _write_flax(rule: Rule, state: ScalerState) -> dict[str, Any]:
    running = {"fin_steps": _clean(state), "scale": float(state.loss_scale)}
    return {**write_words("flax", rule), **running}


def _read_jmp(saved: Saved) -> Reading:
    said, scale = _words("jmp", saved), _get(saved, "loss_scale")
    if "counter" not in saved:
        return Reading(scale, {}, fixed=True)
    if str(getattr(saved["loss_scale"], "dtype", "")) == "float16" and isinstance(scale, float):
        said["max_scale"] = _last_below(65504.0, scale, said.get("growth_factor", 2))
    return Reading(scale, said, _count(saved, "counter"))


def _last_below(limit: float, scale: float, factor: Any) -> float:
    """The largest scale that growth from `scale` reaches without passing `limit`."""
    usable = isinstance(factor, (int, float)) and factor > 1
    while usable and 0 < scale * factor <= limit:
        scale *= factor
    return scale


def _write_jmp(rule: Rule, state: ScalerState) -> dict[str, Any]:
    scale = float(state.loss_scale)
    if isinstance(rule, Static):
        return {"loss_scale": scale}
    return {**write_words("jmp", rule), "loss_scale": scale, "counter": _clean(state)}


def _read_apex(saved: Saved) -> Reading:
    return Reading(_get(saved, "loss_scale"), {}, _count(saved, "unskipped"))


def _write_apex(rule: Rule, state: ScalerState) -> dict[str, Any]:
    scaler = {"loss_scale": float(state.loss_scale), "unskipped": _clean(state)}
    return {"loss_scaler0": scaler}


def _late(saved: Saved) -> int:
    """`clean` from DeepSpeed's iterations: k clean steps since the last overflow or the start."""
    since = _count(saved, "cur_iter") - _count(saved, "last_overflow_iter") - 1
    if since < 0:
        raise StateError(
            f"saved scaler: last_overflow_iter {saved['last_overflow_iter']} is not before"
            f" cur_iter {saved['cur_iter']}"
        )
    if since == 0:
        return -1
    window = _count(saved, "scale_window")
    if window < 1:
        raise StateError(f"saved scaler: scale_window must be at least 1, got {window}")
    return (since - 1) % window


def _write_late(state: ScalerState) -> dict[str, int]:
    since = int(state.clean) + 1
    now = max(int(state.step), since)
    return {"cur_iter": now, "last_overflow_iter": now - 1 - since}


_LATE_KEYS = frozenset(("cur_iter", "last_overflow_iter", "scale_window", "scale_factor"))
_ZERO_KEYS = _LATE_KEYS | {"cur_hysteresis"}


def _read_zero(saved: Saved) -> Reading:
    if "dynamic" in saved and not _flag(saved, "dynamic"):
        return Reading(_get(saved, "cur_scale"), {}, fixed=True)
    _refuse_missing(saved, _ZERO_KEYS)
    said = {**_words("deepspeed-zero", saved), **_factors(saved)}
    left, most = _count(saved, "cur_hysteresis"), said.get("hysteresis")
    if type(most) is int and 1 <= most < left:
        raise StateError(
            f"saved scaler: cur_hysteresis is {left}, and deepspeed-zero never counts above its"
            f" delayed_shift, {most}"
        )
    return Reading(_get(saved, "cur_scale"), said, _late(saved), left)


def _write_zero(rule: Rule, state: ScalerState) -> dict[str, Any]:
    scale = float(state.loss_scale)
    if not isinstance(rule, Dynamic):
        return {"cur_scale": scale, "dynamic": False}
    return {
        "cur_scale": scale,
        "dynamic": True,
        **_write_late(state),
        "scale_factor": rule.growth_factor,
        "scale_window": rule.growth_interval,
        "min_scale": rule.min_scale,
        "delayed_shift": rule.hysteresis,
        "cur_hysteresis": int(state.left),
        "consecutive_hysteresis": rule.hysteresis_refill == "clean",
        "raise_error_at_min_scale": rule.at_floor == "fault",
    }


def _read_stage0(saved: Saved) -> Reading:
    scale = _get(saved, "cur_scale")
    if not _flag(saved, "dynamic_loss_scale"):
        return Reading(scale, {}, fixed=True)
    _refuse_missing(saved, _LATE_KEYS)
    said = {"growth_interval": _count(saved, "scale_window"), **_factors(saved)}
    if "cur_hysteresis" in saved:
        return Reading(scale, said, _late(saved), _count(saved, "cur_hysteresis"))
    return Reading(scale, {**said, "hysteresis": 1}, _late(saved))


def _write_stage0(rule: Rule, state: ScalerState) -> dict[str, Any]:
    scale = float(state.loss_scale)
    if not isinstance(rule, Dynamic):
        return {"dynamic_loss_scale": False, "cur_scale": scale, "cur_iter": int(state.step)}
    spares = {"cur_hysteresis": int(state.left)} if rule.hysteresis > 1 else {}
    return {
        "dynamic_loss_scale": True,
        "cur_scale": scale,
        **_write_late(state),
        "scale_factor": rule.growth_factor,
        "scale_window": rule.growth_interval,
        **spares,
    }


def _read_megatron(saved: Saved) -> Reading:
    left = max(_count(saved, "hysteresis_tracker"), 1)
    return Reading(_get(saved, "scale"), {}, _count(saved, "growth_tracker"), left)


def _write_megatron(rule: Rule, state: ScalerState) -> dict[str, Any]:
    return {
        "scale": float(state.loss_scale),
        "growth_tracker": _clean(state),
        "hysteresis_tracker": int(state.left),
    }


def _read_colossalai(saved: Saved) -> Reading:
    said = _words("colossalai", saved)
    fixed = said.get("growth_factor") == 1 and said.get("backoff_factor") == 1
    return Reading(_get(saved, "scale"), {} if fixed else said, fixed=fixed)


def _write_colossalai(rule: Rule, state: ScalerState) -> dict[str, Any]:
    return {
        "scale": float(state.loss_scale),
        "growth_factor": getattr(rule, "growth_factor", 1.0),
        "backoff_factor": getattr(rule, "backoff_factor", 1.0),
        "hysteresis": getattr(rule, "hysteresis", 1),
    }


def _read_fairseq(saved: Saved) -> Reading:
    return Reading(_get(saved, "loss_scale"), {})


def _write_fairseq(rule: Rule, state: ScalerState) -> dict[str, Any]:
    return {"loss_scale": float(state.loss_scale)}


_TORCH_KEYS = frozenset(
    ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
)
_SCALE_ONLY = (frozenset(("loss_scale",)),)

DIALECTS: dict[str, Dialect] = {
    "torch": Dialect((_TORCH_KEYS,), _read_torch, _write_torch, fixed=True),
    "nemo": Dialect(
        (_TORCH_KEYS | {_WRITTEN}, _TORCH_KEYS | {_MISSPELT}), _read_nemo, _write_nemo, fixed=True
    ),
    "keras": Dialect((frozenset(("dynamic_scale", "step_counter")),), _read_keras, _write_keras),
    "flax": Dialect((frozenset(("scale", "fin_steps")),), _read_flax, _write_flax),
    "jmp": Dialect((frozenset(("loss_scale", "counter")),), _read_jmp, _write_jmp, fixed=True),
    "apex": Dialect((frozenset(("loss_scale", "unskipped")),), _read_apex, _write_apex),
    "deepspeed-zero": Dialect(
        (frozenset(("cur_scale", "dynamic")), frozenset(("cur_scale", "delayed_shift"))),
        _read_zero,
        _write_zero,
        fixed=True,
        needs=_ZERO_KEYS,
    ),
    "deepspeed-stage0": Dialect(
        (frozenset(("dynamic_loss_scale", "cur_scale")),),
        _read_stage0,
        _write_stage0,
        fixed=True,
        needs=_LATE_KEYS,
    ),
    "megatron": Dialect(
        (frozenset(("scale", "growth_tracker", "hysteresis_tracker")),),
        _read_megatron,
        _write_megatron,
        tensors=("scale",),
    ),
    "colossalai": Dialect(
        (frozenset(("scale", "growth_factor", "backoff_factor", "hysteresis")),),
        _read_colossalai,
        _write_colossalai,
        "its counts of clean steps and of overflows",
        tensors=("scale",),
        fixed=True,
    ),
    "fairseq": Dialect(
        _SCALE_ONLY,
        _read_fairseq,
        _write_fairseq,
        "its counts of clean steps, of steps since the last change and of overflows",
    ),
    "metaseq": Dialect(
        _SCALE_ONLY,
        _read_fairseq,
        _write_fairseq,
        "its count of clean steps and its current growth window",
    ),
}
"""The saved forms. Sources: the files of `Preset.source`; apex/amp/frontend.py (state_dict);
fairseq/optim/fp16_optimizer.py and metaseq/optim/fp16_optimizer.py (key loss_scale);
deepspeed/runtime/fp16/fused_optimizer.py and unfused_optimizer.py (stage 0),
deepspeed/runtime/zero/stage_1_and_2.py and stage3.py (key loss_scaler)."""
