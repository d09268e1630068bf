"""Where a scaler lies in what was read, whose it is, and what configuration is beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from polyamp._errors import StateError, closest
from polyamp._foreign_state import DIALECTS
from polyamp._foreign_words import WORDS, plain
from polyamp._interchange import scaler_to_dict
from polyamp._presets import resolve_rule
from polyamp._state import ScalerState

CONTAINERS = {"lightning": "torch", "accelerate": "torch"}
"""Names of formats that hold another system's state."""

PLUGIN = "MixedPrecision"
"""The key of Lightning's checkpoints: the name of the precision plugin's class."""

_PLUGINS = (
    PLUGIN,
    "MixedPrecisionPlugin",
    "NativeMixedPrecisionPlugin",
    "FSDPPrecision",
    "FSDPMixedPrecision",
    "FSDPMixedPrecisionPlugin",
    "ApexMixedPrecisionPlugin",
    "MegatronHalfPrecisionPlugin",
    "PipelineMixedPrecisionPlugin",
    "native_amp_scaling_state",
    "amp_scaling_state",
)

PLACES: tuple[tuple[str, ...], ...] = (
    (),
    ("loss_scaler[0-9]*",),
    ("amp", "loss_scaler[0-9]*"),
    *((name,) for name in ("scaler", "grad_scaler", "amp_scaler", "loss_scaler", "amp")),
    *((name,) for name in ("scaler_state_dict", "scaler_state", "grad_scaler_state_dict")),
    *((name,) for name in _PLUGINS),
    *((name, "loss_scaler[0-9]*") for name in ("ApexMixedPrecisionPlugin", "amp_scaling_state")),
    *((name,) for name in ("optimizer", "optimizer_state_dict", "last_optimizer_state")),
    *(
        (outer, inner)
        for outer in ("optimizer", "optimizer_state_dict")
        for inner in ("loss_scaler", "grad_scaler")
    ),
    ("optimizer", "[0-9]*", "grad_scaler"),
)
"""Where the systems put their scaler in a checkpoint, as patterns of keys. Sources: Lightning
lightning/pytorch/trainer/connectors/checkpoint_connector.py; Accelerate checkpointing.py and
utils/constants.py; Megatron-core optimizer/optimizer.py; DeepSpeed runtime/engine.py; fairseq and
metaseq checkpoint_utils.py."""

CONFIGS = {
    "deepspeed-zero": (("ds_config", "fp16"), ("fp16",)),
    "deepspeed-stage0": (("ds_config", "fp16"), ("fp16",)),
    "megatron": (("args",),),
    "fairseq": (("cfg", "common"),),
    "metaseq": (("cfg", "common"),),
}
"""Where a checkpoint holds the configuration too."""

_CONFIG_SIGNS = {
    "dynamic_growth_steps": ("keras",),
    "initial_loss_scale": ("megatron",),
    "native_amp_init_scale": ("nemo",),
    "fp16_init_scale": ("fairseq", "metaseq"),
}


_WEAK = {"fairseq", "metaseq"}
"""Systems whose one key says little: they give way to any other."""


class Found(NamedTuple):
    """A scaler in what was read."""

    system: str
    place: str
    """Keys from the outside in, joined by dots; empty for the whole."""
    saved: Mapping[str, Any]
    """Its saved state; empty where there is a configuration only."""
    config: Mapping[str, Any]


def as_mapping(source: Any) -> Mapping[str, Any] | None:
    """The saved form of a scaler object or what is a mapping already; None for anything else."""
    if isinstance(source, Mapping):
        return source
    if isinstance(source, type):
        return None
    if type(source).__module__.startswith("polyamp"):
        own = _portable_of(source)
        if own is not None:
            return own
    if callable(getattr(source, "state_dict", None)) and "Scaler" in type(source).__name__:
        return dict(source.state_dict())
    if is_dataclass(source):
        return {f.name: getattr(source, f.name) for f in fields(source)}
    names = ("dynamic_scale", "step_counter", "initial_scale", "dynamic_growth_steps")
    if hasattr(source, "dynamic_growth_steps"):
        return {name: getattr(source, name) for name in names if hasattr(source, name)}
    held = getattr(source, "__dict__", None)
    return dict(held) if held else None


def _portable_of(source: Any) -> dict[str, Any] | None:
    """The portable form of a scaler of one of our backends."""
    if callable(getattr(source, "to_dict", None)):
        return dict(source.to_dict())
    rule, state = getattr(source, "rule", None), getattr(source, "state", None)
    if rule is None or not isinstance(state, ScalerState):
        return None
    now = state._replace(loss_scale=source.scale, clean=source.fin_steps)
    return scaler_to_dict(resolve_rule(rule), now)


def dig(data: Any, place: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Every (dotted place, value) in nested mappings and lists that `place`'s patterns match."""
    if not place:
        yield "", data
        return
    inner: Any = as_mapping(data)
    pairs = inner.items() if inner is not None else enumerate(data if _is_list(data) else ())
    for key, value in pairs:
        if fnmatchcase(str(key), place[0]):
            for rest, found in dig(value, place[1:]):
                yield f"{key}.{rest}" if rest else str(key), found


def _is_list(data: Any) -> bool:
    return isinstance(data, Sequence) and not isinstance(data, (str, bytes))


def check_system(system: str | None) -> str | None:
    """The system whose words `system` names: itself, or what the container holds."""
    known = ["polyamp", *DIALECTS, *CONTAINERS]
    if system is None or system in ("polyamp", *DIALECTS):
        return system
    if system in CONTAINERS:
        return CONTAINERS[system]
    near = closest(str(system), known, likeness=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise StateError(f"unknown system {system!r}{hint} Known: {', '.join(known)}")


def find(data: Any, system: str | None, at: str | None) -> Found:
    """The one scaler in `data`.

    Args:
        data: what was read: nested mappings and lists, or a scaler object.
        system: a key of `DIALECTS`; None to tell it from the keys.
        at: dotted keys to look under in place of the known places.

    Raises:
        StateError: none there, or more than one candidate; the message lists them.
    """
    outer = as_mapping(data)
    if outer is None:
        raise StateError(
            f"cannot read a loss scaler from {type(data).__name__}; pass a dict, a scaler or a file"
        )
    hits = list(_states(outer, system, at))
    if not hits:
        hits = list(_configs(outer, system, at))
        for name in dict.fromkeys([*([system] if system else []), *(hit.system for hit in hits)]):
            _refuse_half_a_state(outer, name, at)
    hits = _distinct([h for h in hits if system or h.system not in _WEAK] or hits)
    if len(hits) == 1:
        return hits[0]
    raise StateError(_nothing(outer, system, at) if not hits else _several(hits))


def _states(outer: Mapping[str, Any], system: str | None, at: str | None) -> Iterator[Found]:
    for path, saved in _placed(outer, at):
        for name in _systems_of(saved, system):
            yield Found(name, path, saved, _config_of(outer, name))


def _placed(outer: Mapping[str, Any], at: str | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every (place, mapping) where a state may lie."""
    for place in PLACES if at is None else (tuple(at.split(".")),):
        for path, value in dig(outer, place):
            saved = as_mapping(value)
            if saved:
                yield path, saved


def _systems_of(saved: Mapping[str, Any], system: str | None) -> list[str]:
    """The systems whose keys are there, without those that another one's include.

    polyamp's own goes first: its torch state_dict has torch's keys too.
    """
    keys = {key for key in saved if isinstance(key, str)}
    if "polyamp" in keys or system == "polyamp":
        return ["polyamp"] if "polyamp" in keys else []
    signs = {
        name: max((s for s in dialect.signs if s <= keys), key=len, default=None)
        for name, dialect in DIALECTS.items()
    }
    if system is not None:
        dynamic = {"period", "factor", "min_loss_scale"} & keys
        scale_alone = system == "jmp" and "loss_scale" in keys and not dynamic
        return [system] if signs[system] is not None or scale_alone else []
    there = {name: sign for name, sign in signs.items() if sign is not None}
    return [n for n, sign in there.items() if not any(sign < other for other in there.values())]


def _config_of(outer: Mapping[str, Any], system: str) -> Mapping[str, Any]:
    for place in CONFIGS.get(system, ()):
        for _, value in dig(outer, place):
            config = as_mapping(value)
            if config:
                return config
    return {}


def _configs(outer: Mapping[str, Any], system: str | None, at: str | None) -> Iterator[Found]:
    for path, value in dig(outer, () if at is None else tuple(at.split("."))):
        config = as_mapping(value)
        if not config:
            continue
        block = as_mapping(config.get("fp16"))
        if block is not None:
            name = system or ("deepspeed-zero" if _stage(config) else "deepspeed-stage0")
            if name.startswith("deepspeed"):
                yield Found(name, path, {}, block)
            continue
        if set(_systems_of(config, None)) - _WEAK:
            continue
        for name in [system] if system in WORDS else _config_systems(config):
            if any(key in config for word in WORDS[name] for key in word.keys):
                yield Found(name, path, {}, config)


class _Half(NamedTuple):
    """A part of a state of `system`."""

    system: str
    place: str
    there: list[str]
    missing: list[str]


def _halves(outer: Mapping[str, Any], system: str, at: str | None) -> Iterator[_Half]:
    """Where keys lie that only a running scaler of `system` has, without the rest of them."""
    dialect = DIALECTS.get(system)
    if dialect is None:
        return
    words = {key for word in WORDS[system] for key in word.keys}
    running = frozenset[str]().union(*dialect.signs, dialect.needs) - words
    for path, saved in _placed(outer, at):
        there = sorted(k for k in running if k in saved and not _says_dynamic(saved[k]))
        missing = min((sorted((s | dialect.needs) - set(saved)) for s in dialect.signs), key=len)
        if there and missing:
            yield _Half(system, path, there, missing)


def _says_dynamic(value: Any) -> bool:
    """Whether this is apex's word for a scale that changes, in a configuration."""
    return isinstance(value, str) and value == "dynamic"


def _refuse_half_a_state(outer: Mapping[str, Any], system: str, at: str | None) -> None:
    """Refuse a part of a saved state: it is no configuration.

    Raises:
        StateError: names the keys that are missing.
    """
    for half in _halves(outer, system, at):
        where = f" at {half.place}" if half.place else ""
        raise StateError(
            f"half a state of {system}{where}: it has {', '.join(half.there)}, but not"
            f" {', '.join(half.missing)}. Add what is missing; a configuration has none of these"
        )


def _nearest(outer: Mapping[str, Any], at: str | None) -> str:
    """Which systems' states are nearly there, in words; empty if none is."""
    halves = [half for name in DIALECTS for half in _halves(outer, name, at)]
    near = sorted((h for h in halves if len(h.missing) <= 2), key=lambda h: len(h.missing))
    told = [
        f"{h.system}{f' at {h.place}' if h.place else ''} without {', '.join(h.missing)}"
        for h in near[:3]
    ]
    return f" It may be half a state: {'; '.join(told)}." if told else ""


def _config_systems(config: Mapping[str, Any]) -> list[str]:
    return [name for sign, names in _CONFIG_SIGNS.items() if sign in config for name in names]


def _stage(config: Mapping[str, Any]) -> int:
    zero = as_mapping(config.get("zero_optimization")) or {}
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or not isinstance(stage, int):
        raise StateError(
            f"zero_optimization.stage is {stage!r}; name the system: deepspeed-stage0 or"
            " deepspeed-zero"
        )
    return stage


def _distinct(hits: list[Found]) -> list[Found]:
    kept: list[Found] = []
    for hit in hits:
        if not any(hit.system == k.system and _equal(hit.saved, k.saved) for k in kept):
            kept.append(hit)
    return kept


def _equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    if a is b:
        return True
    try:
        return {k: plain(v) for k, v in a.items()} == {k: plain(v) for k, v in b.items()}
    except (ValueError, RuntimeError, TypeError):
        return False


def _several(hits: list[Found]) -> str:
    lines = "; ".join(f"{h.system} at {h.place or 'the top'}" for h in hits)
    if {h.system for h in hits} <= _WEAK:
        lines += "; jmp, whose scale then never changes"
    ways = [
        *(["the system (--from)"] if len({h.system for h in hits}) > 1 else []),
        *(["the place (--at)"] if len({h.place for h in hits}) > 1 else []),
    ]
    return f"more than one scaler may be meant: {lines}. Name {' or '.join(ways)}"


def _nothing(outer: Mapping[str, Any], system: str | None, at: str | None) -> str:
    keys = ", ".join(str(key) for key in list(outer)[:12]) or "none"
    what = f"no state or configuration of {system}" if system else "no loss scaler that is known"
    where = f" at {at}" if at else ""
    if not outer:
        return f"{what}: it is empty, as the state of a disabled scaler is"
    hint = (
        f" Its saved form has {' or '.join(_words(s) for s in DIALECTS[system].signs)}."
        if system in DIALECTS
        else f"{_nearest(outer, at)} Known systems: {', '.join(DIALECTS)}."
    )
    return f"{what}{where}. Keys at the top: {keys}.{hint} Another place is named with at= (--at)"


def _words(sign: frozenset[str]) -> str:
    return ", ".join(sorted(sign))
