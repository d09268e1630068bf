"""The outcomes of several rules side by side: as text, with a sparkline of each scale, as JSON."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polyamp.bench.report import aligned
from polyamp.simulate.trace import OverflowTrace

if TYPE_CHECKING:
    from polyamp.simulate.engine import Outcome
    from polyamp.simulate.trace import Trace

    Found = Sequence[tuple[Trace, Mapping[str, Outcome]]]

HEADERS = (
    "rule", "final", "lowest", "highest", "skips", "lost %", "flushed %", "headroom", "in a row",
    "back up",
)  # fmt: skip
WIDTH = 60
"""Characters of a sparkline."""
BLOCKS, ASCII = "▁▂▃▄▅▆▇█", "_.-:=+*#"
REPLAYED = "The flags are replayed as recorded, whatever the scale."
JUDGED = "Overflow: the largest gradient times the scale is 65520 or more."

LEGEND = (
    "headroom: median bits up to an overflow. in a row: most skips. back up: steps from the bottom"
    "\nof the scale's largest fall until it is where it was."
)


def text(trace: Trace, outcomes: Mapping[str, Outcome]) -> str:
    """A table of one trace, and the sparklines under it."""
    kind = REPLAYED if isinstance(trace, OverflowTrace) else JUDGED
    lines = [HEADERS, *(_cells(name, outcome) for name, outcome in outcomes.items())]
    used = [i for i in range(len(HEADERS)) if i == 0 or any(line[i] for line in lines[1:])]
    table = aligned([[line[i] for i in used] for line in lines], range(1, len(used)))
    faults = [
        f"{name} gives up at step {outcome.fault_step}; the replay goes on."
        for name, outcome in outcomes.items()
        if outcome.fault_step is not None
    ]
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    head = f"{trace.name}: {len(trace)} steps. {kind}"
    return "\n".join([head, "", *table, "", *faults, LEGEND, "", *sparklines(outcomes, encoding)])


def _cells(name: str, outcome: Outcome) -> list[str]:
    headroom = outcome.median_headroom
    return [
        name,
        scale_text(outcome.final_scale),
        *map(scale_text, outcome.bounds),
        str(outcome.skips),
        percent(outcome.lost),
        percent(outcome.flushed),
        "" if headroom is None else f"{headroom:.1f}",
        str(outcome.longest_run),
        "never" if outcome.back_up is None else str(outcome.back_up),
    ]


def scale_text(scale: float) -> str:
    """2**16 for 65536.0; six digits where it is no power of two."""
    part, exponent = math.frexp(scale)
    return f"2**{exponent - 1}" if part == 0.5 else f"{scale:.6g}"


def percent(share: float | None) -> str:
    """Three significant digits; nothing for None."""
    return "" if share is None else f"{share:.3g}"


def sparklines(outcomes: Mapping[str, Outcome], encoding: str) -> list[str]:
    """log2 of each rule's scale over the steps, between the same bounds."""
    import numpy as np

    try:
        BLOCKS.encode(encoding)
        blocks = BLOCKS
    except (UnicodeEncodeError, LookupError):
        blocks = ASCII
    bits = {name: np.log2(outcome.scales) for name, outcome in outcomes.items()}
    low = min(float(b.min()) for b in bits.values())
    high = max(float(b.max()) for b in bits.values())
    width = max(len(name) for name in bits)
    lines = [f"log2 of the scale, from {low:.1f} ({blocks[0]}) to {high:.1f} ({blocks[-1]}):"]
    for name, values in bits.items():
        means = [part.mean() for part in np.array_split(values, min(WIDTH, len(values)))]
        places = [round((m - low) / (high - low or 1.0) * (len(blocks) - 1)) for m in means]
        lines.append(f"{name.ljust(width)}  {''.join(blocks[p] for p in places)}")
    return lines


def to_json(found: Found) -> str:
    """One JSON object with everything the tables show."""
    import json

    traces = [
        {
            "trace": trace.name,
            "kind": "overflows" if isinstance(trace, OverflowTrace) else "ranges",
            "steps": len(trace),
            "rules": [_plain(name, outcome) for name, outcome in outcomes.items()],
        }
        for trace, outcomes in found
    ]
    return json.dumps({"simulate": traces}, indent=2, allow_nan=False)


def _plain(name: str, outcome: Outcome) -> dict[str, Any]:
    return {
        "rule": name,
        "final_scale": outcome.final_scale,
        "min_scale": outcome.bounds[0],
        "max_scale": outcome.bounds[1],
        "skips": outcome.skips,
        "lost_percent": outcome.lost,
        "flushed_percent": outcome.flushed,
        "median_headroom_bits": outcome.median_headroom,
        "longest_run_of_skips": outcome.longest_run,
        "steps_back_up": outcome.back_up,
        "fault_step": outcome.fault_step,
    }
