"""What a demo run is told and what it reports: plain values that every framework shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from polyamp._policy import Policy
    from polyamp.demo.data import Task

TASKS = ("digits", "text")
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")

OnStep = Callable[[int, float | None], None]
"""Called after training step 1, 2, ... with the loss, or None where reading it costs a sync."""


@dataclass(frozen=True)
class Settings:
    """Size of the model and length of the training, the same for every policy and framework.

    Attributes:
        steps: optimizer steps.
        batch: samples per optimizer step, a multiple of `accumulate`.
        learning_rate: peak of the schedule (linear warm-up over a twentieth of the steps, then
            half a cosine down to 0). Skipped steps do not advance it.
        width: channels of the first stage (digits) or size of the residual stream (text).
        depth: residual blocks per stage (digits) or transformer layers (text).
        heads: attention heads (text).
        context: characters per sample (text).
        accumulate: micro-batches per optimizer step.
        max_norm: gradients are clipped to this 2-norm; None leaves them alone.
        seed: of the initial weights and of the order of the samples, 0 to 2**32 - 1.
    """

    steps: int
    batch: int
    learning_rate: float
    width: int
    depth: int
    heads: int = 1
    context: int = 0
    accumulate: int = 1
    max_norm: float | None = None
    seed: int = 0


_DIGITS = Settings(steps=400, batch=32, learning_rate=0.1, width=16, depth=1)
_TEXT = Settings(
    steps=600, batch=32, learning_rate=5e-3, width=48, depth=2, heads=4, context=32,
    accumulate=2, max_norm=1.0,
)  # fmt: skip
_SIZES = {
    ("digits", "cpu"): _DIGITS,
    ("text", "cpu"): _TEXT,
    ("digits", "cpu quick"): replace(_DIGITS, steps=120, width=8),
    ("text", "cpu quick"): replace(_TEXT, steps=240, width=32, depth=1),
    # wide enough that the arithmetic, not the launch of kernels, takes the time
    ("digits", "accelerator"): replace(_DIGITS, steps=270, width=64, depth=2, batch=256),
    ("text", "accelerator"): replace(
        _TEXT, steps=300, batch=64, learning_rate=1e-3, width=384, depth=4, heads=6, context=256
    ),
    ("digits", "accelerator quick"): replace(_DIGITS, steps=120, width=64, batch=256),
    ("text", "accelerator quick"): replace(
        _TEXT, steps=100, learning_rate=1e-3, width=384, heads=6, context=256
    ),
}


def settings_for(task: str, *, quick: bool, accelerator: bool, seed: int = 0) -> Settings:
    """The sizes for `task`: for two CPU cores, or larger ones for an accelerator."""
    size = ("accelerator" if accelerator else "cpu") + (" quick" if quick else "")
    return replace(_SIZES[task, size], seed=seed)


@dataclass(frozen=True)
class Device:
    """Where a framework trains.

    Attributes:
        name: the framework's own name for it, such as "cpu" or "cuda:0".
        label: for people, such as the name of the GPU.
        accelerator: True for anything but a CPU.
    """

    name: str
    label: str
    accelerator: bool = False


@dataclass(frozen=True)
class Result:
    """What one training run came to.

    Attributes:
        step_ms: median time of one optimizer step, milliseconds.
        memory_bytes: see `memory_kind`.
        memory_kind: what was measured, as a column header: "peak memory", "saved for backward",
            "step temporaries" or "all variables".
        metric: on the held-out samples, in the unit of `Task.metric`.
        skipped: optimizer steps not applied because a gradient was not finite.
        scale: the loss scale after the last step; None where scaling was off.
        losses: training loss of every optimizer step (nats).
    """

    step_ms: float
    memory_bytes: int
    memory_kind: str
    metric: float
    skipped: int
    scale: float | None
    losses: tuple[float, ...]


class DemoBackend(Protocol):
    """What the module `<backend>._demo` has to offer; functions of a module will do.

    Or it has a function `variants()`, which gives several such objects by label. One with a true
    attribute `draws` shows its framework's own progress bar: where there is a terminal, `train`
    gets it as the keyword `terminal`, a text stream that nothing else writes to meanwhile.
    """

    def versions(self) -> Mapping[str, str]:
        """Name and version of every package whose speed or numerics the results depend on."""

    def device(self, requested: str | None) -> Device:
        """The device asked for, or the fastest there is; BackendError where there is none."""

    def check(self, policy: Policy, device: Device) -> None:
        """Raise PolicyError or BackendError where `train` could not follow `policy`."""

    def train(
        self, task: Task, policy: Policy, settings: Settings, device: str, on_step: OnStep
    ) -> Result:
        """Train from the weights of `settings.seed` on `task.batches(settings)` and evaluate."""
