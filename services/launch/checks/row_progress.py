"""Shows how many rows have been read before a run starts: a bar on a terminal, lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

SAY_EVERY_S: Final = 5.0
"""Seconds between lines if there is no terminal."""
_MAX_NAME: Final = 40
"""Characters of a name beside its bar: its end, which tells files apart."""


class RowProgress(Protocol):
    """Shows rows that are read, one source after another."""

    def show(self, name: str, num_read: int, num_rows: int) -> None:
        """Show that `num_read` rows of the source called `name` have been read, of `num_rows`."""
        ...


@contextmanager
def open_row_progress(say: Callable[[str], object]) -> Iterator[RowProgress]:
    """Show progress on standard output if it is a terminal, until the end of the context.

    Args:
        say: Receives lines if it is not.
    """
    console = Console()
    if not console.is_terminal:
        yield _Lines(say)
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as bars:
        yield _Bars(bars)


class _Bars:
    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def show(self, name: str, num_read: int, num_rows: int) -> None:
        if name not in self._tasks:
            shown = name if len(name) <= _MAX_NAME else f"...{name[3 - _MAX_NAME :]}"
            self._tasks[name] = self._bars.add_task(shown, total=num_rows)
        self._bars.update(self._tasks[name], completed=num_read)


class _Lines:
    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._said_at = time.monotonic()

    def show(self, name: str, num_read: int, num_rows: int) -> None:
        if time.monotonic() - self._said_at > SAY_EVERY_S:
            self._said_at = time.monotonic()
            self._say(f"{name}: {num_read} of {num_rows} rows read")
