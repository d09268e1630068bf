"""The TensorFlow bench: `tensorflow-step`, a GradientTape loop with LossScaler and without."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import polyamp
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
from polyamp_tensorflow._scaler import LossScaler

RATIO_LIMIT = 1.05

WIDTHS = (784, 1024, 1024, 10)
"""Of the perceptron's layers: 1,863,690 parameters."""
BATCHES = (32, 128)
_LR = 1e-5  # parameters stay where they are, near enough

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: tf.keras.optimizers.SGD(_LR),
    "adam": lambda: tf.keras.optimizers.Adam(_LR),
}
MODES = {"graph": False, "xla": True}
KINDS = [f"{name} {mode} {batch}" for name in OPTIMIZERS for mode in MODES for batch in BATCHES]
"""Optimizer, mode and batch size."""


class Problem:
    """A perceptron, a batch and an optimizer, and steps over them with a scaler or without.

    All steps of a comparison share the variables: nothing of a step is left in them but the
    update, and so the same kernels run on the same memory whichever step it is.
    """

    def __init__(self, kind: str, widths: tuple[int, ...] = WIDTHS) -> None:
        optimizer, mode, batch = kind.split()
        tf.keras.utils.set_random_seed(0)
        first, *hidden, classes = widths
        dense = [tf.keras.layers.Dense(width, activation="relu") for width in hidden]
        layers = [tf.keras.Input((first,)), *dense, tf.keras.layers.Dense(classes)]
        self.model = tf.keras.Sequential(layers)
        self.x = tf.random.normal((int(batch), first))
        self.y = tf.random.uniform((int(batch),), maxval=classes, dtype=tf.int32)
        self.loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.optimizer = OPTIMIZERS[optimizer]()
        self.optimizer.build(self.model.trainable_variables)
        self.jit = MODES[mode]

    def step(self, scaler: LossScaler | None) -> Callable[[], tf.Tensor]:
        """One training step as users write it, compiled; gives the loss."""
        variables = self.model.trainable_variables

        @tf.function(jit_compile=self.jit)  # type: ignore[untyped-decorator]
        def train(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = self.loss_fn(y, self.model(x, training=True))
                target = loss if scaler is None else scaler.scale(loss)
            pairs = zip(tape.gradient(target, variables), variables, strict=True)
            if scaler is None:
                self.optimizer.apply_gradients(pairs)
            else:
                scaler.apply(self.optimizer, pairs)
            return loss

        return lambda: train(self.x, self.y)

    def case(self, scaler: LossScaler | None) -> Case:
        """Time a step, the device's work included."""
        step = self.step(scaler)

        def run() -> float:
            start = time.perf_counter()
            step().numpy()
            return time.perf_counter() - start

        return run


def tensorflow_step(quick: bool, tell: Tell) -> Report:
    """Measure each optimizer, in a graph and under XLA, in a process of its own."""
    rounds = 100 if quick else 400
    rows: list[Row] = []
    for kind in KINDS:
        tell(f"tensorflow-step: {kind}, {rounds} rounds of three loops")
        found = in_fresh_python("-m", "polyamp_tensorflow._bench", kind, str(rounds))
        rows += [Row(**row) for row in found]
    versions = {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": tf.keras.__version__,
        "polyamp": polyamp.__version__,
    }
    notes = (
        "A training step of a perceptron of 1.9M parameters in one tf.function; the last number of"
        " a name is the batch size.",
        "ratio: median paired time of the step with LossScaler over the same step without scaling,"
        " divided by the same of a second step without scaling, which is the peer; low and high:"
        " its 95 % interval.",
    )
    device = f"cpu: {cpu_name()}, {os.cpu_count()} cores"
    return Report("tensorflow-step", device, versions, rows, notes)


def measure(kind: str, rounds: int, widths: tuple[int, ...] = WIDTHS) -> list[Row]:
    """Milliseconds and the corrected ratio with its interval, three loops over one problem."""
    problem = Problem(kind, widths)
    scalers = {"plain": None, "plain again": None, "polyamp": LossScaler("keras")}
    cases = {who: problem.case(scaler) for who, scaler in scalers.items()}
    times = interleaved(cases, rounds, warmup=5)
    ours, peer, again = times["polyamp"], times["plain"], times["plain again"]
    found, own = corrected_ratio(ours, peer, again), ratio(again, peer)
    milli = [1e3 * statistics.median(t) for t in (ours, peer)]
    return [
        Row(f"{kind} time", milli[0], "ms", milli[1]),
        Row(f"{kind} ratio", found.value, "ratio", own.value, RATIO_LIMIT),
        Row(f"{kind} ratio, low", found.low, "ratio", own.low),
        Row(f"{kind} ratio, high", found.high, "ratio", own.high),
    ]


def _main(kind: str, rounds: str) -> None:
    keys = ("name", "value", "unit", "peer", "limit")
    rows = measure(kind, int(rounds))
    plain: list[dict[str, Any]] = [{key: getattr(row, key) for key in keys} for row in rows]
    print(json.dumps(plain))


if __name__ == "__main__":
    _main(*sys.argv[1:])
