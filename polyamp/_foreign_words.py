"""How other systems name the parameters of `Dynamic` in their configuration.

Each system's table says which of its words stand for which parameter and how a value is read and
written. `read_words` and `write_words` are the only code that uses them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from polyamp._errors import StateError
from polyamp._presets import PRESETS
from polyamp._scaling import MAX_SCALE, MIN_SCALE, Rule, Static


class Word(NamedTuple):
    """One parameter of a system: its names there, the first of them written, and what it means."""

    keys: tuple[str, ...]
    field: str
    """The parameter of `Dynamic`."""
    read: Callable[[Any], Any] | None = None
    """From their value to ours; None: the same."""
    write: Callable[[Any], Any] | None = None
    """From our value to theirs; None: the same."""


def plain(value: Any) -> Any:
    """A Python number out of a one-element tensor, array, variable or numpy scalar; else `value`.

    Reads device scalars.
    """
    if not hasattr(value, "item"):
        value = getattr(value, "value", value)  # a Keras variable's tensor
        if hasattr(value, "numpy"):
            value = value.numpy()
    if not hasattr(value, "item"):
        return value
    try:
        return value.item()
    except (RuntimeError, ValueError, TypeError):
        return value


def _floor(value: Any) -> Any:
    return MIN_SCALE if value is None or value == 0 else value


def _write_floor(value: float) -> float | None:
    return None if value <= MIN_SCALE else value


def _ceiling(value: Any) -> Any:
    return MAX_SCALE if value is None else value


def _write_ceiling(value: float) -> float | None:
    return None if value >= MAX_SCALE else value


def _inverse(value: Any) -> Any:
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and value
    return 1.0 / value if known else value


def _power(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int) or not -126 <= value <= 127:
        raise StateError(
            f"initial_scale_power must be an integer from -126 to 127 (the scale is 2 to that"
            f" power), got {value!r}"
        )
    return 2.0**value


def _write_power(value: float) -> int:
    return round(math.log2(value))


def _refill(value: Any) -> str:
    if not isinstance(value, bool):
        raise StateError(f"consecutive_hysteresis must be true or false, got {value!r}")
    return "clean" if value else "growth"


def _at_floor(value: Any) -> str:
    if not isinstance(value, bool):
        raise StateError(f"raise_error_at_min_scale must be true or false, got {value!r}")
    return "fault" if value else "clamp"


def _at_least_one(value: Any) -> Any:
    return 1 if value == 0 and not isinstance(value, bool) else value


def _whole(value: float) -> float | int:
    return int(value) if value.is_integer() else value


def _same(*names: str) -> tuple[Word, ...]:
    return tuple(Word((name,), name) for name in names)


_FACTORS = _same("growth_factor", "backoff_factor")
_TORCH = (*_same("init_scale"), *_FACTORS, *_same("growth_interval"))


def _both_factors(key: str) -> tuple[Word, Word]:
    """One factor that multiplies at growth and divides at a cut."""
    return (
        Word((key,), "growth_factor", write=_whole),
        Word((key,), "backoff_factor", _inverse, lambda backoff: _whole(1.0 / backoff)),
    )


_DEEPSPEED = (
    Word(("initial_scale_power",), "init_scale", _power, _write_power),
    Word(("loss_scale_window", "scale_window"), "growth_interval"),
    Word(("min_loss_scale", "min_scale"), "min_scale", _floor, lambda low: max(int(low), 1)),
)
_DEEPSPEED_SPARES = (
    Word(("hysteresis", "delayed_shift"), "hysteresis"),
    Word(("consecutive_hysteresis",), "hysteresis_refill", _refill, lambda r: r == "clean"),
)
_FAIRSEQ = (
    Word(("fp16_init_scale", "init_scale"), "init_scale"),
    Word(("fp16_scale_window", "scale_window"), "growth_interval"),
    Word(("fp16_scale_tolerance", "tolerance"), "tolerance"),
    Word(("threshold_loss_scale", "threshold"), "threshold"),
    Word(("min_loss_scale",), "min_scale"),
)

WORDS: dict[str, tuple[Word, ...]] = {
    "torch": _TORCH,
    "keras": (
        Word(("initial_scale",), "init_scale"),
        Word(("dynamic_growth_steps",), "growth_interval"),
    ),
    "flax": (
        Word(("scale",), "init_scale"),
        *_FACTORS,
        *_same("growth_interval"),
        Word(("minimum_scale",), "min_scale", _floor),
    ),
    "jmp": (
        Word(("loss_scale",), "init_scale"),
        Word(("period",), "growth_interval"),
        *_both_factors("factor"),
        Word(("min_loss_scale",), "min_scale"),
    ),
    "deepspeed-zero": (
        *_DEEPSPEED,
        *_DEEPSPEED_SPARES,
        Word(("raise_error_at_min_scale",), "at_floor", _at_floor, lambda a: a == "fault"),
    ),
    "deepspeed-stage0": (*_DEEPSPEED, *_DEEPSPEED_SPARES),
    "megatron": (
        Word(("initial_loss_scale",), "init_scale"),
        Word(("loss_scale_window",), "growth_interval"),
        Word(("min_loss_scale",), "min_scale"),
        Word(("hysteresis",), "hysteresis"),
    ),
    "nemo": (
        Word(("native_amp_init_scale", "init_scale"), "init_scale"),
        *_FACTORS,
        Word(("native_amp_growth_interval", "growth_interval"), "growth_interval"),
        Word(("hysteresis",), "hysteresis"),
    ),
    "apex": (
        Word(("min_loss_scale",), "min_scale", _floor, _write_floor),
        Word(("max_loss_scale",), "max_scale", _ceiling),
    ),
    "colossalai": (
        Word(("initial_scale",), "init_scale"),
        *_FACTORS,
        *_same("growth_interval"),
        Word(("min_scale",), "min_scale", _floor, _write_floor),
        Word(("max_scale",), "max_scale", _ceiling, _write_ceiling),
        Word(("hysteresis",), "hysteresis", _at_least_one),
    ),
    "fairseq": _FAIRSEQ,
    "metaseq": _FAIRSEQ,
}
"""The words of every system, as in the files that `Preset.source` names and in their
configuration classes: DeepSpeed deepspeed/runtime/precision_config.py, Megatron-core
megatron/core/optimizer/optimizer_config.py, NeMo megatron_gpt_config.yaml, fairseq and metaseq
*/dataclass/configs.py."""

STATIC_WORD = {"deepspeed-zero", "deepspeed-stage0", "megatron"}
"""Systems whose word `loss_scale` means a scale that never changes (0 or None: dynamic)."""


def _automatic(value: Any) -> bool:
    """Whether a launcher fills this in later, as Hugging Face's does in DeepSpeed's JSON."""
    return isinstance(value, str) and value == "auto"


def read_words(system: str, config: Mapping[str, Any], *, strict: bool = False) -> dict[str, Any]:
    """Parameters of `Dynamic` that `config` of `system` sets, named and counted as `like` takes.

    Args:
        system: a name of `WORDS`.
        config: the system's words; others are ignored.
        strict: refuse words that look like a misspelt one.

    Raises:
        StateError: a value or, with `strict`, a key cannot be right.
    """
    found: dict[str, Any] = {}
    for word in WORDS[system]:
        for key in word.keys:
            if key not in config:
                continue
            value = plain(config[key])
            if _automatic(value) or (value is None and word.read not in (_floor, _ceiling)):
                break
            found[word.field] = word.read(value) if word.read else value
            break
    if strict:
        _refuse_misspelt(system, config)
    return found


def _refuse_misspelt(system: str, config: Mapping[str, Any]) -> None:
    import difflib

    known = [key for word in WORDS[system] for key in word.keys]
    absent = [key for key in known if key not in config]
    for key in config:
        if key in known or key == "loss_scale":
            continue
        near = difflib.get_close_matches(str(key), absent, n=1, cutoff=0.85)
        if near:
            raise StateError(f"{system} has no parameter {key!r}; did you mean {near[0]!r}?")


def static_scale(system: str, config: Mapping[str, Any]) -> float | None:
    """The scale that `config` fixes, or None where it asks for a dynamic one."""
    value = plain(config.get("loss_scale")) if system in STATIC_WORD else None
    if value is None or _automatic(value) or value == 0:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise StateError(f"loss_scale must be a number (0: dynamic), got {value!r}")
    return float(value)


def write_words(system: str, rule: Rule) -> dict[str, Any]:
    """The configuration of `system` that comes nearest to `rule`, in that system's words."""
    if isinstance(rule, Static):
        return {"loss_scale": rule.init_scale} if system in STATIC_WORD else {}
    said: dict[str, Any] = {"loss_scale": 0} if system.startswith("deepspeed") else {}
    for word in WORDS[system]:
        value = getattr(rule, word.field)
        if word.field == "growth_interval":
            value -= PRESETS[system].extra_interval
        said.setdefault(word.keys[0], word.write(value) if word.write else value)
    return said
