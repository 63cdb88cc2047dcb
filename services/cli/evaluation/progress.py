"""Shows the progress of an evaluation: bars that change in place on a terminal, lines elsewhere."""

import sys
from collections.abc import Mapping
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from services.trainer.evaluation.outcome import PlayedPrompt

_NUM_LINES = 10
"""Lines of progress for each set if there is no terminal."""


class EvaluationProgress(Protocol):
    """Shows the progress of an evaluation. Use it as a context manager."""

    def __enter__(self) -> Self:
        """Begin to show progress."""
        ...

    def __exit__(self, *exception: object) -> None:
        """Restore the terminal."""

    def write(self, line: str) -> None:
        """Write a permanent line."""

    def add(self, outcome: PlayedPrompt) -> None:
        """Count a played prompt."""


def open_progress(sizes: Mapping[str, int]) -> EvaluationProgress:
    """Return the kind of progress that fits standard output.

    Args:
        sizes: Prompts of each set.
    """
    console = Console()
    return _Bars(console, sizes) if console.is_terminal else _Lines(sizes)


class _Running:
    """The mean score of a set so far, as a first impression."""

    def __init__(self, num_prompts: int) -> None:
        self.num_prompts = num_prompts
        self.num_played = 0
        self._num_samples = 0
        self._sum = 0.0

    def add(self, outcome: PlayedPrompt) -> str:
        self.num_played += 1
        self._num_samples += len(outcome.samples)
        self._sum += sum(sample.score or 0.0 for sample in outcome.samples)
        return f"score {self._sum / self._num_samples:.3f}" if self._num_samples else "nothing played yet"


class _Lines:
    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._running = {name: _Running(size) for name, size in sizes.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def write(self, line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def add(self, outcome: PlayedPrompt) -> None:
        running = self._running[outcome.set_name]
        shown, size = running.add(outcome), running.num_prompts
        if running.num_played * _NUM_LINES // size > (running.num_played - 1) * _NUM_LINES // size:
            self.write(f"{outcome.set_name} {running.num_played}/{size}  {shown}")


class _Bars:
    def __init__(self, console: Console, sizes: Mapping[str, int]) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._running = {name: _Running(size) for name, size in sizes.items()}
        self._tasks = {name: self._progress.add_task(name, total=size, shown="") for name, size in sizes.items()}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def write(self, line: str) -> None:
        self._progress.console.print(Text(line))

    def add(self, outcome: PlayedPrompt) -> None:
        shown = self._running[outcome.set_name].add(outcome)
        self._progress.update(self._tasks[outcome.set_name], advance=1, shown=shown)
