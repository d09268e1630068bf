"""`polyamp bench keras-selector`: `fit` with Adaptive beside the same without.

Fifty steps are timed, one of which has statistics. All compute under the same policy.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
from dataclasses import asdict

import keras
import numpy as np

from polyamp._selection import Capabilities
from polyamp.bench.harness import (
    Case,
    Tell,
    corrected_ratio,
    cpu_name,
    in_fresh_python,
    interleaved,
    ratio,
)
from polyamp.bench.report import Report, Row
from polyamp_keras._adaptive import Adaptive
from polyamp_keras._bench import WIDTHS, Stopwatch, perceptron, versions

LIMIT = 1.02
"""Largest time over that without statistics."""
SIZE, EVERY = 128, 50
_JIT = {
    "torch eager": False,
    "tensorflow graph": False,
    "tensorflow jit_compile": True,
    "jax jit": True,
}


def case(kind: str, every: int | None, widths: tuple[int, ...] = WIDTHS) -> Case:
    """A `fit` that gives the seconds of `EVERY` steps.

    Args:
        kind: Keras backend (this process') and mode.
        every: of `Adaptive`; None: without it.
        widths: of the layers.
    """
    model = perceptron(widths)
    adaptive = Adaptive(model, capabilities=Capabilities(frozenset()), every=every or 1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-5), loss, jit_compile=_JIT[kind], auto_scale_loss=False)
    rng = np.random.default_rng(0)
    x = rng.normal(size=((EVERY + 1) * SIZE, widths[0])).astype("float32")
    y = rng.integers(widths[-1], size=len(x)).astype("int32")
    watch = Stopwatch(EVERY + 1)
    callbacks = [watch] if every is None else [watch, adaptive]

    def run() -> float:
        adaptive.steps += -adaptive.steps % EVERY  # the first batch, not timed, is measured too
        model.fit(x, y, batch_size=SIZE, shuffle=False, verbose=0, callbacks=callbacks)
        return watch.seconds

    return run


def kinds() -> list[str]:
    """Every Keras backend that is installed, in every mode."""
    return [kind for kind in _JIT if importlib.util.find_spec(kind.split()[0]) is not None]


def keras_selector(quick: bool, tell: Tell) -> Report:
    """Measure each Keras backend and mode in a process of its own."""
    rounds = 10 if quick else 60
    rows: list[Row] = []
    for kind in kinds():
        tell(f"keras-selector: {kind}, {rounds} rounds of 4 times {EVERY} steps")
        env = {"KERAS_BACKEND": kind.split()[0], "TF_CPP_MIN_LOG_LEVEL": "3"}
        found = in_fresh_python("-m", "polyamp_keras._bench_selector", kind, str(rounds), env=env)
        rows += [Row(**row) for row in found]
    notes = [
        f"A perceptron of 1.9M parameters in float32 in fit, batches of {SIZE}; statistics in one"
        f" of {EVERY} steps; peer: the same policy without Adaptive, corrected by its ratio to"
        " itself.",
    ]
    device = f"cpu: {cpu_name()}, {os.cpu_count()} cores"
    return Report("keras-selector", device, versions(), rows, notes)


def measure(kind: str, rounds: int, widths: tuple[int, ...] = WIDTHS) -> list[Row]:
    """The ratio with its interval, and what a step with statistics takes."""
    every: dict[str, int | None] = {"ours": EVERY, "plain": None, "again": None}
    cases = {label: case(kind, number, widths) for label, number in every.items()}
    times = interleaved(cases, rounds)
    found = corrected_ratio(times["ours"], times["plain"], times["again"])
    own = ratio(times["again"], times["plain"])
    milli = [1e3 * statistics.median(times[name]) / EVERY for name in ("ours", "plain")]
    return [
        Row(f"{kind}, step", milli[0], "ms", milli[1]),
        Row(f"{kind}, ratio", found.value, "ratio", own.value, LIMIT),
        Row(f"{kind}, ratio, low", found.low, "ratio", own.low),
        Row(f"{kind}, ratio, high", found.high, "ratio", own.high),
        Row(f"{kind}, a step with statistics", 1 + EVERY * (found.value - 1), "ratio", 1.0),
    ]


def _main(kind: str, rounds: str) -> None:
    print(json.dumps([asdict(row) for row in measure(kind, int(rounds))]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
