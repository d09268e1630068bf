"""The demo's training loop in PyTorch, with its measuring of time and memory."""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import polyamp.torch as amp
from polyamp import BackendError, Policy
from polyamp.bench.harness import cpu_name
from polyamp.demo import Device, OnStep, Result, Settings, Task
from polyamp_torch._demo_models import build
from polyamp_torch._modules import check_policy

_LOSS_EVERY = 20  # steps between two looks at the loss where looking means waiting for the GPU
_EVAL_BATCH = 256

Batch = tuple[Tensor, Tensor]  # inputs, targets


def versions() -> dict[str, str]:
    """PyTorch's version."""
    return {"torch": torch.__version__}


def device(requested: str | None) -> Device:
    """`requested` ("cpu", "cuda", "cuda:N"), or by default the GPU if there is one.

    Raises:
        BackendError: no such device.
    """
    name = requested or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        wanted = torch.device(name)
    except RuntimeError:
        wanted = None
    if wanted is not None and wanted == torch.device("cpu"):
        return Device("cpu", f"{cpu_name()}, one thread")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted is not None and wanted.type == "cuda" and (wanted.index or 0) < count:
        index = wanted.index or 0
        return Device(f"cuda:{index}", torch.cuda.get_device_name(index), accelerator=True)
    allowed = ", ".join(["cpu", *(f"cuda:{i}" for i in range(count))])
    raise BackendError(f"torch has no device {name!r} here; choose one of: {allowed}")


def check(policy: Policy, device: Device) -> None:
    """Raise PolicyError where `apply_policy` cannot follow `policy`."""
    check_policy(policy)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for torch's CPU work.

    The models are too small to gain from more; with one, results do not depend on the number
    of cores, and timings hardly on what else the machine does.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def train(task: Task, policy: Policy, settings: Settings, device: str, on_step: OnStep) -> Result:
    """Train `task` under `policy` on `device` and evaluate; see `DemoBackend`."""
    where = torch.device(device)
    if where.type == "cuda":
        gc.collect()  # the run before this one must not count into this one's peak
        torch.cuda.reset_peak_memory_stats(where)
    trainer = _trainer(task, policy, settings, where)
    windows = _windows(task, settings, where)
    saved = None if where.type == "cuda" else _saved_for_backward(trainer, windows[0][0])
    clock = _Clock(where)
    losses: list[Tensor] = []
    for step, window in enumerate(windows, start=1):
        with clock:
            loss, _ = trainer.step(window)
        losses.append(loss)
        look = where.type != "cuda" or step % _LOSS_EVERY == 0 or step == len(windows)
        on_step(step, float(loss) if look else None)
    scaler = trainer.scaler
    return Result(
        step_ms=clock.median_ms(),
        memory_bytes=torch.cuda.max_memory_allocated(where) if saved is None else saved,
        memory_kind="peak memory" if saved is None else "saved for backward",
        metric=trainer.evaluate(_held_out(task)),
        skipped=int(scaler.state.skipped),
        scale=float(scaler.get_scale()) if scaler.is_enabled() else None,
        losses=tuple(torch.stack(losses).tolist()),
    )


def _trainer(task: Task, policy: Policy, settings: Settings, device: torch.device) -> amp.Trainer:
    model = build(task, settings).to(device)
    optimizer, schedule = _optimizer(task, model, settings)
    return amp.Trainer(
        model,
        optimizer,
        cross_entropy,
        policy=policy,
        rule="dynamic" if policy.needs_scaling else None,  # as in the other frameworks
        scheduler=schedule,
        max_norm=settings.max_norm,
        accumulation_steps=settings.accumulate,
        metric=accuracy if task.metric == "accuracy" else bits,
    )


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all targets, nats."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def bits(logits: Tensor, targets: Tensor) -> Tensor:
    """`cross_entropy` in bits."""
    return cross_entropy(logits, targets) / math.log(2)


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """Share of targets that have the largest logit."""
    return (logits.argmax(-1) == targets).double().mean()


def _windows(task: Task, settings: Settings, device: torch.device) -> list[list[Batch]]:
    """One list of micro-batches per optimizer step; the samples are on the device."""
    inputs = torch.from_numpy(task.inputs).to(device)
    targets = torch.from_numpy(task.targets).to(device)
    numbers = torch.from_numpy(task.batches(settings)).to(device)
    return [[(inputs[part], targets[part]) for part in window] for window in numbers]


def _held_out(task: Task) -> Iterator[Batch]:
    for start in range(0, len(task.held_inputs), _EVAL_BATCH):
        part = slice(start, start + _EVAL_BATCH)
        yield torch.from_numpy(task.held_inputs[part]), torch.from_numpy(task.held_targets[part])


def _saved_for_backward(trainer: amp.Trainer, batch: Batch) -> int:
    """Bytes that one forward pass keeps for its backward pass, parameters left out.

    Measured on a copy, since a forward pass moves the statistics of BatchNorm.
    """
    model = copy.deepcopy(trainer.model)
    return saved_bytes(lambda: cross_entropy(*trainer.forward(model, batch)), model)


def saved_bytes(forward: Callable[[], Tensor], model: nn.Module) -> int:
    """Bytes of all storages that autograd keeps between `forward()` and its backward pass.

    Each storage counts once, however many tensors view it; those of `model`'s parameters do
    not count, the copies that autocast makes of them do.
    """
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    del loss
    return sum(storage.nbytes() for storage in kept.values())


def _optimizer(
    task: Task, model: nn.Module, settings: Settings
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    lr = settings.learning_rate
    optimizer: torch.optim.Optimizer
    if task.name == "digits":
        optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=5e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.98))
    warm_up = max(1, settings.steps // 20)

    def factor(step: int) -> float:
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / settings.steps)
        return min(1.0, (step + 1) / warm_up) * cosine

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class _Clock:
    """Times blocks: by wall clock on a CPU, by events (no waiting in between) on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []  # start, end, start, end, ...
        self._marks: list[float] = []  # seconds, likewise

    def _mark(self) -> None:
        if self._device.type == "cuda":
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._events[-1].record(torch.cuda.current_stream(self._device))
        else:
            self._marks.append(time.perf_counter())

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, *error: object) -> None:
        self._mark()

    def median_ms(self) -> float:
        """Median in milliseconds; the first tenth of the blocks is warm-up."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            pairs = zip(self._events[::2], self._events[1::2], strict=True)
            times = [float(start.elapsed_time(end)) for start, end in pairs]
        else:
            marks = zip(self._marks[::2], self._marks[1::2], strict=True)
            times = [1e3 * (end - start) for start, end in marks]
        return statistics.median(times[len(times) // 10 :])
