"""Carry a loss scaler's state and configuration from one library to another, on the command line.

    polyamp convert scaler.pt --to megatron
    polyamp convert ds_config.json rule.json
    polyamp convert model.keras --to torch

What it does is `polyamp.import_scaler` followed by `polyamp.export_scaler`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polyamp._foreign import export_scaler, import_scaler
from polyamp._foreign_find import CONTAINERS
from polyamp._foreign_state import DIALECTS

if TYPE_CHECKING:
    import argparse

__all__ = ["SYSTEMS", "add_arguments", "run"]

SYSTEMS = ("polyamp", *DIALECTS, *CONTAINERS)
"""What --from and --to take."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the converter's options to `parser`."""
    parser.add_argument(
        "source",
        metavar="IN",
        help="JSON, a torch checkpoint, .keras, .weights.h5, Accelerate's directory, or - for JSON"
        " from stdin",
    )
    parser.add_argument(
        "out",
        metavar="OUT",
        nargs="?",
        default="-",
        help="file to write: a torch checkpoint if it ends in .pt, .pth, .bin or .ckpt, else JSON"
        " (default: -, print JSON)",
    )
    parser.add_argument(
        "--from",
        dest="system",
        choices=SYSTEMS,
        metavar="SYSTEM",
        help=f"who wrote IN (default: told from the keys): {', '.join(SYSTEMS)}",
    )
    parser.add_argument(
        "--to",
        choices=SYSTEMS,
        default="polyamp",
        metavar="SYSTEM",
        help="whose form to write (default: polyamp)",
    )
    parser.add_argument(
        "--at", metavar="KEYS", help="dotted keys under which the scaler lies in IN"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="JSON of what IN leaves out: the configuration of its system, or a saved polyamp rule",
    )
    parser.add_argument(
        "--part",
        choices=("state", "config"),
        default="state",
        help="write the running state or the configuration (default: state)",
    )
    parser.add_argument(
        "--lossy", action="store_true", help="leave out what the other system cannot do"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it is there")


def run(args: argparse.Namespace) -> int:
    """Convert as `args` of `add_arguments` says; 0, the exit status. Warnings go to stderr.

    Raises:
        StateError: see `polyamp.import_scaler` and `polyamp.export_scaler`; nothing is written.
    """
    import sys
    import warnings

    from polyamp._foreign_files import to_json, write_file

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rule, state = import_scaler(_source(args.source), args.system, rule=_rule(args), at=args.at)
        data = export_scaler(rule, state, args.to, part=args.part, lossy=args.lossy)
    for warning in caught:
        print(f"polyamp convert: {warning.message}", file=sys.stderr)
    if args.out == "-":
        sys.stdout.write(to_json(data))
    else:
        write_file(args.out, data, args.to, force=args.force)
    return 0


def _source(name: str) -> Any:
    import sys

    from polyamp._foreign_files import parse_json

    return parse_json(sys.stdin.buffer.read(), "stdin") if name == "-" else name


def _rule(args: argparse.Namespace) -> Any:
    from polyamp._foreign_files import read_file
    from polyamp._interchange import rule_from_dict

    if args.config is None:
        return None
    config = read_file(args.config)
    saved_rule = isinstance(config, dict) and config.get("kind") == "rule"
    return rule_from_dict(config) if saved_rule else config
