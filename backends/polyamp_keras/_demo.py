"""The demo in Keras: `compile` and `fit`, on each of Keras' backends in processes of their own.

A process has one Keras backend. So the demo's process starts one for every training, sends it the
task and reads JSON lines: one per optimizer step, then the result. On a terminal `fit` shows its
own progress bar, which comes as text between those lines.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import math
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TextIO, cast

import keras
import numpy as np
from keras import ops

import polyamp.keras as amp
from polyamp import BackendError, Policy, PolicyError
from polyamp.bench.harness import cpu_name, fresh_environment, in_fresh_python
from polyamp.demo import DemoBackend, Device, OnStep, Result, Settings, Task
from polyamp_keras._demo_models import build
from polyamp_keras._dtype_policies import name_of
from polyamp_keras._ops import devices

FRAMEWORKS = ("tensorflow", "jax", "torch")
MEMORY_KIND = "all variables"
_EVAL_BATCH = 256
_CHILD = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


def variants() -> dict[str, DemoBackend]:
    """A demo backend for each installed framework; only KERAS_BACKEND's where that is set."""
    chosen = os.environ.get("KERAS_BACKEND")
    names = [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]
    return {name: OnFramework(name) for name in names if chosen in (None, "", name)}


@dataclass(frozen=True)
class OnFramework:
    """The demo with Keras on `framework`; see `DemoBackend`."""

    framework: str
    draws = True

    def versions(self) -> Mapping[str, str]:
        """Versions of Keras and of the framework under it."""
        packages = metadata.packages_distributions().get(self.framework, [self.framework])
        return {"keras": keras.__version__, self.framework: metadata.version(packages[0])}

    def device(self, requested: str | None) -> Device:
        """`requested` ("cpu", "cuda", "cuda:N"), or by default the first accelerator if any.

        Raises:
            BackendError: no such device, or the framework does not start.
        """
        threads = ", one thread" if self.framework == "torch" else ""
        cpu = Device("cpu", cpu_name() + threads)
        if requested == "cpu":
            return cpu
        arguments = ("-m", "polyamp_keras._demo", "devices")
        known = in_fresh_python(*arguments, env=self._environment())
        kind, _, number = (requested or (known[1:] or known)[0]).partition(":")
        if kind in ("cuda", "gpu") and len(known) > 1:
            kind = known[1].partition(":")[0]
        name = kind if kind == "cpu" else f"{kind}:{number or 0}"
        if name not in known:
            raise BackendError(
                f"keras on {self.framework} has no device {requested!r} here; choose one of:"
                f" {', '.join(known)}"
            )
        if name == "cpu":
            return cpu
        return Device(name, name, accelerator=True)

    def check(self, policy: Policy, device: Device) -> None:
        """Raise PolicyError where the demo's models cannot follow `policy`."""
        name = name_of(policy)
        if policy.param_dtype != "float32":
            raise PolicyError(
                f"the demo's Keras models have float32 variables, and Keras cannot change those of"
                f" a built model to {name}; choose float32, mixed_float16 or mixed_bfloat16"
            )

    def train(
        self,
        task: Task,
        policy: Policy,
        settings: Settings,
        device: str,
        on_step: OnStep,
        terminal: TextIO | None = None,
    ) -> Result:
        """Train in a process of its own; see `DemoBackend`. `fit` draws its bar on `terminal`.

        Raises:
            BackendError: that process failed; what it said is in the message.
        """
        request = pickle.dumps((task, policy, settings, terminal is not None))
        command = [sys.executable, "-P", "-m", "polyamp_keras._demo", "train"]
        environment = fresh_environment(self._environment(device))
        with tempfile.TemporaryFile() as told:
            with subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=told,
                env=environment,
            ) as process:
                try:
                    result = _follow(process, request, on_step, terminal)
                except BaseException:
                    process.kill()
                    raise
            if process.returncode or result is None:
                told.seek(0)
                text = told.read().decode(errors="replace").strip()[-2000:]
                raise BackendError(
                    f"training with Keras on {self.framework} failed (exit status"
                    f" {process.returncode}); it said:\n{text}"
                )
        return result

    def _environment(self, device: str | None = None) -> dict[str, str]:
        environment = {**_CHILD, "KERAS_BACKEND": self.framework}
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = "-1"
            if self.framework == "torch":  # as in the demo of PyTorch alone
                environment["OMP_NUM_THREADS"] = "1"
        elif device is not None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            number = device.partition(":")[2]
            environment["CUDA_VISIBLE_DEVICES"] = (
                visible.split(",")[int(number)] if visible else number
            )
        return environment


def _follow(
    process: subprocess.Popen[bytes], request: bytes, on_step: OnStep, terminal: TextIO | None
) -> Result | None:
    """Send the request, tell of every step and show the bar; the result, None where none came."""
    pipes = process.stdin, process.stdout
    if pipes[0] is None or pipes[1] is None:
        return None
    with suppress(BrokenPipeError), pipes[0] as pipe:
        pipe.write(request)
    for line in pipes[1]:
        found = json.loads(line)
        if isinstance(found, dict):
            return Result(**{**found, "losses": tuple(found["losses"])})
        if isinstance(found, str) and terminal is not None:
            terminal.write(found)
            terminal.flush()
        elif isinstance(found, list):
            on_step(*found)
    return None


# In the training's own process.


class BatchLoss(keras.metrics.Metric):  # type: ignore[misc]
    """The loss of the last batch alone, where Keras logs the mean of the epoch so far.

    After a skipped step it is that of the last one applied, NaN before the first.
    """

    def __init__(self, loss: Any, name: str = "batch_loss") -> None:
        super().__init__(name=name)
        self.loss = loss
        self.last = self.add_weight(shape=(), initializer=_nan, name="last")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Forget the batch before."""
        self.last.assign(self.loss(y_true, y_pred, sample_weight=sample_weight))

    def result(self) -> Any:
        """0-d, nats."""
        return ops.convert_to_tensor(self.last)

    def reset_state(self) -> None:
        """NaN again."""
        self.last.assign(math.nan)


def _nan(shape: Any, dtype: Any = None) -> Any:
    return ops.full(shape, math.nan, dtype=dtype)


class Steps(keras.callbacks.Callback):  # type: ignore[misc]
    """Loss and duration of every optimizer step of `window` batches; tells `on_step` of each."""

    def __init__(self, window: int, on_step: OnStep) -> None:
        super().__init__()
        self.window, self.on_step = window, on_step
        self.losses: list[float] = []
        self.milliseconds: list[float] = []
        self._part: list[float] = []
        self._start = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Start the clock with the first batch of a window."""
        if not self._part:
            self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Read the loss, which waits for the device; stop the clock with the last batch."""
        self._part.append(float(logs["batch_loss"]))
        if len(self._part) == self.window:
            self.milliseconds.append(1e3 * (time.perf_counter() - self._start))
            self.losses.append(statistics.fmean(self._part))
            self._part = []
            self.on_step(len(self.losses), self.losses[-1])


class Schedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """See `Settings.learning_rate`. Keras counts micro-batches, of which a step has several."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __call__(self, count: Any) -> Any:
        """The learning rate after `count` micro-batches."""
        settings = self.settings
        step = ops.cast(count // settings.accumulate, "float32")
        cosine = 0.5 + 0.5 * ops.cos(math.pi * step / settings.steps)
        warm_up = max(1, settings.steps // 20)
        return settings.learning_rate * ops.minimum(1.0, (step + 1.0) / warm_up) * cosine


def optimizer_for(task: Task, settings: Settings) -> keras.optimizers.Optimizer:
    """SGD with momentum for digits, AdamW for text, as in the other frameworks.

    Keras decays weights apart from gradients: ten times the rate is what SGD with momentum 0.9
    makes of a decay within them.
    """
    common = {
        "learning_rate": Schedule(settings),
        "global_clipnorm": settings.max_norm,
        "gradient_accumulation_steps": settings.accumulate if settings.accumulate > 1 else None,
    }
    if task.name == "digits":
        return keras.optimizers.SGD(momentum=0.9, weight_decay=5e-3, **common)
    return keras.optimizers.AdamW(beta_2=0.98, weight_decay=1e-2, **common)


class Screen(io.TextIOBase):
    """A terminal somewhere else: what is written here goes to `show`."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show

    def write(self, text: str) -> int:
        """Pass the text on."""
        self._show(text)
        return len(text)

    def isatty(self) -> bool:
        """Keras moves its bar in place only on a terminal."""
        return True


def train_here(
    task: Task, policy: Policy, settings: Settings, on_step: OnStep, screen: TextIO | None = None
) -> Result:
    """Train with this process' Keras backend and evaluate; see `DemoBackend`.

    The bar of `fit` goes to `screen`; without one there is none.
    """
    model = build(task, settings)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = optimizer_for(task, settings)
    amp.compile(model, optimizer, loss, policy=policy, metrics=[BatchLoss(loss)])
    order = task.batches(settings)
    steps = Steps(settings.accumulate, on_step)
    with nullcontext() if screen is None else redirect_stdout(screen):
        model.fit(
            _narrow(task.inputs)[order.ravel()],
            _narrow(task.targets)[order.ravel()],
            batch_size=order.shape[2],
            shuffle=False,
            verbose=0 if screen is None else 1,
            callbacks=[steps],
        )
    scaled = isinstance(model.optimizer, amp.LossScaleOptimizer)
    state = model.optimizer.state if scaled else None
    return Result(
        step_ms=statistics.median(steps.milliseconds[len(steps.milliseconds) // 10 :]),
        memory_bytes=variable_bytes(model),
        memory_kind=MEMORY_KIND,
        metric=evaluate(task, model),
        skipped=0 if state is None else state.skipped,
        scale=None if state is None else state.loss_scale,
        losses=tuple(steps.losses),
    )


def _narrow(values: Any) -> Any:
    return values.astype("int32") if values.dtype.kind == "i" else values


def variable_bytes(model: keras.Model) -> int:
    """Bytes of the model's and its optimizer's variables."""
    found = {id(v): v for v in (*model.variables, *model.optimizer.variables)}
    return sum(
        math.prod(v.shape) * np.dtype(keras.backend.standardize_dtype(v.dtype)).itemsize
        for v in found.values()
    )


def evaluate(task: Task, model: keras.Model) -> float:
    """`task.metric` on the held-out samples."""
    inputs, targets = _narrow(task.held_inputs), task.held_targets
    logits = model.predict(inputs, batch_size=_EVAL_BATCH, verbose=0).astype(np.float64)
    if task.metric == "accuracy":
        return float((logits.argmax(-1) == targets).mean())
    chosen = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    top = logits.max(-1)
    nats = top + np.log(np.exp(logits - top[..., None]).sum(-1)) - chosen
    return float(nats.mean() / math.log(2))


def _main(what: str) -> None:
    if what == "devices":
        print(json.dumps(devices()))
        return
    out = sys.stdout

    def tell(value: Any) -> None:
        print(json.dumps(value), file=out, flush=True)

    task, policy, settings, shown = pickle.load(sys.stdin.buffer)
    screen = cast(TextIO, Screen(tell)) if shown else None
    with redirect_stdout(sys.stderr):
        result = train_here(task, policy, settings, lambda *step: tell(step), screen)
    tell(dataclasses.asdict(result))


if __name__ == "__main__":
    _main(*sys.argv[1:])
