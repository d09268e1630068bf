"""Side-by-side measuring: interleaved rounds, medians, and the interval of a paired ratio.

    warm up, then in each round run every case once, in a fresh random order
    ratio    = median over the rounds of (ours / peer)
    own      = median over the rounds of (peer again / peer)
    result   = ratio / own
    interval = 2.5 % and 97.5 % quantiles of the result over resampled rounds
               (bootstrap, fixed seed)

A machine that slows down for a while slows every case of a round, so the ratio is taken within a
round; medians let single disturbed rounds go by. `own` is what the method makes of two equal
things: dividing by it takes out what is the method's and not the thing's.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from polyamp._errors import BackendError, PolyampError

Case = Callable[[], float]
"""Runs once and returns its own duration in seconds; what it only prepares is left out."""
Tell = Callable[[str], None]
"""Is told in a few words what is being measured."""

RESAMPLES = 2000


class Estimate(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def interleaved(
    cases: Mapping[str, Case], rounds: int, *, warmup: int = 3, seed: int = 0
) -> dict[str, list[float]]:
    """Run the cases side by side.

    Args:
        cases: what to run, by name.
        rounds: measured rounds, 1 or more; each runs every case once, in a random order.
        warmup: rounds before them that are not measured.
        seed: of the orders.

    Returns:
        Seconds by name, one number a round; entry i of every list is of the same round.

    Raises:
        PolyampError: `rounds` is not positive.
    """
    if rounds < 1:
        raise PolyampError(f"a measurement needs 1 round or more, got {rounds}")
    order = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(-warmup, rounds):
        for name in order.sample(list(cases), len(cases)):
            seconds = cases[name]()
            if number >= 0:
                times[name].append(seconds)
    return times


def ratio(ours: Sequence[float], peer: Sequence[float]) -> Estimate:
    """The paired ratio with its 95 % bootstrap interval; seconds of the same rounds."""
    return _estimate([a / b for a, b in zip(ours, peer, strict=True)], statistics.median)


def corrected_ratio(
    ours: Sequence[float], peer: Sequence[float], again: Sequence[float]
) -> Estimate:
    """The paired ratio ours / peer over the peer's ratio to itself, again / peer.

    Args:
        ours, peer: seconds of the same rounds.
        again: seconds of a second instance of the peer in those rounds.

    Returns:
        The quotient of the two medians; its interval resamples whole rounds, so that both medians
        are of the same rounds each time.
    """
    pairs = [(a / b, c / b) for a, b, c in zip(ours, peer, again, strict=True)]
    return _estimate(pairs, _quotient)


def _quotient(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(p[0] for p in pairs) / statistics.median(p[1] for p in pairs)


def _estimate(rounds: Sequence[Any], statistic: Callable[[Sequence[Any]], float]) -> Estimate:
    rng = random.Random(0)
    found = sorted(statistic(rng.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    edge = RESAMPLES // 40
    return Estimate(statistic(rounds), found[edge - 1], found[-edge])


def fresh_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process' environment with `changes`, for a Python that finds modules where it does."""
    path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
    return {**os.environ, **(changes or {}), "PYTHONPATH": path}


_running: set[subprocess.Popen[str]] = set()


def kill_running() -> None:
    """End the processes that `in_fresh_python` waits for, in whatever thread, and their own."""
    for process in list(_running):
        _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process and its group, in which are those that it started itself."""
    if process.returncode is not None:
        return
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def in_fresh_python(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    feed: Callable[[], str] | None = None,
) -> Any:
    """Run Python with `arguments` in a new process and return the JSON value it prints.

    It finds modules where this process does, but not in the current directory.

    Args:
        arguments: of Python.
        env: environment variables to set there.
        feed: called once the process runs; what it returns is the process' standard input, which
            is empty without.

    Raises:
        BackendError: the process failed or printed something else.
    """
    import json

    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-P", *arguments],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=fresh_environment(env),
        process_group=0,
    ) as process:
        _running.add(process)
        try:
            out, err = process.communicate(feed() if feed else None)
        except BaseException:
            _kill(process)
            raise
        finally:
            _running.discard(process)
    try:
        if process.returncode:
            raise ValueError(f"exit status {process.returncode}")
        return json.loads(out)
    except ValueError as error:
        told = (err or out).strip()[-2000:]
        raise BackendError(f"a measuring process failed ({error}); it said:\n{told}") from error


def cpu_name() -> str:
    """What the machine calls its processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            found = [line.split(":", 1)[1].strip() for line in lines if line[:10] == "model name"]
    except OSError:
        found = []
    return found[0] if found else platform.processor() or platform.machine()
