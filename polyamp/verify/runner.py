"""Start a process for each backend, one after the other, and collect their rows.

Each hands its half-done training to the next, so that one run goes through every framework.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import polyamp
from polyamp._errors import BackendError, closest
from polyamp._registry import _announced
from polyamp.bench.harness import cpu_name, in_fresh_python
from polyamp.testing._conformance import HandOver, Plan, Row

KERAS = ("tensorflow", "jax", "torch")
"""What Keras runs on."""
FRAMEWORKS = ("keras", *KERAS)
"""polyamp's own backends, which are called as the framework they need."""


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
    """Run the workers one after the other.

    Args:
        workers: of `workers`.
        plan: how much is tried.
        tell: is told of each worker in a line, as soon as it is done.
    """
    begin = time.perf_counter()
    found = Verification(plan)
    found.versions = {"polyamp": polyamp.__version__, "python": platform.python_version()}
    given = HandOver(0, {})
    for worker in workers:
        start = time.perf_counter()
        try:
            rows, given = _result(worker, plan, given, found)
        except BackendError as error:
            rows = [Row("start", worker.label, "", "", "", 0, error=_last_words(error))]
        found.rows += rows
        wrong = sum(not row.ok for row in rows)
        steps = sum(row.steps for row in rows)
        verdict = f"{wrong} of {len(rows)} rows differ" if wrong else "all identical"
        took = time.perf_counter() - start
        tell(f"{worker.label}: {steps:,} steps compared, {verdict} ({took:.0f} s)")
    found.seconds = time.perf_counter() - begin
    return found


def _result(
    worker: Worker, plan: Plan, given: HandOver, found: Verification
) -> tuple[list[Row], HandOver]:
    task = {
        "backend": worker.backend,
        "label": worker.label,
        "plan": plan._asdict(),
        "given": given._asdict(),
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "task.json")
        file.write_text(json.dumps(task))
        environment = {"TF_CPP_MIN_LOG_LEVEL": "3", **worker.environment}
        result = in_fresh_python("-m", "polyamp.verify.worker", str(file), env=environment)
    found.versions |= result["versions"]
    found.devices |= {f"{worker.label} {d}": chip for d, chip in result["devices"].items()}
    return [Row.from_dict(row) for row in result["rows"]], HandOver(**result["given"])


def _last_words(error: BackendError) -> str:
    """How the process ended, and its last line, which says most."""
    first, *rest = str(error).strip().splitlines()
    return " ".join([first, *rest[-1:]])[:500]
