"""The core's own bench: how long importing it takes, and one transition on Python numbers."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import polyamp
from polyamp._scaling import Change, Rule, Transition, bind, head, transition
from polyamp._state import Reason, ScalerState, Signal
from polyamp._xp import Namespace, host
from polyamp.bench.harness import Case, Tell, cpu_name, in_fresh_python, interleaved
from polyamp.bench.report import Report, Row

IMPORT_LIMIT_MS = 60.0
DYNAMIC_LIMIT_US = 10.0
FIVE_LIMIT_US = 20.0

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
    """Median duration of one transition: `Dynamic` and five memory values, clean and overflow."""
    rules: dict[str, tuple[Rule, float]] = {
        "Dynamic": (polyamp.Dynamic(), DYNAMIC_LIMIT_US),
        "five memory values": (FiveMemory(), FIVE_LIMIT_US),
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


@dataclass(frozen=True)
class FiveMemory(Rule):
    """A stand-in as large as a predictive rule: five int32 values of memory, integers throughout.

        on overflow:  miss = min(miss + 1, 4), margin = min(margin + 2 bits, 12 bits)
        else:         level follows log2 of the gradients' amax (fast up, slow down),
                      margin shrinks a little, miss = 0, seen = 1
        exponent = clamp(15 bits - margin - level, -24 .. 100), scale = 2**exponent

    Levels are in 2**-16 bits. It is there to be timed, not to train with.
    """

    init_scale: float = 2.0**12
    min_scale: float = 2.0**-24
    max_scale: float = 2.0**100
    max_skips_in_a_row: int | None = None

    def init(self, xp: Namespace = host) -> ScalerState:
        """The state before the first step, in the framework of `xp`."""
        return head(self, xp, clean=0, left=1, memory=(12, 0, 2 << 16, 0, 0))

    def bind_change(self, xp: Namespace) -> Callable[[ScalerState, Any, Signal], Change]:
        """The rule's function with its constants prepared."""
        where, c, low_of, high_of = xp.where, xp.c, xp.minimum, xp.maximum
        zero, one, three, four = (c(n, "i32") for n in (0, 1, 3, 4))
        bits7, bits16, bits23, bias = (c(n, "i32") for n in (7, 16, 23, 127))
        charge, widest, shrink = (c(n, "i32") for n in (2 << 16, 12 << 16, 164))
        room, lowest, highest = c(15 << 16, "i32"), c(-24, "i32"), c(100, "i32")
        ok, overflow = c(Reason.CLEAN, "i32"), c(Reason.OVERFLOW, "i32")

        def change(state: ScalerState, good: Any, signal: Signal) -> Change:
            exponent, level, margin, miss, seen = state.memory
            shift = xp.left_shift(exponent, bits16)
            measured = xp.right_shift(xp.bits(signal.amax), bits7) - xp.left_shift(bias, bits16)
            guessed = room - shift + xp.left_shift(one, miss + bits16)
            latest = where(good, measured - shift, guessed)
            slow = level - xp.right_shift(level - latest, three)
            level = where(latest > level, latest, slow)
            charged, relaxed = low_of(margin + charge, widest), high_of(margin - shrink, zero)
            margin = where(good, relaxed, charged)
            miss = where(good, zero, low_of(miss + one, four))
            wanted = xp.right_shift(room - margin - level, bits16)
            exponent = low_of(high_of(wanted, lowest), highest)
            scale = xp.from_bits(xp.left_shift(exponent + bias, bits23))
            memory = (exponent, level, margin, miss, where(good, one, seen))
            clean = where(good, state.clean + one, zero)
            return Change(scale, clean, state.left, where(good, ok, overflow), zero, memory)

        return change
