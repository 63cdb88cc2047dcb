"""Runs whose metrics are sent to a tracker by a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from services.trainer.telemetry.trackers import TrackedRun

RUN_ID = "tiny-20260101-120000"
ROWS = [{"step": step, "reward_mean": step / 10, "groups": [1, 2], "weights_digest": "00ff"} for step in range(1, 5)]

LOG_ROWS = """
import functools, json, sys
from pathlib import Path
import structlog
from services.trainer.config import TrackersConfig
from services.trainer.telemetry.trackers import TrackedRun, Trackers

given = json.loads(sys.argv[1])
Trackers.close = functools.partialmethod(Trackers.close, given["close_s"])
with structlog.testing.capture_logs() as logs:
    for part in given["parts"]:
        run = TrackedRun(**part["run"] | {"folder": Path(part["run"]["folder"])})
        trackers = Trackers.open(TrackersConfig.model_validate({"use": [given["use"]]}), run)
        for row in part["rows"]:
            trackers.log(row)
        trackers.close()
assert logs == [], logs
"""

LOG_A_RUN = """
import asyncio, functools, json, sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
import structlog
from penstock.config import load
from services.launch.settings.service_settings import for_trainer
from services.recipe import Recipe
from services.trainer.run_logs import open_run_logs
from services.trainer.starting_point import StartingPoint
from services.trainer.telemetry.trackers import Trackers

given = json.loads(sys.argv[1])
Trackers.close = functools.partialmethod(Trackers.close, given["close_s"])
overrides = ["--model.path=builtin:tiny-qwen3-vl", f"--trackers.use=['{given['use']}']", "--episodes.keep=off"]
settings = for_trainer(load(Recipe, [], overrides))

async def train(checkpoint, rows):
    begin = {"run_id": given["run_id"], "folder": Path(given["folder"]), "checkpoints": None, "versions": None}
    async with AsyncExitStack() as stack:
        point = StartingPoint(checkpoint=checkpoint and SimpleNamespace(**checkpoint), **begin)
        logs = await open_run_logs(settings, point, None, None, None, stack)
        for row in rows:
            logs.metrics.write(row)
            logs.trackers.log(row)

with structlog.testing.capture_logs() as logs:
    for start in given["starts"]:
        asyncio.run(train(start["checkpoint"], start["rows"]))
assert logs == [], logs
"""

_CLOSE_S = 200.0
"""Longest wait for a tracker at the end. A run gives up after a minute, in which busy cores may not even import one."""


def python(program: str, *arguments: str, **environment: str) -> str:
    """Run it as a process of its own, as a trainer is: trackers leave threads, files and children to the exit."""
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,  # nobody types a key
        capture_output=True,
        text=True,
        timeout=_CLOSE_S + 40,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_in(folder: Path, last_step: int = 0) -> TrackedRun:
    """A run from its beginning, or from a checkpoint."""
    settings = {"run.name": "tiny"}
    return TrackedRun(
        run_id=RUN_ID, name="tiny", project="tests", last_step=last_step, folder=folder, settings=settings
    )


def log_rows(
    use: str,
    folder: Path,
    rows: list[dict[str, Any]],
    *,
    last_step: int = 0,
    of_another_run: list[dict[str, Any]] | None = None,
    **environment: str,
) -> None:
    """Open one tracker, log and close; then so for another run, if there are rows of one. Nothing may have failed."""

    def part(run_id: str, last_step: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
        settings = {"trainer.num_steps": str(4 + last_step)}
        run = {"run_id": run_id, "name": "tiny", "project": "tests", "folder": str(folder), "settings": settings}
        return {"run": run | {"last_step": last_step}, "rows": rows}

    parts = [part(RUN_ID, last_step, rows)]
    if of_another_run is not None:
        parts.append(part("tiny-20260102-000000", 0, of_another_run))
    python(LOG_ROWS, json.dumps({"use": use, "parts": parts, "close_s": _CLOSE_S}), **environment)


def log_a_run(use: str, folder: Path, starts: list[tuple[dict[str, Any] | None, list[dict[str, Any]]]]) -> None:
    """Open a run's logs once for each start of its trainer, and write rows. Nothing may have failed.

    Args:
        use: The tracker.
        folder: The run's folder.
        starts: For each, the metrics in the checkpoint that it continues from, None in a new run, and the rows that it
            then writes.
    """
    given = [
        {"checkpoint": kept and {"step": kept["step"], "state": {"metrics": kept}}, "rows": rows}
        for kept, rows in starts
    ]
    run = {"use": use, "folder": str(folder), "run_id": RUN_ID, "starts": given, "close_s": _CLOSE_S}
    python(LOG_A_RUN, json.dumps(run))
