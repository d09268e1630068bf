"""What the user sees while models train: a live bar on a terminal, short lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console


class Progress(Protocol):
    """Told what is being trained, how far it is, and what came of it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    @property
    def terminal(self) -> TextIO | None:
        """Where a framework may draw a bar of its own; None where nobody would see it move."""

    def begin(self, name: str, steps: int, drawn: bool = False) -> None:
        """The run `name` of `steps` training steps starts; `drawn` by its framework."""

    def step(self, step: int, loss: float | None) -> None:
        """Training step 1, 2, ... is done; loss in nats where it is known."""

    def end(self, line: str) -> None:
        """The run is over; `line` says what came of it."""


class Bar:
    """One live bar over all runs of `runs`, above it one line per finished run."""

    def __init__(self, console: Console, runs: int) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
        )
        from rich.progress import Progress as Live

        self._live = Live(
            TextColumn("{task.fields[run]}/" + str(runs)),
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=4,
        )
        self._task = self._live.add_task("", start=False, run=0, loss="")
        self._runs, self._run, self._name, self._drawn = runs, 0, "", False

    @property
    def terminal(self) -> TextIO | None:
        """The console's."""
        return cast(TextIO, self._live.console.file)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def begin(self, name: str, steps: int, drawn: bool = False) -> None:
        """Set the bar back to 0; where the framework draws, take it away."""
        self._run, self._name, self._drawn = self._run + 1, name, drawn
        if drawn:
            self._live.stop()
            self._live.console.print(f"{self._run}/{self._runs} {name}", highlight=False)
            return
        self._live.reset(self._task, total=steps, description=name, run=self._run, loss="")

    def step(self, step: int, loss: float | None) -> None:
        """Move the bar."""
        self._live.update(self._task, completed=step)
        if loss is not None:
            self._live.update(self._task, loss=f"loss {loss:.3f}")

    def end(self, line: str) -> None:
        """Print the line above the bar."""
        if self._drawn:
            self._live.start()
        self._live.console.print(f"{self._name}: {line}", highlight=False, markup=False)


class Lines:
    """Plain lines, one when a run starts and one when it is over."""

    def __init__(self, console: Console, runs: int) -> None:
        self._console = console
        self._runs = runs
        self._run = 0

    @property
    def terminal(self) -> None:
        """None."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def begin(self, name: str, steps: int, drawn: bool = False) -> None:
        """Say what starts."""
        self._run += 1
        self._print(f"{self._run}/{self._runs} {name}, {steps} steps")

    def step(self, step: int, loss: float | None) -> None:
        """Say nothing."""

    def end(self, line: str) -> None:
        """Say what came of it."""
        self._print(f"    {line}")

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def progress_on(console: Console, runs: int) -> Progress:
    """A `Bar` where `console` is a terminal, `Lines` elsewhere."""
    return Bar(console, runs) if console.is_terminal else Lines(console, runs)
