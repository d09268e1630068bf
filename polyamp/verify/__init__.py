"""`polyamp verify`: show that every framework on this machine scales as the others do, bit for bit.

Each installed backend runs in a process of its own (Keras once on each of its backends), on every
device it sees; what is compared with what is in `polyamp.testing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyamp._errors import PolyampError

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    parser.add_argument(
        "--quick",
        action="store_true",
        help="200 random steps and fewer trainings: 90 seconds",
    )
    parser.add_argument(
        "--random",
        type=int,
        metavar="N",
        help="length of the random traces, in steps (default: 1000, with --quick 200)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the random traces, 0 or more (default: 0)"
    )
    parser.add_argument(
        "--backend",
        action="append",
        metavar="B",
        help="such as torch or keras; may be repeated (default: every one that is installed)",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="a line for every check and rule, not only for those that differ",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with every row to FILE")


def run(args: argparse.Namespace) -> int:
    """Verify as `args` of `add_arguments` says; the exit status: 0, or 1 on a difference.

    Raises:
        PolyampError: an option's value is not valid; nothing has been run.
    """
    import sys

    from polyamp.testing._conformance import Plan
    from polyamp.verify import page, report, runner

    steps = (200 if args.quick else 1000) if args.random is None else args.random
    if steps < 1 or args.seed < 0:
        raise PolyampError(
            f"--random must be 1 or more and --seed 0 or more, got {steps} and {args.seed}"
        )
    workers = runner.workers(args.backend)
    if args.html:
        page.check(args.html)

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    plan = Plan(steps=steps, seed=args.seed, quick=args.quick)
    found = runner.verify(workers, plan, tell)
    if args.html:
        page.write(args.html, found)
    if args.json:
        print(found.to_json())
    else:
        report.show(found, every=args.all)
    return 0 if found.ok else 1
