"""Displays of a run: a table that changes in place on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.launch.metrics import StepRow, describe_step
from services.launch.process.child import Child, State
from services.launch.terminal.status_lines import Line, describe_alarm, describe_left, describe_status

_COLOURS = {State.STARTING: "yellow", State.UP: "green", State.RESTARTING: "red", State.STOPPED: "dim"}
_WIDEST_COURSE: Final = 60
_LABELS: Final = 30
"""Characters that labels and values take beside the notes."""
_MOST_NAMED: Final = 8
"""Processes that are all named; of more, only those that are not up or were started again."""


class Display(Protocol):
    """Shows a run to a person."""

    def write(self, line: str) -> None:
        """Write a permanent line."""

    def show(
        self,
        children: Sequence[Child],
        rows: Sequence[StepRow],
        new_rows: Sequence[StepRow],
        status: Mapping[str, Any],
    ) -> None:
        """Show the processes, the steps, and where the run stands, as `services.view.summary.status_of` returns it."""

    def close(self) -> None:
        """Restore the terminal."""


def open_display(title: str) -> Display:
    """Return the kind of display that fits standard output."""
    console = Console()
    return LiveDisplay(console, title) if console.is_terminal else PlainDisplay()


class PlainDisplay:
    """One line for each event, each step and each new alarm."""

    def __init__(self) -> None:
        """Write to standard output."""
        self._alarms: set[str] = set()
        """Kinds that are written and still raised."""

    def write(self, line: str) -> None:
        """Write the line."""
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def show(
        self,
        children: Sequence[Child],
        rows: Sequence[StepRow],
        new_rows: Sequence[StepRow],
        status: Mapping[str, Any],
    ) -> None:
        """Write the new steps and alarms; changes of processes have their own lines."""
        for row in new_rows:
            left = describe_left(status) if row is new_rows[-1] else ""
            self.write("  ".join(filter(None, (describe_step(row), left))))
        for alarm in status["alarms"]:
            if alarm["kind"] not in self._alarms:
                self.write(f"ALARM {describe_alarm(alarm)}")
        self._alarms = {alarm["kind"] for alarm in status["alarms"]}

    def close(self) -> None:
        """Do nothing."""


class LiveDisplay:
    """A table that changes in place, below the permanent lines, and is never higher than the terminal."""

    def __init__(self, console: Console, title: str) -> None:
        """Take over the lower end of the terminal."""
        self._title = title
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def write(self, line: str) -> None:
        """Write the line above the table."""
        self._live.console.print(Text(line))

    def show(
        self,
        children: Sequence[Child],
        rows: Sequence[StepRow],
        new_rows: Sequence[StepRow],
        status: Mapping[str, Any],
    ) -> None:
        """Redraw the table."""
        console = self._live.console
        parts: list[RenderableType] = [Text(self._title, style="bold", no_wrap=True, overflow="ellipsis")]
        if children:
            parts.append(_processes(children))
        if status["alarms"]:
            parts.append(_alarm(status["alarms"]))
        if rows:
            width = max(8, min(_WIDEST_COURSE, console.width - _LABELS))
            lines = describe_status(status, rows, width=width)
            parts.append(_table(lines[: max(1, console.height - len(parts) - 1)], status, width))
        self._live.update(Group(*parts), refresh=True)

    def close(self) -> None:
        """Leave the last table on the screen."""
        self._live.stop()


def _processes(children: Sequence[Child]) -> Text:
    """Return the processes in one line, those that are not up first; of many, those that are up are counted."""
    text = Text(no_wrap=True, overflow="ellipsis")
    is_few = len(children) <= _MOST_NAMED
    num_up = 0
    for child in sorted(children, key=lambda child: child.state is State.UP):
        if not is_few and child.state is State.UP and child.num_starts <= 1:
            num_up += 1
            continue
        text.append(f"{child.spec.name} ", style=_COLOURS[child.state])
        if child.state in (State.STARTING, State.RESTARTING):
            text.append(f"{child.state} {child.age_s:.0f} s ", style="dim")
        if child.num_starts > 1:
            text.append(f"(start {child.num_starts}) ", style="dim")
        text.append(" ")
    if num_up:
        text.append(f"{num_up} {'others ' if num_up < len(children) else ''}up", style=_COLOURS[State.UP])
    return text


def _alarm(alarms: Sequence[Mapping[str, Any]]) -> Text:
    """Return the alarm of the latest step in one line, and how many others there are."""
    last = max(alarms, key=lambda alarm: alarm["step"])
    others = f" ({len(alarms) - 1} more: penstock status)" if len(alarms) > 1 else ""
    return Text(f"ALARM {describe_alarm(last)}{others}", style="red", no_wrap=True, overflow="ellipsis")


def _table(lines: Sequence[Line], status: Mapping[str, Any], width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()  # the one that gives way; its texts are cut, not wrapped
    for line in lines:
        note = Text(style="dim", no_wrap=True, overflow="ellipsis")
        if line.label == "step":
            note.append(_bar(status, width - len(line.note) - 2), style="not dim green").append("  ")
        note.append(line.note, style="not dim green" if line.label in ("reward", "loss") else "")
        table.add_row(line.label, line.value, note)
    return table


def _bar(status: Mapping[str, Any], width: int) -> str:
    """Return how far the run is."""
    width = max(4, width)
    done: int = round(width * status["step"] / max(1, status["num_steps"], status["step"]))
    return "━" * done + "╌" * (width - done)
