"""The table of a verification: with rich if it is installed, else as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyamp.bench.report import aligned
from polyamp.testing._conformance import Row

if TYPE_CHECKING:
    from polyamp.verify.runner import Verification

HEADERS = ("backend", "device", "mode", "check", "rule", "steps", "result")
_NUMBER = HEADERS.index("steps")
Line = tuple[str, ...]


_ALONE = {"golden traces", "random signals"}
"""Checks of the transition alone; the others are of training steps."""


def lines(rows: Sequence[Row], *, every: bool = False) -> list[tuple[Line, bool]]:
    """The lines of the table, each with whether it is fine.

    Rows that are identical share a line for each backend, device and mode, one of transitions and
    one of training steps, unless `every` row is to have its own.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key: tuple[str, ...] = (row.backend, row.device, row.mode, _kind(row))
        key = (*key, row.check, row.rule) if every or not row.ok else key
        groups.setdefault(key, []).append(row)
    return [(_line(group), group[0].ok) for group in groups.values()]


def _kind(row: Row) -> str:
    return "transition" if row.check in _ALONE else "training"


def _line(group: Sequence[Row]) -> Line:
    row, rules = group[0], len({r.rule for r in group})
    several = len({r.check for r in group}) > 1
    return (
        row.backend,
        row.device,
        row.mode,
        _kind(row) if several else row.check,
        row.rule if rules == 1 else f"{rules} rules",
        f"{sum(r.steps for r in group):,}",
        result(row),
    )


def result(row: Row) -> str:
    """ "identical", the first difference, or what was raised."""
    if row.error is not None:
        return f"ERROR {row.error}"
    return "identical" if row.difference is None else f"DIFFERS at {row.difference}"


def heading(found: Verification) -> str:
    """One line: machine and versions."""
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    return f"{found.machine} ({versions})"


def summary(found: Verification) -> str:
    """One line: how much was compared, and what came of it."""
    wrong = [row for row in found.rows if not row.ok]
    steps = sum(row.steps for row in found.rows)
    verdict = f"{len(wrong)} of {len(found.rows)} rows differ" if wrong else "0 differences"
    return f"{steps:,} steps compared bit for bit in {found.seconds:.0f} s: {verdict}"


def show(found: Verification, *, every: bool = False) -> None:
    """Print heading, table and summary."""
    table = lines(found.rows, every=every)
    try:
        from rich.console import Console
    except ImportError:
        text = aligned([HEADERS, *(line for line, _ in table)], {_NUMBER})
        print("\n".join([heading(found), "", *text, "", summary(found)]))
        return
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = max(console.width, 140)
    console.print(heading(found))
    console.print()
    _print_table(console, table)
    console.print()
    console.print(summary(found), style=None if found.ok else "bold red")


def _print_table(console: object, table: Sequence[tuple[Line, bool]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for i, name in enumerate(HEADERS):
        made.add_column(name, justify="right" if i == _NUMBER else "left", overflow="fold")
    for line, fine in table:
        made.add_row(*line, style=None if fine else "bold red")
    if isinstance(console, Console):
        console.print(made)
