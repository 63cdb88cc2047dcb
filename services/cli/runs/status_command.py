"""`penstock status`: says where a run stands."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.runs.view_command import find_runs
from services.launch.metrics import SHOWN, StepRow
from services.launch.terminal.status_lines import describe_alarm, describe_status
from services.view.run_reader import RunReader
from services.view.summary import summarise

_WIDTH = 40


def status(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders, or a folder with run folders in it.", show_default=False),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each run, one a line.")] = False,
) -> int:
    """Say where runs stand: step, time left, reward, evaluation, staleness, idle trainer, replicas, alarms.

    Reads the run folder only. Exits with 1 if there is an alarm.
    """
    has_alarm = False
    for folder in find_runs(folders):
        run = RunReader(folder, keep=SHOWN.__contains__)
        found = summarise(run)
        has_alarm |= bool(found["alarms"])
        if as_json:
            sys.stdout.write(json.dumps(found) + "\n")
        else:
            _, rows = run.steps()
            sys.stdout.write("\n".join(_lines(found, rows)) + "\n")
    return 1 if has_alarm else 0


def _lines(found: Mapping[str, Any], rows: Sequence[StepRow]) -> Iterator[str]:
    yield f"{found['name']}: {'running' if found['is_running'] else 'not running'}"
    lines = describe_status(found, rows, width=_WIDTH)
    label_width, value_width = (max(len(line.label) for line in lines), max(len(line.value) for line in lines))
    for line in lines:
        yield f"  {line.label:<{label_width}}  {line.value:<{value_width}}  {line.note}".rstrip()
    for alarm in found["alarms"]:
        yield f"  ALARM {describe_alarm(alarm)}"
