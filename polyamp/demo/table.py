"""The table at the end of the demo, and the lines under it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from polyamp.demo.data import Task
    from polyamp.demo.runner import Row

HEADERS = (
    "framework",
    "device",
    "task",
    "policy",
    "ms per\nstep",
    "speed-up",
    "memory",
    "final\nmetric",
    "vs\nfloat32",
    "skipped\nsteps",
    "final\nscale",
)
MEMORY = HEADERS.index("memory")
NARROW = 108  # characters
UNIT_FLAGS = {
    "float16": {"avx512_fp16", "amx_fp16"},
    "bfloat16": {"avx512_bf16", "amx_bf16"},
}
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def table_of(rows: Sequence[Row], width: int) -> Table:
    """One line per row, a rule between tasks; for a console of `width` characters.

    A narrow one does without framework and device where they are the same in every row, and
    moves the columns together.
    """
    from rich import box
    from rich.table import Table

    gap = (0, 1 if width >= NARROW else 0, 0, 0)
    table = Table(box=box.SIMPLE_HEAD, padding=gap, pad_edge=False, show_edge=False)
    kinds = list(dict.fromkeys(row.result.memory_kind for row in rows))
    headers = [*HEADERS]
    if len(kinds) == 1:
        headers[MEMORY] = "\n".join(kinds[0].rsplit(" ", 1))
    lines = [cells(row, kind_shown=len(kinds) > 1) for row in rows]
    same = len({tuple(line[:2]) for line in lines}) == 1
    first = 2 if same and width < NARROW else 0
    for i, name in enumerate(headers[first:], start=first):
        table.add_column(name, justify="left" if i < 4 else "right", overflow="fold")
    for i, line in enumerate(lines):
        last = i + 1 == len(rows)
        new_task = not last and rows[i + 1].run.task.name != rows[i].run.task.name
        table.add_row(*line[first:], end_section=new_task)
    return table


def cells(row: Row, *, kind_shown: bool = False) -> list[str]:
    """The texts of one line of the table."""
    run, result = row.run, row.result
    memory = size_text(result.memory_bytes) + (f" {result.memory_kind}" if kind_shown else "")
    return [
        run.framework,
        run.device.name,
        run.task.name,
        run.policy_name,
        f"{result.step_ms:.2f}",
        "-" if row.speedup is None else f"{row.speedup:.2f}x",
        memory,
        metric_text(run.task, result.metric),
        difference_text(run.task, row.metric_diff),
        str(result.skipped),
        "off" if result.scale is None else f"{result.scale:g}",
    ]


def size_text(count: int) -> str:
    """Bytes in binary units, three significant digits."""
    size, unit = float(count), 0
    while size >= 999.5 and unit < len(UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {UNITS[unit]}"


def metric_text(task: Task, value: float) -> str:
    """The task's metric with its unit."""
    if not math.isfinite(value):
        return "diverged"
    return f"{100 * value:.2f} %" if task.metric == "accuracy" else f"{value:.3f} bpc"


def difference_text(task: Task, value: float | None) -> str:
    """A difference of two metrics with its sign: percentage points for accuracies, else bits."""
    if value is None or not math.isfinite(value):
        return "-"
    size, digits = (100 * value, 2) if task.metric == "accuracy" else (value, 3)
    return f"{round(size, digits) + 0.0:+.{digits}f}"


def lines_under(rows: Sequence[Row]) -> list[str]:
    """What the numbers are to be measured against, one line each."""
    lines = []
    firsts = {row.run.task.name: row for row in reversed(rows)}
    for name in dict.fromkeys(row.run.task.name for row in rows):
        task, metric = firsts[name].run.task, firsts[name].result.metric
        count = task.held_targets.size
        if task.metric == "accuracy":
            error = 100 * math.sqrt(max(0.0, metric * (1 - metric)) / count)
            measure = f"accuracy on {count} held-out images, standard error {error:.1f} points"
        else:
            measure = f"bits per character on {count} held-out characters, lower is better"
        baseline = metric_text(task, task.baseline)
        lines.append(f"{name}: {measure}; {task.baseline_name} gives {baseline}.")
    kinds = {row.result.memory_kind for row in rows}
    if "saved for backward" in kinds:
        lines.append(
            "saved for backward: bytes kept from one micro-batch's forward pass until its "
            "backward pass, parameters left out."
        )
    if "step temporaries" in kinds:
        lines.append(
            "step temporaries: memory that the compiled step needs beside its inputs and outputs."
        )
    if "all variables" in kinds:
        lines.append(
            "all variables: bytes of the model's and the optimizer's variables, which are float32"
            " under every policy; what is kept for the backward pass is not in it."
        )
    return lines + slower_on_cpu(rows)


def slower_on_cpu(rows: Sequence[Row]) -> list[str]:
    """Where 16 bits took longer than float32 on a CPU: by how much, and why."""
    slower: dict[str, list[str]] = {}
    dtypes = []
    for row in rows:
        if not row.run.device.accelerator and row.speedup is not None and row.speedup < 0.95:
            factor = f"{1 / row.speedup:.1f}x ({row.run.task.name})"
            slower.setdefault(f"{row.run.framework} {row.run.policy_name}", []).append(factor)
            dtypes.append(row.run.policy.compute_dtype)
    if not slower:
        return []
    told = "; ".join(f"{who} {', '.join(factors)}" for who, factors in slower.items())
    return [
        f"Slower than float32 on this CPU, in multiples of its time per step: {told}. "
        f"{_missing_units(dtypes)}The gain in speed needs hardware that computes in 16 bits, "
        "such as a GPU."
    ]


def _missing_units(dtypes: Sequence[str]) -> str:
    """Which of `dtypes` the CPU has no arithmetic for, from what Linux says about an x86 one."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = next((set(line.split()) for line in file if line.startswith("flags")), set())
    except OSError:
        return ""
    missing = [
        dtype
        for dtype, units in UNIT_FLAGS.items()
        if flags and dtype in dtypes and not units & flags
    ]
    return f"It has no {' or '.join(missing)} arithmetic. " if missing else ""
