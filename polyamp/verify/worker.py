"""One backend's part of `polyamp verify`, in a process of its own.

    python -m polyamp.verify.worker FILE     # {"backend", "label", "plan"}

Reads from stdin, as late as it can, what the backend before it hands over. Prints {"rows", "given",
"versions", "devices"} as JSON, and nothing else on stdout.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polyamp
from polyamp.testing._conformance import HandOver, Plan, Row, Subject, conformance, take_over

_PACKAGES = {
    "torch": ("torch",),
    "jax": ("jax", "jaxlib", "flax", "optax"),
    "tensorflow": ("tensorflow", "keras"),
    "keras": ("keras",),
}


def work(task: dict[str, Any], given: Callable[[], HandOver]) -> dict[str, Any]:
    """What the backend makes of a task; `given` may have to wait."""
    backend = polyamp.backend(task["backend"])
    plan = Plan(**task["plan"])
    devices = list(backend.devices())
    subjects = [Subject(backend, task["label"], device) for device in devices]
    rows: list[Row] = []
    for subject in subjects:
        rows += conformance(subject, plan)
    before = after = given()
    for subject in subjects:
        taken, after = take_over(subject, plan, before)
        rows += taken
    return {
        "rows": [row.to_dict() for row in rows],
        "given": after._asdict(),
        "versions": _versions(task["backend"], task["label"]),
        "devices": {device: _described(task["backend"], device) for device in devices},
    }


def _versions(backend: str, label: str) -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    names = [*_PACKAGES.get(backend, ()), label.partition("(")[2].rstrip(")")]
    found = {}
    for name in filter(None, names):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # such as tensorflow from tensorflow-cpu
            module = sys.modules.get(name)
            found[name] = str(getattr(module, "__version__", "unknown"))
    return found


def _described(backend: str, device: str) -> str:
    """The model of an accelerator, where torch or JAX knows it; else the device's name."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and device.startswith("cuda") and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(0))
    if jax is not None and not device.lower().startswith("cpu"):
        return str(jax.devices()[0].device_kind)
    return device


@contextmanager
def _stdout_to_stderr() -> Iterator[int]:
    """What anything prints meanwhile goes to stderr; gives the real stdout."""
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    try:
        yield real
    finally:
        sys.stdout.flush()
        os.dup2(real, 1)
        os.close(real)


def main(file: str) -> int:
    """Read the task, do it, print the result."""
    warnings.simplefilter("ignore")
    with _stdout_to_stderr():
        task = json.loads(Path(file).read_text())
        result = work(task, lambda: HandOver(**json.loads(sys.stdin.read())))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
