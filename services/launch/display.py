"""Displays of a run: a table that changes in place on a terminal, plain lines elsewhere."""

import sys
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from services.launch.child import Child, State
from services.launch.metrics import StepRow, describe_step, describe_waits, reward_of, sparkline

_COLOURS = {State.STARTING: "yellow", State.UP: "green", State.RESTARTING: "red", State.STOPPED: "dim"}
_SPARKLINE_WIDTH = 60


class Display(Protocol):
    """Shows a run to a person."""

    def write(self, line: str) -> None:
        """Write a permanent line."""

    def show(self, children: Sequence[Child], rows: Sequence[StepRow], new_rows: Sequence[StepRow]) -> None:
        """Show the processes and the steps."""

    def close(self) -> None:
        """Restore the terminal."""


def open_display(title: str) -> Display:
    """Return the kind of display that fits standard output."""
    console = Console()
    return LiveDisplay(console, title) if console.is_terminal else PlainDisplay()


class PlainDisplay:
    """One line for each event and each step."""

    def write(self, line: str) -> None:
        """Write the line."""
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def show(self, children: Sequence[Child], rows: Sequence[StepRow], new_rows: Sequence[StepRow]) -> None:
        """Write the new steps; changes of processes have their own lines."""
        for row in new_rows:
            self.write(describe_step(row))

    def close(self) -> None:
        """Do nothing."""


class LiveDisplay:
    """A table that changes in place, below the permanent lines."""

    def __init__(self, console: Console, title: str) -> None:
        """Take over the lower end of the terminal."""
        self._title = title
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def write(self, line: str) -> None:
        """Write the line above the table."""
        self._live.console.print(Text(line))

    def show(self, children: Sequence[Child], rows: Sequence[StepRow], new_rows: Sequence[StepRow]) -> None:
        """Redraw the table."""
        parts: list[RenderableType] = [Text(self._title, style="bold")]
        if children:
            parts.append(_processes(children))
        if rows:
            parts.append(_table(rows))
        self._live.update(Group(*parts), refresh=True)

    def close(self) -> None:
        """Leave the last table on the screen."""
        self._live.stop()


def _processes(children: Sequence[Child]) -> Text:
    text = Text()
    for child in children:
        text.append(f"{child.spec.name} ", style=_COLOURS[child.state])
        if child.state in (State.STARTING, State.RESTARTING):
            text.append(f"{child.state} {child.age_s:.0f} s ", style="dim")
        if child.num_starts > 1:
            text.append(f"(start {child.num_starts}) ", style="dim")
        text.append(" ")
    return text


def _table(rows: Sequence[StepRow]) -> Table:
    last = rows[-1]
    step, num_steps = int(last.get("step", len(rows))), int(last.get("num_steps", 0))
    rewards = [reward_of(row) for row in rows if "reward_mean" in row]
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "step", f"{step}/{num_steps}", ProgressBar(total=num_steps or 1, completed=step, width=_SPARKLINE_WIDTH)
    )
    losses = [] if rewards else [row["loss"] for row in rows if "loss" in row]
    if losses:
        table.add_row("loss", f"{losses[-1]:.4f}", Text(sparkline(losses, width=_SPARKLINE_WIDTH), style="green"))
        speed = f"{last.get('trained_tokens_per_s', 0):,.0f}"
        table.add_row("throughput", speed, Text("tokens/s, those that are only read included", style="dim"))
    if rewards:
        table.add_row("reward", f"{rewards[-1]:.3f}", Text(sparkline(rewards, width=_SPARKLINE_WIDTH), style="green"))
    if last.get("num_filtered_groups"):
        note = f"of the groups that arrived; {last['num_filtered_groups']:,} since the run began"
        table.add_row("filtered", f"{last.get('filtered_group_fraction', 0):.0%}", Text(note, style="dim"))
    for label, key, form, note in (
        ("staleness", "staleness_mean", "{:.2f}", f"max {last.get('staleness_max', 0):g} versions"),
        ("throughput", "output_tokens_per_s", "{:,.0f}", "tokens/s"),
        (
            "push",
            "push_s",
            "{:.2f} s",
            f"version {last.get('policy_version', 0) + 1} to {last.get('push_replicas', '-')} replicas",
        ),
        ("|dlogp|", "dlogp_mean", "{:.1e}", f"max {last.get('dlogp_max', 0):.1e}, trainer against engine"),
        (
            "step time",
            "step_s",
            "{:.1f} s",
            describe_waits(last),
        ),
    ):
        if key in last:
            table.add_row(label, form.format(last[key]), Text(note, style="dim"))
    return table
