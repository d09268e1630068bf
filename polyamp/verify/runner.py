"""Start a process for each backend, two at a time, and collect their rows.

Each hands its half-done training to the next, so that one run goes through every framework; a
process that is done with the rest waits for it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import polyamp
from polyamp._errors import BackendError, closest
from polyamp._registry import _announced
from polyamp.bench.harness import cpu_name, in_fresh_python, kill_running
from polyamp.testing._conformance import HandOver, Plan, Row

KERAS = ("tensorflow", "jax", "torch")
"""What Keras runs on."""
FRAMEWORKS = ("keras", *KERAS)
"""polyamp's own backends, which are called as the framework they need."""
AT_ONCE = 2
"""Processes that run side by side; most of a process' time is one thread's."""
SHARED = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true",
}
"""Environment of every process; two at a time share an accelerator's memory."""


class Worker(NamedTuple):
    """A process to be."""

    backend: str
    label: str
    """For people: "torch", "keras (jax)"."""
    environment: dict[str, str]


@dataclass
class Verification:
    """What one run of the command found."""

    plan: Plan
    rows: list[Row] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    """The chip of each "backend device"."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether something was compared, and all of it was identical."""
        return bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def machine(self) -> str:
        """The processor, and the accelerators that were seen."""
        chips = [chip for chip in self.devices.values() if not chip.lower().startswith("cpu")]
        return ", ".join(dict.fromkeys([cpu_name(), *chips]))

    def to_dict(self) -> dict[str, Any]:
        """The verification as plain values."""
        return {
            "verify": "quick" if self.plan.quick else "full",
            "random": self.plan.steps,
            "seed": self.plan.seed,
            "machine": self.machine,
            "devices": self.devices,
            "versions": self.versions,
            "seconds": round(self.seconds, 1),
            "steps": sum(row.steps for row in self.rows),
            "differences": sum(not row.ok for row in self.rows),
            "rows": [row.to_dict() for row in self.rows],
            "ok": self.ok,
        }

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(self.to_dict(), indent=2)


def workers(chosen: Sequence[str] | None = None) -> list[Worker]:
    """The processes for the `chosen` backends, or for every one that is installed.

    Raises:
        BackendError: a chosen backend is not known, or there is none at all.
    """
    known = list(_announced())
    for name in chosen or ():
        if name not in known:
            near = closest(name, known)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise BackendError(f"no backend {name!r}: found {', '.join(known) or 'none'}{hint}")
    names = list(dict.fromkeys(chosen or known))
    found = [worker for name in names for worker in _workers_of(name, asked=bool(chosen))]
    if not found:
        raise BackendError(
            'no framework to verify; install one, as in pip install "polyamp[torch]"'
        )
    return found


def _workers_of(name: str, *, asked: bool) -> list[Worker]:
    if name in FRAMEWORKS and importlib.util.find_spec(name) is None:
        if asked:
            raise BackendError(
                f"backend {name!r} needs {name}, which is not installed: pip install"
                f" 'polyamp[{name}]'"
            )
        return []
    if name != "keras":
        environment = {"KERAS_BACKEND": "tensorflow"} if name == "tensorflow" else {}
        return [Worker(name, name, environment)]
    wanted = os.environ.get("KERAS_BACKEND")
    frameworks = [f for f in KERAS if importlib.util.find_spec(f) and wanted in (None, f)]
    return [Worker(name, f"keras ({f})", {"KERAS_BACKEND": f}) for f in frameworks]


def verify(
    workers: Sequence[Worker], plan: Plan, tell: Callable[[str], None] = lambda text: None
) -> Verification:
    """Run the workers, two at a time.

    Args:
        workers: of `workers`.
        plan: how much is tried.
        tell: is told of each worker in a line, in their order, as soon as it is done.
    """
    begin = time.perf_counter()
    found = Verification(plan)
    found.versions = {"polyamp": polyamp.__version__, "python": platform.python_version()}
    pool = ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1))
    results: list[Future[_Result]] = []
    try:
        for worker in workers:
            results.append(pool.submit(_result, worker, plan, results[-1] if results else None))
        for worker, future in zip(workers, results, strict=True):
            result = future.result()
            found.rows += result.rows
            found.versions |= result.versions
            found.devices |= {f"{worker.label} {d}": chip for d, chip in result.devices.items()}
            tell(_summary(worker, result))
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        kill_running()
        while not all(future.done() for future in results):
            time.sleep(0.02)
            kill_running()  # one that was only starting
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    found.seconds = time.perf_counter() - begin
    return found


class _Result(NamedTuple):
    """What one process gave."""

    rows: list[Row]
    given: HandOver
    seconds: float
    versions: dict[str, str]
    devices: dict[str, str]


def _result(worker: Worker, plan: Plan, before: Future[_Result] | None) -> _Result:
    start = time.perf_counter()

    def given() -> HandOver:
        return before.result().given if before else HandOver(0, {})

    task = {"backend": worker.backend, "label": worker.label, "plan": plan._asdict()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "task.json")
        file.write_text(json.dumps(task))
        try:
            result = in_fresh_python(
                *("-m", "polyamp.verify.worker", str(file)),
                env={**SHARED, **worker.environment},
                feed=lambda: json.dumps(given()._asdict()),
            )
        except BackendError as error:
            rows = [Row("start", worker.label, "", "", "", 0, error=_last_words(error))]
            return _Result(rows, given(), time.perf_counter() - start, {}, {})
    rows = [Row.from_dict(row) for row in result["rows"]]
    handed = HandOver(**result["given"])
    seconds = time.perf_counter() - start
    return _Result(rows, handed, seconds, result["versions"], result["devices"])


def _summary(worker: Worker, result: _Result) -> str:
    wrong = sum(not row.ok for row in result.rows)
    steps = sum(row.steps for row in result.rows)
    verdict = f"{wrong} of {len(result.rows)} rows differ" if wrong else "all identical"
    return f"{worker.label}: {steps:,} steps compared, {verdict} ({result.seconds:.0f} s)"


def _last_words(error: BackendError) -> str:
    """How the process ended, and its last line, which says most."""
    first, *rest = str(error).strip().splitlines()
    return " ".join([first, *rest[-1:]])[:500]
