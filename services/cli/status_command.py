"""`penstock status`: says where a run stands."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.view_command import find_runs
from services.launch.metrics import sparkline
from services.view.run_reader import RunReader
from services.view.summary import reward_name, summarise

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
        run = RunReader(folder)
        found = summarise(run)
        has_alarm |= bool(found["alarms"])
        if as_json:
            sys.stdout.write(json.dumps(found, ensure_ascii=False) + "\n")
        else:
            _, rows = run.steps()
            rewards = [row[name] for row in rows if (name := reward_name(rows)) in row]
            sys.stdout.write("\n".join(_lines(found, rewards)) + "\n")
    return 1 if has_alarm else 0


def _lines(found: Mapping[str, Any], rewards: list[float]) -> Iterator[str]:
    state = "running" if found["is_running"] else "not running"
    left = f", about {_duration(found['left_s'])} left" if found["left_s"] else ""
    since = f" after {_duration(found['elapsed_s'])}" if found["elapsed_s"] is not None else ""
    yield f"{found['name']}: {state}, step {found['step']} of {found['num_steps'] or '?'}{since}{left}"
    if rewards:
        yield f"  reward      {rewards[-1]:.3f}  {sparkline(rewards, width=_WIDTH)}"
    if (evaluation := found["evaluation"]) is not None:
        for name, each in evaluation["sets"].items():
            if (score := each["score"]) is not None:
                error = "" if score["standard_error"] is None else f" ± {score['standard_error']:.3f}"
                yield f"  {name:<11} {score['value']:.3f}{error} at step {evaluation['step']}"
    if found["staleness_mean"] is not None:
        bound = found["max_staleness"]
        yield f"  staleness   {found['staleness_mean']:.2f}, at most {found['staleness_max']:g} of {bound} allowed"
    if found["trainer_idle_fraction"] is not None:
        speed = found["output_tokens_per_s"] or 0.0
        yield f"  trainer     idle {found['trainer_idle_fraction']:.0%}, {speed:,.0f} tokens/s"
    if found["num_replicas"] is not None:
        yield f"  replicas    {found['num_replicas']:g}"
    if known := [f"{kind} {count}" for kind, count in found["groups"].items() if count is not None]:
        yield f"  groups      {', '.join(known)}"
    for alarm in found["alarms"]:
        yield f"  ALARM       {alarm['kind']} at step {alarm['step']}: {alarm['text']}; {alarm['remedy']}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
