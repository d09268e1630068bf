"""`polyamp bench keras-step`: `fit` under polyamp's LossScaleOptimizer, Keras' own, none."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import keras
import numpy as np

import polyamp
import polyamp.keras as amp
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

WIDTHS = (784, 1024, 1024, 10)
"""Of the perceptron's layers: 1,863,690 parameters."""
BATCH = 32
STEPS = 20
"""Training steps of one measured `fit`."""
LIMITS = {
    "torch eager": 1.06,
    "tensorflow graph": 1.03,
    "tensorflow jit_compile": 1.06,
    "jax jit": 1.10,
}
"""Largest step time over that without scaling, by Keras backend and mode."""
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(1e-5),  # parameters stay where they are, near enough
    "adam": lambda: keras.optimizers.Adam(1e-5),
}
_JIT = {"eager": False, "graph": False, "jit_compile": True, "jit": True}

Compile = Callable[..., None]
"""`(model, optimizer, loss, jit_compile=)`."""


def _plain(model: Any, optimizer: Any, loss: Any, **kwargs: Any) -> None:
    model.compile(optimizer, loss, auto_scale_loss=False, **kwargs)


def _polyamp(model: Any, optimizer: Any, loss: Any, **kwargs: Any) -> None:
    amp.compile(model, optimizer, loss, rule="keras", **kwargs)


def _keras(model: Any, optimizer: Any, loss: Any, **kwargs: Any) -> None:
    _plain(model, keras.optimizers.LossScaleOptimizer(optimizer), loss, **kwargs)


WAYS: dict[str, Compile] = {
    "plain": _plain,
    "plain again": _plain,
    "polyamp": _polyamp,
    "keras": _keras,
}


class Stopwatch(keras.callbacks.Callback):  # type: ignore[misc]
    """Seconds from the end of the first batch of an epoch to the end of the last."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.last = batches - 1
        self.seconds = math.nan
        self._start = math.nan

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Wait for the device, and read the clock."""
        if batch in (0, self.last):
            float(logs["loss"])
            now = time.perf_counter()
            self._start, self.seconds = (now, math.nan) if batch == 0 else (0.0, now - self._start)


def perceptron(widths: tuple[int, ...] = WIDTHS) -> Any:
    """A model in float32, so that scaling is all that tells the ways apart."""
    keras.utils.set_random_seed(0)
    first, *hidden, classes = widths
    dense = [keras.layers.Dense(width, activation="relu") for width in hidden]
    return keras.Sequential([keras.Input((first,)), *dense, keras.layers.Dense(classes)])


def trained(kind: str, way: str, widths: tuple[int, ...] = WIDTHS) -> tuple[Any, Case]:
    """A compiled model, and a `fit` of it that gives the seconds of `STEPS` steps.

    Args:
        kind: Keras backend (this process'), mode and optimizer, as in "tensorflow graph adam".
        way: one of `WAYS`.
        widths: of the layers.
    """
    _, mode, optimizer = kind.split()
    model = perceptron(widths)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    WAYS[way](model, OPTIMIZERS[optimizer](), loss, jit_compile=_JIT[mode])
    rng = np.random.default_rng(0)
    samples = (STEPS + 1) * BATCH
    x = rng.normal(size=(samples, widths[0])).astype("float32")
    y = rng.integers(widths[-1], size=samples).astype("int32")
    watch = Stopwatch(STEPS + 1)

    def run() -> float:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[watch])
        return watch.seconds

    return model, run


def kinds() -> list[str]:
    """Every Keras backend that is installed, in every mode, with every optimizer."""
    here = [mode for mode in LIMITS if importlib.util.find_spec(mode.split()[0]) is not None]
    return [f"{mode} {optimizer}" for mode in here for optimizer in OPTIMIZERS]


def keras_step(quick: bool, tell: Tell) -> Report:
    """Measure each Keras backend, mode and optimizer in a process of its own."""
    rounds = 15 if quick else 100
    rows: list[Row] = []
    for kind in kinds():
        tell(f"keras-step: {kind}, {rounds} rounds of {len(WAYS)} times {STEPS} steps")
        env = {"KERAS_BACKEND": kind.split()[0], "TF_CPP_MIN_LOG_LEVEL": "3"}
        found = in_fresh_python("-m", "polyamp_keras._bench", kind, str(rounds), env=env)
        rows += [Row(**row) for row in found]
    notes = (
        f"Training steps of a perceptron of 1.9M parameters in fit, batches of {BATCH}, from the"
        f" end of one batch to the end of the {STEPS}th after it.",
        "time: milliseconds a step, with amp.compile; the peer is the same optimizer without"
        " scaling.",
        "ratio: median paired time over the same without scaling, divided by the same of a second"
        " model without scaling; low and high: its 95 % interval. The peer is Keras' own"
        " LossScaleOptimizer, measured likewise.",
        "own ratio: that second model's over the first's, before the division.",
    )
    device = f"cpu: {cpu_name()}, {os.cpu_count()} cores"
    return Report("keras-step", device, versions(), rows, notes)


def versions() -> dict[str, str]:
    """Of everything the numbers depend on."""
    from polyamp_keras._demo import variants

    found = {"python": platform.python_version(), "polyamp": polyamp.__version__}
    for variant in variants().values():
        found.update(variant.versions())
    return found


def measure(kind: str, rounds: int, widths: tuple[int, ...] = WIDTHS) -> list[Row]:
    """Milliseconds and corrected ratios with their intervals, four models side by side."""
    cases = {way: trained(kind, way, widths)[1] for way in WAYS}
    times = interleaved(cases, rounds)
    plain, again = times["plain"], times["plain again"]
    ours = corrected_ratio(times["polyamp"], plain, again)
    theirs = corrected_ratio(times["keras"], plain, again)
    milli = [1e3 * statistics.median(t) / STEPS for t in (times["polyamp"], plain)]
    limit = LIMITS[kind.rpartition(" ")[0]]
    return [
        Row(f"{kind} time", milli[0], "ms", milli[1]),
        Row(f"{kind} ratio", ours.value, "ratio", theirs.value, limit),
        Row(f"{kind} ratio, low", ours.low, "ratio", theirs.low),
        Row(f"{kind} ratio, high", ours.high, "ratio", theirs.high),
        Row(f"{kind} own ratio", ratio(again, plain).value, "ratio"),
    ]


def _main(kind: str, rounds: str) -> None:
    rows = measure(kind, int(rounds))
    print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
