"""Train real models on real data in float32, float16 and bfloat16, and compare.

A small ResNet on handwritten digits and a character transformer on Python's own help texts, with
the same initial weights and the same batches under every policy. A framework takes part with a
module `<backend>._demo` that offers what `DemoBackend` says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyamp._errors import PolyampError
from polyamp.demo.data import EXTRA
from polyamp.demo.data import Task as Task
from polyamp.demo.settings import POLICIES, TASKS
from polyamp.demo.settings import DemoBackend as DemoBackend
from polyamp.demo.settings import Device as Device
from polyamp.demo.settings import OnStep as OnStep
from polyamp.demo.settings import Result as Result
from polyamp.demo.settings import Settings as Settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from polyamp.demo.runner import Row

__all__ = ["DemoBackend", "Device", "OnStep", "Result", "Settings", "Task", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to `parser`."""
    parser.add_argument(
        "--quick", action="store_true", help="smaller and shorter: under a minute on two CPU cores"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    parser.add_argument(
        "--framework",
        action="append",
        metavar="NAME",
        help="such as torch; may be repeated (default: every one that is installed)",
    )
    parser.add_argument(
        "--policy",
        action="append",
        metavar="POLICY",
        help="any policy string, such as bf16-mixed or params=float32,compute=float16; may be "
        f"repeated (default: {', '.join(POLICIES)})",
    )
    parser.add_argument(
        "--task",
        action="append",
        metavar="TASK",
        help=f"{' or '.join(TASKS)}; may be repeated (default: both)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of initial weights and sample order (default: 0)"
    )
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: a GPU if there is one)")


def run(args: argparse.Namespace) -> int:
    """Run the demo as `args` of `add_arguments` says; 0, the exit status.

    With --json stdout carries the object alone; progress goes to stderr.

    Raises:
        PolyampError: an option's value is not valid here, or a package is missing; nothing has
            been trained.
    """
    try:
        from rich.console import Console
    except ImportError as error:
        raise PolyampError(f"the demo needs rich: {EXTRA}") from error
    from polyamp.demo.progress import progress_on
    from polyamp.demo.runner import demo_backends, execute, plan

    console = Console(stderr=args.json)
    backends = demo_backends(tuple(dict.fromkeys(args.framework or ())))
    runs = plan(
        backends,
        args.policy or POLICIES,
        args.task or TASKS,
        quick=args.quick,
        seed=args.seed,
        device=args.device,
    )
    with progress_on(console, len(runs)) as progress:
        rows = list(execute(runs, progress))
    if args.json:
        print(_json(args, backends, rows))
    else:
        _show(console, rows)
    return 0


def _json(
    args: argparse.Namespace, backends: Mapping[str, DemoBackend], rows: Sequence[Row]
) -> str:
    import json

    from polyamp.demo.runner import versions

    report = {
        "demo": "quick" if args.quick else "full",
        "device": ", ".join(dict.fromkeys(row.run.device.label for row in rows)),
        "seed": args.seed,
        "versions": versions(backends),
        "rows": [row.to_dict() for row in rows],
    }
    return json.dumps(report, indent=2, allow_nan=False)


def _show(console: Console, rows: Sequence[Row]) -> None:
    from polyamp.demo.table import lines_under, table_of

    if not console.is_terminal:
        console.width = max(console.width, 120)
    console.print(f"\n{_devices(rows)}\n", highlight=False, markup=False)
    console.print(table_of(rows, console.width))
    console.print()
    for line in lines_under(rows):
        console.print(line, highlight=False, markup=False)


def _devices(rows: Sequence[Row]) -> str:
    runs = [row.run for row in rows]
    return ", ".join(
        dict.fromkeys(f"{run.framework} on {run.device.name} ({run.device.label})" for run in runs)
    )
