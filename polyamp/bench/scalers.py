"""`polyamp bench scalers`: what every scaling rule loses, over recorded and made-up gradients.

    skips, lost    over the traces: sum of the skipped steps; sum of the percents of nonzero
                   gradient entries that never reach the optimizer
    shifted        percent lost where the level moves by -14, +20, -27 bits, 1,500 steps apart
    down           steps until the median headroom of the next 20 is at most 9 bits, after -14 and
                   after -27 bits, each alone: the worse
    up             steps skipped of the 20 after +20 bits alone
    window         bits: powers of two by which the loss may be multiplied, with at most 1 % lost
                   over a trace's first 2,000 steps; the worst trace

The shifted traces are made up (three seeds, the worst of each); where a rule never recovers within
1,500 steps, down is 1,500.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polyamp
from polyamp._errors import PolyampError
from polyamp._scaling import Rule
from polyamp.bench.harness import Tell, cpu_name
from polyamp.bench.report import Report, Row, aligned, text_table
from polyamp.simulate.engine import NEXT, Outcome, oracle, replay
from polyamp.simulate.expressions import parse_rule
from polyamp.simulate.generate import generate
from polyamp.simulate.read import SHIPPED, read_trace
from polyamp.simulate.trace import RangeTrace

OWN = (
    "auto",
    "two-phase",
    "two-phase:literal=true",
    "logmax",
    "delayed",
    "delayed:history=100,margin=3",
    "dynamic:init_scale=2**12",
)
SKIPS_LIMIT, LOST_LIMIT = 2, 0.06
"""Of "auto" over the five shipped traces together."""
SHIFTED_LIMIT, DOWN_LIMIT, UP_LIMIT, WINDOW_LIMIT = 0.1, 6, 3, 90
SEEDS = 3
REGIME = 1500
DOWN, UP = (-14, -27), 20
WINDOW_STEPS = 2000
WIDEST = 100
"""Bits either way where the search for the window ends."""
HEADERS = ("rule", "skips", "lost %", "shifted %", "down", "up", "window")


@dataclass(frozen=True)
class Figures:
    """What one rule came to; see the module."""

    skips: int
    lost: float
    shifted: float | None = None
    down: int | None = None
    up: int | None = None
    window: int | None = None

    def cells(self, name: str) -> list[str]:
        """One line of the table."""
        down = f"> {REGIME}" if self.down == REGIME else _text(self.down)
        shifted = "" if self.shifted is None else f"{self.shifted:.3g}"
        found = (str(self.skips), f"{self.lost:.3g}", shifted, down, _text(self.up))
        return [name, *found, _text(self.window)]


@dataclass(frozen=True)
class ScalersReport(Report):
    """A report that shows one line a rule, and the rows that have a limit."""

    figures: Mapping[str, Figures] = field(default_factory=dict)

    def show(self) -> None:
        """Print heading, table, limits and notes."""
        lines = [HEADERS, *(f.cells(name) for name, f in self.figures.items())]
        table = aligned([list(line) for line in lines], range(1, len(HEADERS)))
        limits = [row for row in self.rows if row.limit is not None]
        shown = [self.heading(), "", *table, "", *(text_table(limits) if limits else ())]
        print("\n".join([*shown, "", *self.notes]))


def scalers(quick: bool, tell: Tell, trace: Sequence[str] = ()) -> Report:
    """Replay traces through every rule.

    Args:
        trace: files, names of shipped traces, or folders of .npz; the shipped ones by default.

    Raises:
        PolyampError: a trace cannot be read or has no histograms; a folder without any.
    """
    recorded = [_with_histograms(name) for name in _files(trace) or SHIPPED]
    rules = {name: parse_rule(name) for name in (*OWN, *polyamp.presets())}
    best = [oracle(trace) for trace in recorded]
    figures = {"oracle": Figures(sum(o.skips for o in best), sum(_lost(o) for o in best))}
    seeds = range(1 if quick else SEEDS)
    for name, rule in rules.items():
        tell(f"scalers: {name}")
        figures[name] = _figures(rule, recorded, seeds, quick)
    limits = {"auto": _auto_limits(shipped=not trace)}
    rows = [r for name, f in figures.items() for r in _rows(name, f, limits.get(name, {}), figures)]
    return ScalersReport(
        bench="scalers",
        device=f"cpu: {cpu_name()}, {os.cpu_count()} cores",
        versions={"python": platform.python_version(), "polyamp": polyamp.__version__},
        rows=rows,
        notes=(
            f"Traces: {', '.join(trace.name for trace in recorded)}; skips and lost are sums over"
            " them.",
            "shifted: -14, +20, -27 bits, 1500 steps apart. down: steps to recover from -14 and"
            " from -27 bits. up: skips at +20. window: bits of loss weights with at most 1 % lost"
            " on the worst trace" + (" (not measured: --quick)." if quick else "."),
        ),
        figures=figures,
    )


def _files(traces: Sequence[str]) -> list[str]:
    found: list[str] = []
    for source in traces:
        inside = sorted(map(str, Path(source).glob("*.npz"))) if Path(source).is_dir() else [source]
        if not inside:
            raise PolyampError(f"there is no .npz file in {source}")
        found += inside
    return found


def _with_histograms(name: str) -> RangeTrace:
    trace = read_trace(name)
    if not isinstance(trace, RangeTrace) or trace.below_all is None:
        raise PolyampError(f"{trace.name} has no histograms, so what is lost cannot be told")
    return trace


def _figures(rule: Rule, traces: Sequence[RangeTrace], seeds: range, quick: bool) -> Figures:
    outcomes = [replay(rule, trace) for trace in traces]
    sequence = [replay(rule, generate(f"shifts:width=3,every={REGIME},seed={s}")) for s in seeds]
    down = [_after(rule, bits, s).recovery(REGIME, 2 * REGIME) for bits in DOWN for s in seeds]
    up = [_after(rule, UP, s).skipped[REGIME : REGIME + NEXT].sum() for s in seeds]
    return Figures(
        skips=sum(o.skips for o in outcomes),
        lost=sum(map(_lost, outcomes)),
        shifted=max(map(_lost, sequence)),
        down=max(REGIME if d is None else d for d in down),
        up=int(max(up)),
        window=None if quick else min(window(rule, trace) for trace in traces),
    )


def _after(rule: Rule, bits: int, seed: int) -> Outcome:
    text = f"shifts:width=3,bits={bits},every={REGIME},steps={2 * REGIME},seed={seed}"
    return replay(rule, generate(text))


def window(rule: Rule, trace: RangeTrace) -> int:
    """How many whole bits of loss weights keep the share lost at 1 % or less.

    Counted from where they hold the weight 1; 0 if that is not among them.
    """
    short = trace.first(WINDOW_STEPS)

    def kept(bits: int) -> bool:
        return _lost(replay(rule, short.shifted([(0, bits)]))) <= 1.0

    if not kept(0):
        return 0
    edges = []
    for sign in (-1, 1):
        inside, outside = 0, WIDEST
        while outside - inside > 1:
            middle = (inside + outside) // 2
            inside, outside = (middle, outside) if kept(sign * middle) else (inside, middle)
        edges.append(inside)
    return sum(edges)


def _lost(outcome: Outcome) -> float:
    return outcome.lost or 0.0


def _auto_limits(shipped: bool) -> dict[str, float]:
    over_traces = {"skips": SKIPS_LIMIT, "lost": LOST_LIMIT} if shipped else {}
    return {**over_traces, "shifted": SHIFTED_LIMIT, "down": DOWN_LIMIT, "up": UP_LIMIT}


def _rows(
    name: str, figures: Figures, limits: Mapping[str, float], others: Mapping[str, Figures]
) -> list[Row]:
    rows = []
    for key, unit in (
        ("skips", "count"), ("lost", "%"), ("shifted", "%"), ("down", "count"), ("up", "count"),
        ("window", "bits"),
    ):  # fmt: skip
        value, peer = getattr(figures, key), getattr(others["torch"], key)
        if value is not None:
            rows.append(Row(f"{name}: {key}", value, unit, peer, limits.get(key)))
    if limits and figures.window is not None:
        short = max(0, WINDOW_LIMIT - figures.window)
        rows.append(Row(f"{name}: bits short of a window of {WINDOW_LIMIT}", short, "count", 0, 0))
    return rows


def _text(value: int | None) -> str:
    return "" if value is None else str(value)
