"""`polyamp simulate`: which scaling rule would have served my run.

Replays a trace, of overflows or of the gradients' ranges, through several rules side by side. The
rules are the ones that train; the arithmetic is `polyamp.transition` on Python numbers.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from polyamp._errors import PolyampError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from polyamp._scaling import Rule
    from polyamp.simulate.trace import Trace

__all__ = ["add_arguments", "run"]

COUNTING = ("torch", "keras", "deepspeed-zero", "megatron", "fairseq")
"""Rules that are compared where none is named and the trace has overflows only."""
MEASURING = ("auto", "torch", "megatron", "dynamic:init_scale=4096")
"""Rules that are compared where none is named and the trace has ranges."""
_SHIFT = re.compile(r"(\d{1,9}):([+-]?\d{1,3})")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `polyamp simulate` to `parser`."""
    from polyamp.simulate.generate import KINDS
    from polyamp.simulate.read import SHIPPED

    parser.add_argument(
        "--trace",
        action="append",
        default=[],
        metavar="FILE",
        help=".npz, .csv, .jsonl or .txt, or one that comes with polyamp: "
        f"{', '.join(SHIPPED)}; may be repeated",
    )
    parser.add_argument(
        "--generate",
        action="append",
        default=[],
        metavar="KIND:KEY=VALUE,...",
        help=f"a made-up trace: {', '.join(KINDS)}; such as overflows:p=0.01,steps=10000,seed=0",
    )
    parser.add_argument(
        "--rule",
        action="append",
        default=[],
        metavar="RULE",
        help="such as auto, torch, static:1024 or dynamic:init_scale=65536,growth_interval=100; "
        "may be repeated",
    )
    parser.add_argument(
        "--shift",
        action="append",
        default=[],
        metavar="STEP:BITS",
        help="multiply the gradients of range traces by 2**BITS from STEP on; may be repeated",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the tables"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draw the scales: .html, .svg, or .png (needs matplotlib)"
    )


def run(args: argparse.Namespace) -> int:
    """Replay what `args` of `add_arguments` names; 0, the exit status.

    Raises:
        PolyampError: a trace, rule, shift or plot file that is not valid; nothing is printed.
    """
    from polyamp.simulate import plot, table
    from polyamp.simulate.engine import replay

    if args.plot:
        plot.check(args.plot)
    found = [
        (trace, {name: replay(rule, trace) for name, rule in _rules(args.rule, trace).items()})
        for trace in _traces(args)
    ]
    if args.plot:
        plot.write(args.plot, found)
    if args.json:
        print(table.to_json(found))
    else:
        print("\n\n".join(table.text(trace, outcomes) for trace, outcomes in found))
    return 0


def _traces(args: argparse.Namespace) -> list[Trace]:
    from polyamp.simulate.generate import generate
    from polyamp.simulate.read import read_trace
    from polyamp.simulate.trace import OverflowTrace

    traces = [*map(read_trace, args.trace), *map(generate, args.generate)]
    if not traces:
        raise PolyampError(
            "nothing to replay: give --trace FILE or --generate overflows:p=0.01 (see --help)"
        )
    shifts = [_shift(text) for text in args.shift]
    shifted: list[Trace] = []
    for trace in traces:
        if shifts and isinstance(trace, OverflowTrace):
            raise PolyampError(f"--shift needs gradients' ranges, and {trace.name} has overflows")
        shifted.append(trace if isinstance(trace, OverflowTrace) else trace.shifted(shifts))
    return shifted


def _shift(text: str) -> tuple[int, int]:
    match = _SHIFT.fullmatch(text)
    if match is None:
        raise PolyampError(f"--shift {text}: must be STEP:BITS, such as 1500:-14")
    return int(match[1]), int(match[2])


def _rules(given: Sequence[str], trace: Trace) -> Mapping[str, Rule]:
    from polyamp.simulate.expressions import parse_rule
    from polyamp.simulate.trace import OverflowTrace

    names = given or (COUNTING if isinstance(trace, OverflowTrace) else MEASURING)
    return {name: parse_rule(name) for name in names}
