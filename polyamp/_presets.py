"""The loss scalers of other systems, as parameters of `Dynamic`.

Each entry has the defaults a user of that system gets who changes nothing, and the upstream file
they were read in. The golden traces in the tests hold what those systems really produce. Where a
system has no floor the core's own, 2**-126, stands in; where it has no ceiling 2**126 does, but for
torch, which grows until float32 ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from polyamp._dynamic import Dynamic
from polyamp._errors import RuleError, closest
from polyamp._history import DelayedScaling, TwoPhase
from polyamp._logmax import LogMax
from polyamp._predictive import Predictive
from polyamp._scaling import Rule, Static
from polyamp._xp import F32_MAX


class Preset(NamedTuple):
    """Another system's loss scaler."""

    source: str
    """Upstream project and file."""
    parameters: dict[str, Any]
    """Where it differs from `Dynamic()`."""
    extra_interval: int = 0
    """Clean steps until growth beyond the system's own growth interval."""


_LATE = {"late_first_window": True, "growth_interval": 1000, "min_scale": 1.0}

PRESETS: dict[str, Preset] = {
    "torch": Preset("pytorch/pytorch torch/amp/grad_scaler.py", {"max_scale": F32_MAX}),
    "keras": Preset(
        "keras-team/keras keras/src/optimizers/loss_scale_optimizer.py", {"init_scale": 2.0**15}
    ),
    "flax": Preset("google/flax flax/training/dynamic_scale.py", {}, extra_interval=1),
    "jmp": Preset(
        "google-deepmind/jmp jmp/_src/loss_scale.py", {"init_scale": 2.0**15, "min_scale": 1.0}
    ),
    "deepspeed-stage0": Preset(
        "deepspeedai/DeepSpeed deepspeed/runtime/fp16/unfused_optimizer.py", _LATE
    ),
    "deepspeed-zero": Preset(
        "deepspeedai/DeepSpeed deepspeed/runtime/fp16/loss_scaler.py",
        {**_LATE, "hysteresis": 2, "at_floor": "fault"},
    ),
    "megatron": Preset(
        "NVIDIA/Megatron-LM megatron/core/optimizer/grad_scaler.py",
        {"init_scale": 2.0**32, "growth_interval": 1000, "min_scale": 1.0, "hysteresis": 2},
    ),
    "nemo": Preset(
        "NVIDIA/NeMo nemo/collections/nlp/parts/nlp_overrides.py, megatron_gpt_config.yaml",
        {
            "init_scale": 2.0**32,
            "growth_interval": 1000,
            "hysteresis": 2,
            "hysteresis_refill": "clean",
        },
    ),
    "apex": Preset("NVIDIA/apex apex/amp/scaler.py", {"max_scale": 2.0**24}),
    "colossalai": Preset(
        "hpcaitech/ColossalAI colossalai/amp/naive_amp/mixed_precision_mixin/fp16.py",
        {"growth_interval": 1000, "min_scale": 1.0, "max_scale": 2.0**32, "hysteresis": 2},
    ),
    "fairseq": Preset(
        "facebookresearch/fairseq fairseq/optim/dynamic_loss_scaler.py",
        {
            "init_scale": 2.0**7,
            "growth_interval": 2**14,
            "min_scale": 1e-4,
            "at_floor": "fault",
            "fault_when": "reaching_floor",
        },
    ),
    "metaseq": Preset(
        "facebookresearch/metaseq metaseq/optim/dynamic_loss_scaler.py",
        {
            "init_scale": 4.0,
            "growth_interval": 256,
            "min_scale": 2.0**-5,
            "window_follows_scale": True,
            "at_floor": "hold",
        },
    ),
}
"""The imitated systems by name."""


def presets() -> dict[str, Dynamic]:
    """Every imitated system's rule, by the name `Dynamic.like` and `rule=` take."""
    return {name: like(name) for name in PRESETS}


def like(system: str, **overrides: Any) -> Dynamic:
    """See `Dynamic.like`."""
    if system not in PRESETS:
        if system in _OWN:
            raise RuleError(
                f"{system!r} is a rule of polyamp's own, not another system's: give it as rule="
                f" itself. Systems: {', '.join(PRESETS)}"
            )
        near = closest(str(system), [*PRESETS, *_OWN], likeness=0.6)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise RuleError(
            f"unknown system {system!r}{hint} Known: {', '.join(PRESETS)}; polyamp's own rules are"
            f" {', '.join(_OWN)}"
        )
    allowed = [f.name for f in fields(Dynamic)]
    for key in overrides:
        if key not in allowed:
            near = closest(key, allowed, likeness=0.6)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise RuleError(f"Dynamic has no parameter {key!r}{hint} It has: {', '.join(allowed)}")
    preset = PRESETS[system]
    values = {**preset.parameters, **overrides}
    interval = values.get("growth_interval", Dynamic.growth_interval)
    if preset.extra_interval and type(interval) is int:
        values["growth_interval"] = interval + preset.extra_interval
    return Dynamic(**values)


def _auto() -> Rule:
    return Predictive(sub_interval=64)


_OWN: dict[str, Callable[[], Rule]] = {
    "auto": _auto,
    "dynamic": Dynamic,
    "static": Static,
    "predictive": Predictive,
    "logmax": LogMax,
    "delayed": DelayedScaling,
    "two-phase": TwoPhase,
}
"""polyamp's own rules by the name `rule=` takes; each with its defaults."""


def resolve_rule(rule: Rule | str | None, default: Rule | None = None) -> Rule:
    """A rule from what users pass as `rule=`: a rule, a preset's name, or None for the default.

    Raises:
        RuleError: an unknown name; another type.
    """
    if rule is None:
        return Dynamic() if default is None else default
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, str) and rule in _OWN:
        return _OWN[rule]()
    if isinstance(rule, str) and rule in PRESETS:
        return like(rule)
    if isinstance(rule, str):
        known = [*_OWN, *PRESETS]
        near = closest(rule, known, likeness=0.6)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise RuleError(f"unknown rule {rule!r}{hint} Known: {', '.join(known)}")
    raise RuleError(
        f"rule must be a rule such as Dynamic() or Static(128.0), or one of"
        f" {', '.join([*_OWN, *PRESETS])}; got {rule!r}"
    )
