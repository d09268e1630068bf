"""The demo's training loop in PyTorch, with its measuring of time and memory."""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import polyamp.torch as amp
from polyamp import BackendError, Policy
from polyamp._policy import require_supported
from polyamp.bench.harness import cpu_name
from polyamp.demo import Device, OnStep, Result, Settings, Task
from polyamp_torch._cast import cast, dtype_of
from polyamp_torch._demo_models import build

_LOSS_EVERY = 20  # steps between two looks at the loss where looking means waiting for the GPU
_EVAL_BATCH = 256


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
    """Raise PolicyError where the loop below cannot follow `policy`.

    It can where parameters are float32 and autocast does the rest, and where everything is in
    one of the formats that need no loss scaling.
    """
    mixed = policy.param_dtype == "float32"
    require_supported(
        policy,
        "torch demo",
        param=("float32", "bfloat16", "float64"),
        compute=("float32", "float16", "bfloat16") if mixed else (policy.param_dtype,),
    )


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
    run = _Run.start(task, policy, settings, torch.device(device))
    batches = torch.from_numpy(task.batches(settings)).to(run.device)
    saved = None if run.on_gpu else run.saved_for_backward(batches[0, 0])
    optimizer, schedule = _optimizer(task, run.model, settings)
    scaler = amp.GradScaler(run.device.type, policy=policy)
    clock = _Clock(run.device)
    losses: list[Tensor] = []
    for step, batch in enumerate(batches, start=1):
        with clock:
            loss = torch.zeros((), device=run.device)
            for samples in batch:
                part = run.loss(run.model, samples) / settings.accumulate
                scaler.scale(part).backward()
                loss += part.detach()
            if settings.max_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(run.model.parameters(), settings.max_norm)
            scaler.step(optimizer)
            scaler.update()
            amp.lr_step(schedule, scaler)
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss)
        look = not run.on_gpu or step % _LOSS_EVERY == 0 or step == len(batches)
        on_step(step, float(loss) if look else None)
    return Result(
        step_ms=clock.median_ms(),
        memory_bytes=torch.cuda.max_memory_allocated(run.device) if saved is None else saved,
        memory_kind="peak memory" if saved is None else "saved for backward",
        metric=run.evaluate(task),
        skipped=int(scaler.state.skipped),
        scale=float(scaler.get_scale()) if scaler.is_enabled() else None,
        losses=tuple(torch.stack(losses).tolist()),
    )


@dataclass(frozen=True)
class _Run:
    """A model and its training data on one device, under one policy."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    policy: Policy
    device: torch.device

    @classmethod
    def start(cls, task: Task, policy: Policy, settings: Settings, device: torch.device) -> _Run:
        if device.type == "cuda":
            gc.collect()  # the run before this one must not count into this one's peak
            torch.cuda.reset_peak_memory_stats(device)
        model = build(task, settings).to(device, dtype_of(policy.param_dtype))
        inputs = torch.from_numpy(task.inputs).to(device)
        return cls(model, inputs, torch.from_numpy(task.targets).to(device), policy, device)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """(..., classes) in float32, computed as the policy says."""
        out: Tensor
        if self.policy.param_dtype == "float32":
            with amp.autocast(self.policy, device_type=self.device.type):
                out = model(inputs)
        else:
            out = model(cast(inputs, self.policy.param_dtype))
        return out.float()

    def loss(self, model: nn.Module, samples: Tensor) -> Tensor:
        """Mean cross-entropy (nats, float32) of the training samples numbered `samples`."""
        logits = self.logits(model, self.inputs[samples])
        return F.cross_entropy(logits.flatten(0, -2), self.targets[samples].flatten())

    def saved_for_backward(self, samples: Tensor) -> int:
        """Bytes that one forward pass keeps for its backward pass, parameters left out.

        Measured on a copy, since a forward pass moves the statistics of BatchNorm.
        """
        model = copy.deepcopy(self.model)
        return saved_bytes(lambda: self.loss(model, samples), model)

    @torch.no_grad()
    def evaluate(self, task: Task) -> float:
        """`task.metric` on the held-out samples."""
        self.model.eval()
        correct, nats = 0, 0.0
        for start in range(0, len(task.held_inputs), _EVAL_BATCH):
            part = slice(start, start + _EVAL_BATCH)
            inputs = torch.from_numpy(task.held_inputs[part]).to(self.device)
            logits = self.logits(self.model, inputs).flatten(0, -2)
            targets = torch.from_numpy(task.held_targets[part]).to(self.device).flatten()
            correct += int((logits.argmax(-1) == targets).sum())
            nats += float(F.cross_entropy(logits.double(), targets, reduction="sum"))
        count = task.held_targets.size
        return correct / count if task.metric == "accuracy" else nats / count / math.log(2)


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
