"""Run every chosen task under every policy in every framework, and compare with float32."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from polyamp._errors import BackendError, PolyampError, SkippedStepWarning, closest
from polyamp.demo.data import Task, load
from polyamp.demo.settings import TASKS, DemoBackend, Device, Result, Settings, settings_for

if TYPE_CHECKING:
    from polyamp._policy import Policy
    from polyamp.demo.progress import Progress


@dataclass(frozen=True)
class Run:
    """One training run to be done."""

    framework: str
    backend: DemoBackend
    device: Device
    task: Task
    settings: Settings
    policy_name: str
    policy: Policy

    @property
    def name(self) -> str:
        """Framework, task and policy, for people."""
        return f"{self.framework} {self.task.name} {self.policy_name}"


@dataclass(frozen=True)
class Row:
    """One line of the table: a run, its result, and how it compares with float32.

    Attributes:
        run: what was run.
        result: what came of it.
        speedup: float32's time per step over this one's; None without a float32 run.
        metric_diff: this metric minus float32's; None without a float32 run.
        seconds: duration of the whole run, evaluation and measuring included.
    """

    run: Run
    result: Result
    speedup: float | None
    metric_diff: float | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The row for JSON: plain values, None in the place of what is not finite."""
        run, result = self.run, self.result
        values = {
            "framework": run.framework,
            "device": run.device.name,
            "task": run.task.name,
            "policy": run.policy_name,
            "step_ms": result.step_ms,
            "speedup": self.speedup,
            "memory_bytes": result.memory_bytes,
            "memory_kind": result.memory_kind,
            "metric": result.metric,
            "metric_name": run.task.metric,
            "metric_diff": self.metric_diff,
            "baseline": run.task.baseline,
            "baseline_name": run.task.baseline_name,
            "skipped": result.skipped,
            "scale": result.scale,
            "steps": run.settings.steps,
            "first_loss": result.losses[0],
            "last_loss": result.losses[-1],
            "seconds": self.seconds,
        }
        return {key: _finite(value) for key, value in values.items()}


def _finite(value: object) -> object:
    return None if isinstance(value, float) and value - value != 0 else value


def demo_backends(chosen: Sequence[str] = ()) -> dict[str, DemoBackend]:
    """The demo modules of the installed backends, or of the `chosen` ones, by name.

    A module with a function `variants` stands for the demo backends that it gives by label; they
    are named as in "keras (jax)".

    Raises:
        BackendError: a chosen backend is unknown, not installed, or has no demo; or there is none.
    """
    import polyamp

    if chosen:
        modules = {name: cast(ModuleType, polyamp.backend(name)) for name in chosen}
    else:
        modules = polyamp.backends()
    found: dict[str, DemoBackend] = {}
    for name, module in modules.items():
        demo = f"{module.__name__}._demo"
        try:
            offered = importlib.import_module(demo)
        except ModuleNotFoundError as error:
            if error.name != demo:
                raise
            if chosen:
                raise BackendError(f"backend {name!r} has no demo (no module {demo})") from error
            continue
        if hasattr(offered, "variants"):
            found |= {f"{name} ({label})": one for label, one in offered.variants().items()}
        else:
            found[name] = cast(DemoBackend, offered)
    if not found:
        raise BackendError(
            'no framework to run the demo in; install one, for example pip install "polyamp[torch]"'
        )
    return found


def plan(
    backends: Mapping[str, DemoBackend],
    policies: Iterable[str],
    tasks: Iterable[str],
    *,
    quick: bool = False,
    seed: int = 0,
    device: str | None = None,
) -> list[Run]:
    """Every run to be done, all of them checked before the first one starts.

    Raises:
        PolyampError: a task, a policy, the seed or the device is not valid.
    """
    names = _known_tasks(tasks)
    if not 0 <= seed < 2**32:
        raise PolyampError(f"the seed must be from 0 to 4294967295, got {seed}")
    parsed = _parsed(policies)
    runs = []
    for framework, backend in backends.items():
        where = backend.device(device)
        for policy in parsed.values():
            backend.check(policy, where)
        for task in names:
            settings = settings_for(task, quick=quick, accelerator=where.accelerator, seed=seed)
            data = load(task, settings.context)
            runs += [
                Run(framework, backend, where, data, settings, name, policy)
                for name, policy in parsed.items()
            ]
    return runs


def _known_tasks(tasks: Iterable[str]) -> list[str]:
    names = list(dict.fromkeys(tasks))
    for name in names:
        if name not in TASKS:
            near = closest(name, TASKS)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise PolyampError(f"no task {name!r}: choose from {', '.join(TASKS)}{hint}")
    return names


def _parsed(policies: Iterable[str]) -> dict[str, Policy]:
    """Policies by the name they were given, float32 first; the second of two equal ones goes."""
    from polyamp._policy import Policy

    parsed: dict[str, Policy] = {}
    for name in policies:
        policy = Policy.parse(name)
        if policy not in parsed.values():
            parsed[name] = policy
    return dict(sorted(parsed.items(), key=lambda item: not is_float32(item[1])))


def is_float32(policy: Policy) -> bool:
    """Whether `policy` is the one that the others are compared with."""
    return policy.param_dtype == policy.compute_dtype == "float32"


def execute(runs: Iterable[Run], progress: Progress) -> Iterator[Row]:
    """Do the runs in order; each row is there as soon as its run is over."""
    reference: dict[tuple[str, str], Result] = {}
    for run in runs:
        own = {} if progress.terminal is None else {"terminal": progress.terminal}
        drawn = bool(own) and getattr(run.backend, "draws", False)
        progress.begin(run.name, run.settings.steps, drawn)
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SkippedStepWarning)  # the table tells
            train: Any = run.backend.train
            result = train(
                run.task,
                run.policy,
                run.settings,
                run.device.name,
                progress.step,
                **(own if drawn else {}),
            )
        seconds = time.perf_counter() - start
        key = (run.framework, run.task.name)
        if is_float32(run.policy):
            reference.setdefault(key, result)
        base = reference.get(key)
        row = Row(
            run=run,
            result=result,
            speedup=base.step_ms / result.step_ms if base else None,
            metric_diff=result.metric - base.metric if base else None,
            seconds=seconds,
        )
        progress.end(summary(row))
        yield row


def summary(row: Row) -> str:
    """What came of a run, in one line."""
    from polyamp.demo.table import metric_text

    result = row.result
    return (
        f"loss {result.losses[0]:.3f} -> {result.losses[-1]:.3f}, held-out "
        f"{metric_text(row.run.task, result.metric)}, {row.seconds:.1f} s"
    )


def versions(backends: Mapping[str, DemoBackend]) -> dict[str, str]:
    """Versions of polyamp, Python, numpy and of what the backends name."""
    import platform

    import numpy as np

    import polyamp

    found = {
        "polyamp": polyamp.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    for backend in backends.values():
        found.update(backend.versions())
    return found
