"""The rules that every backend is tried with."""

from __future__ import annotations

from polyamp._dynamic import Dynamic
from polyamp._history import DelayedScaling, TwoPhase
from polyamp._logmax import LogMax
from polyamp._predictive import Predictive
from polyamp._presets import PRESETS, resolve_rule
from polyamp._scaling import Rule, Static

_EDGES: dict[str, Rule] = {
    "odd factors": Dynamic(
        init_scale=2.0**10, growth_interval=4, growth_factor=1.5, backoff_factor=0.7
    ),
    "tolerant": Dynamic.like(
        "nemo", init_scale=64.0, growth_interval=3, tolerance=0.25, max_scale=2.0**9
    ),
    "faulting": Dynamic.like("deepspeed-zero", init_scale=8.0, growth_interval=3),
    "window": Dynamic.like("metaseq", growth_interval=2, max_skips_in_a_row=3),
    "static 512": Static(512.0),
    "threshold": Dynamic.like(
        "fairseq", init_scale=16.0, growth_interval=3, threshold=2.0, at_floor="hold"
    ),
}

RULES: tuple[Rule, ...] = tuple(_EDGES.values())
"""Rules that use every parameter of `Dynamic` between them."""


def every_rule() -> dict[str, Rule]:
    """The rules by name: every kind of rule, every parameter of `Dynamic`, and every imitated
    system.

    The systems grow after 7 clean steps, so that a short trace has growth in it.
    """
    systems = {name: Dynamic.like(name, growth_interval=7) for name in PRESETS}
    return {
        "dynamic": Dynamic(),
        "static": Static(),
        "auto": resolve_rule("auto"),
        "predictive": Predictive(),
        "auto, bounded": Predictive(2.0**4, 2.0**-2, 2.0**12, guard=3),
        "logmax": LogMax(1.0, 2.0**-100, 2.0**100),
        "delayed": DelayedScaling(history=20),
        "two-phase": TwoPhase(explore_steps=9, history=12),
        "two-phase, literal": TwoPhase(explore_steps=30, history=5, literal=True),
        **_EDGES,
        **systems,
    }
