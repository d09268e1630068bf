"""What a bench reports: rows with limits, as one JSON object or as a table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HEADERS = ("measured", "value", "unit", "peer", "limit", "ok")


@dataclass(frozen=True)
class Row:
    """One measured number.

    Attributes:
        name: what was measured.
        value: the number, in `unit`.
        unit: such as "ms", "us", "ratio", "count".
        peer: the same measured of what polyamp is compared with, in `unit`; None where there is
            nothing to compare with.
        limit: the largest value allowed; None where the number only informs.
    """

    name: str
    value: float
    unit: str
    peer: float | None = None
    limit: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the limit, if there is one, is kept. NaN keeps none."""
        return self.limit is None or self.value <= self.limit

    def to_dict(self) -> dict[str, Any]:
        """The row as plain values."""
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "peer": self.peer,
            "limit": self.limit,
            "ok": self.ok,
        }


@dataclass(frozen=True)
class Report:
    """What one bench found.

    Attributes:
        bench: the bench's name.
        device: where it ran, for people.
        versions: of every package that the numbers depend on, and of Python.
        rows: the numbers.
        notes: lines under the table: what is measured, and what the peer is.
    """

    bench: str
    device: str
    versions: Mapping[str, str]
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        """Whether every limit is kept."""
        return all(row.ok for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {
            "bench": self.bench,
            "device": self.device,
            "versions": dict(self.versions),
            "rows": [row.to_dict() for row in self.rows],
            "ok": self.ok,
        }

    def to_json(self) -> str:
        """One JSON object; a value that is not finite is null there."""
        import json

        plain = self.to_dict()
        for row in plain["rows"]:
            for key in ("value", "peer", "limit"):
                row[key] = _finite(row[key])
        return json.dumps(plain, indent=2, allow_nan=False)

    def heading(self) -> str:
        """One line: bench, device, versions."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"{self.bench} on {self.device} ({versions})"

    def show(self) -> None:
        """Print heading, table and notes: with rich if it is installed, else as plain text."""
        try:
            from rich.console import Console
        except ImportError:
            print("\n".join([self.heading(), "", *text_table(self.rows), "", *self.notes]))
            return
        console = Console(highlight=False, markup=False)
        if not console.is_terminal:
            console.width = max(console.width, 120)
        console.print(self.heading())
        console.print()
        console.print(_rich_table(self.rows))
        console.print()
        for note in self.notes:
            console.print(note)


def cells(row: Row) -> tuple[str, ...]:
    """The texts of one line of the table."""
    verdict = "" if row.limit is None else "yes" if row.ok else "MISSED"
    return (
        row.name,
        _text(row.value, row.unit),
        row.unit,
        _text(row.peer, row.unit),
        "" if row.limit is None else f"{row.limit:g}",
        verdict,
    )


def text_table(rows: Sequence[Row]) -> list[str]:
    """The table as lines of plain text, numbers to the right."""
    return aligned([HEADERS, *(cells(row) for row in rows)], (1, 3, 4))


def aligned(lines: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Lines of cells as lines of text with columns of one width; `right` are set to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(
            text.rjust(width) if i in right else text.ljust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _rich_table(rows: Sequence[Row]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for i, name in enumerate(HEADERS):
        table.add_column(name, justify="right" if i in {1, 3, 4} else "left", overflow="fold")
    for row in rows:
        table.add_row(*cells(row), style=None if row.ok else "bold red")
    return table


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    return f"{value:g}" if unit == "count" else f"{value:.3f}"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and value - value != 0.0 else value
