"""The `polyamp` command: demo, bench, convert, simulate, verify and formats."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

import polyamp
from polyamp._errors import PolyampError


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    from polyamp import bench, convert, demo, simulate, verify

    top = argparse.ArgumentParser(
        prog="polyamp", description="Mixed precision that says what it does."
    )
    top.add_argument("--version", action="version", version=f"polyamp {polyamp.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module, text in (
        ("demo", demo, "train real models in fp32, fp16 and bf16 and compare"),
        ("bench", bench, "measure polyamp beside what it replaces"),
        ("convert", convert, "carry a loss scaler from one library to another"),
        ("simulate", simulate, "replay a trace through scaling rules, side by side"),
        ("verify", verify, "compare every framework on this machine with the core, bit for bit"),
    ):
        command = commands.add_parser(name, help=text, description=f"{text.capitalize()}.")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    formats = commands.add_parser("formats", help="print the number formats")
    formats.set_defaults(run=_formats)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 fine, 1 a limit was missed, 2 a user's error."""
    args = parser().parse_args(arguments)
    try:
        with _ended_in_order():
            status = int(args.run(args))
            if sys.stdout is not None:  # closed by the caller
                sys.stdout.flush()
        return status
    except PolyampError as error:
        return _told(args, str(error), 2)
    except KeyboardInterrupt:
        return _told(args, "interrupted", 130)
    except BrokenPipeError:  # whoever read the output has enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return _told(args, f"cannot write: {error.strerror}", 1)


def _told(args: argparse.Namespace, text: str, status: int) -> int:
    print(f"polyamp {args.command}: {text}", file=sys.stderr)
    return status


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP end the command as an exception does: its processes end with it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [signal.Signals[name] for name in names]
    mine = [n for n in numbers if signal.getsignal(n) == signal.SIG_DFL]  # nohup ignores SIGHUP
    for number in mine:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


def _formats(args: argparse.Namespace) -> int:
    from polyamp._formats import formats_table

    print(formats_table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
