"""The core's own bench: how long importing it takes, and one transition on Python numbers."""

from __future__ import annotations

import os
import platform
import statistics
import time

import polyamp
from polyamp._scaling import Rule, Transition, bind, transition
from polyamp._state import ScalerState, Signal
from polyamp.bench.harness import Case, Tell, cpu_name, in_fresh_python, interleaved
from polyamp.bench.report import Report, Row

IMPORT_LIMIT_MS = 60.0
DYNAMIC_LIMIT_US = 10.0
PREDICTIVE_LIMIT_US = 20.0

FOREIGN = (
    "torch", "jax", "jaxlib", "tensorflow", "keras", "flax", "optax", "numpy", "ml_dtypes",
)  # fmt: skip
"""Packages that `import polyamp` must leave alone."""

_CALLS = 200  # per measurement: about a millisecond, short beside a scheduler's time slice

_IMPORT = """
import sys, time
before = set(sys.modules)
start = time.perf_counter()
import {package}
seconds = time.perf_counter() - start
import json
new = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(json.dumps([seconds, sorted(new)]))
"""


def core(quick: bool, tell: Tell) -> Report:
    """Measure `import polyamp` in fresh interpreters and bound transitions on Python numbers."""
    tell("core: import in fresh interpreters")
    rows = import_rows(9 if quick else 31)
    tell("core: transitions")
    rows += transition_rows(51 if quick else 301)
    return Report(
        bench="core",
        device=f"cpu: {cpu_name()}, {os.cpu_count()} cores",
        versions={"python": platform.python_version(), "polyamp": polyamp.__version__},
        rows=rows,
        notes=(
            "Medians. The import's peer is `import numpy`; a bound transition's is the same"
            " transition not bound beforehand.",
        ),
    )


def import_rows(rounds: int) -> list[Row]:
    """Median duration of the import, and how many foreign packages it brings in."""
    foreign: set[str] = set()

    def case(package: str) -> Case:
        def run() -> float:
            seconds, new = in_fresh_python("-c", _IMPORT.format(package=package))
            if package == "polyamp":
                foreign.update(set(new) & set(FOREIGN))
            return float(seconds)

        return run

    cases = {name: case(name) for name in ("polyamp", "numpy")}
    times = interleaved(cases, rounds, warmup=1)
    ours, peer = (1e3 * statistics.median(times[name]) for name in ("polyamp", "numpy"))
    name = "frameworks and numpy imported" + (f" ({', '.join(sorted(foreign))})" if foreign else "")
    return [
        Row("import polyamp", ours, "ms", peer, IMPORT_LIMIT_MS),
        Row(name, len(foreign), "count", None, 0),
    ]


def transition_rows(rounds: int) -> list[Row]:
    """Median duration of one transition: `Dynamic` and `Predictive`, clean and overflow."""
    rules: dict[str, tuple[Rule, float]] = {
        "Dynamic": (polyamp.Dynamic(), DYNAMIC_LIMIT_US),
        "Predictive": (polyamp.Predictive(), PREDICTIVE_LIMIT_US),
    }
    cases: dict[str, Case] = {}
    for name, (rule, _) in rules.items():
        for kind, finite in (("clean", True), ("overflow", False)):
            state, signal = rule.init(), Signal(finite, amax=1.0)
            cases[f"{name}, {kind}"] = _repeated(bind(rule), state, signal)
            cases[f"{name}, {kind}, not bound"] = _repeated(_unbound(rule), state, signal)
    times = interleaved(cases, rounds)
    micro = {name: 1e6 * statistics.median(seconds) for name, seconds in times.items()}
    return [
        Row(f"{full} transition", micro[full], "us", micro[f"{full}, not bound"], limit)
        for name, (_, limit) in rules.items()
        for full in (f"{name}, clean", f"{name}, overflow")
    ]


def _repeated(step: Transition, state: ScalerState, signal: Signal) -> Case:
    """Seconds of one call, averaged over a short run of calls."""
    calls = range(_CALLS)

    def run() -> float:
        start = time.perf_counter()
        for _ in calls:
            step(state, signal)
        return (time.perf_counter() - start) / _CALLS

    return run


def _unbound(rule: Rule) -> Transition:
    def step(state: ScalerState, signal: Signal) -> ScalerState:
        return transition(rule, state, signal)

    return step
