"""The scales of several rules over the steps, drawn: .svg and .html by hand, .png by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyamp._errors import PolyampError

if TYPE_CHECKING:
    from polyamp.simulate.engine import Outcome
    from polyamp.simulate.table import Found
    from polyamp.simulate.trace import Trace

COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31",
)  # fmt: skip
WIDTH, HEIGHT = 900, 320
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 30, 40
ENDINGS = (".html", ".svg", ".png")


def check(target: str) -> None:
    """Refuse a file that could not be written, before anything is computed.

    Raises:
        PolyampError: another ending, no such folder, or .png without matplotlib.
    """
    import importlib.util

    path = Path(target)
    if path.suffix.lower() not in ENDINGS:
        raise PolyampError(f"--plot {target}: must end in {', '.join(ENDINGS)}")
    if not path.absolute().parent.is_dir():
        raise PolyampError(f"--plot {target}: there is no folder {path.parent}")
    if path.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise PolyampError("--plot .png needs matplotlib: pip install matplotlib, or choose .html")


def write(target: str, found: Found) -> None:
    """Draw one picture a trace into `target`; .svg has them under one another.

    Raises:
        PolyampError: the file cannot be written.
    """
    path = Path(target)
    try:
        if path.suffix.lower() == ".png":
            _png(path, found)
        elif path.suffix.lower() == ".svg":
            path.write_text(svg(found), encoding="utf-8")
        else:
            path.write_text(_html(found), encoding="utf-8")
    except OSError as error:
        raise PolyampError(f"--plot {target} cannot be written: {error}") from error


def svg(found: Found) -> str:
    """A drawing of its own: log2 of the scale over the steps, skipped steps as dots."""
    height = HEIGHT * len(found)
    parts = [
        f'<g transform="translate(0 {HEIGHT * i})">{_panel(trace, outcomes)}</g>'
        for i, (trace, outcomes) in enumerate(found)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _panel(trace: Trace, outcomes: Mapping[str, Outcome]) -> str:
    import numpy as np

    bits = {name: np.log2(outcome.scales) for name, outcome in outcomes.items()}
    low = math.floor(min(float(b.min()) for b in bits.values())) - 1
    high = math.ceil(max(float(b.max()) for b in bits.values())) + 1
    across = (WIDTH - LEFT - RIGHT) / max(len(trace) - 1, 1)
    down = (HEIGHT - TOP - BOTTOM) / (high - low)

    def point(step: int, value: float) -> tuple[str, str]:
        return f"{LEFT + across * step:.1f}", f"{TOP + down * (high - value):.1f}"

    parts = [f'<text x="{LEFT}" y="18" font-weight="bold">{escape(trace.name)}</text>']
    for value in range(low, high + 1, max(1, (high - low) // 6)):
        y = point(0, value)[1]
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{y}" text-anchor="end" dy="4">2^{value}</text>'
        )
    for i, (name, values) in enumerate(bits.items()):
        colour = COLOURS[i % len(COLOURS)]
        corners = _corners(values)
        line = " ".join(",".join(point(s, values[s])) for s in corners)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        for step in np.flatnonzero(outcomes[name].skipped)[:2000].tolist():
            x, y = point(step, values[step])
            parts.append(f'<circle cx="{x}" cy="{y}" r="2" fill="{colour}"/>')
        left = LEFT + (WIDTH - LEFT - RIGHT) * i // len(bits)
        parts.append(f'<text x="{left}" y="{HEIGHT - 8}" fill="{colour}">{escape(name)}</text>')
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="18" text-anchor="end">steps 0 to {len(trace) - 1}; dots are'
        " skipped steps</text>"
    )
    return "".join(parts)


def _corners(values: Any) -> list[int]:
    """The steps at which the line bends: where the scale changes, one before, and both ends."""
    import numpy as np

    moved = np.flatnonzero(np.diff(values)) + 1
    return sorted({0, len(values) - 1, *moved.tolist(), *(moved - 1).tolist()})


def _html(found: Found) -> str:
    from polyamp.simulate.table import text

    tables = "\n\n".join(text(trace, outcomes) for trace, outcomes in found)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<title>polyamp simulate</title></head>\n<body>\n"
        f"{svg(found)}<pre>{escape(tables)}</pre>\n</body></html>\n"
    )


def _png(path: Path, found: Found) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2 * len(found)), layout="constrained")
    axes = figure.subplots(len(found), squeeze=False)[:, 0]
    for axis, (trace, outcomes) in zip(axes, found, strict=True):
        for i, (name, outcome) in enumerate(outcomes.items()):
            axis.plot(outcome.scales, label=name, color=COLOURS[i % len(COLOURS)], linewidth=1)
        axis.set_yscale("log", base=2)
        axis.set(title=trace.name, xlabel="step", ylabel="loss scale")
        axis.legend()
    figure.savefig(path)
