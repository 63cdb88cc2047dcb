"""A model that is served without a trainer: its processes are looked after."""

import asyncio
import errno
import os
import sys
from pathlib import Path

import pytest

from penstock.config import load
from penstock.runtime.security import Security
from services.launch import serving as launch_serving
from services.launch.process.bounded_log import BoundedLog
from services.launch.process.spec import ProcessSpec, StopPhase
from services.launch.run_folder import RunFolder
from services.launch.serving import serving
from services.recipe import Recipe
from tests.support.waiting import until


async def test_processes_are_looked_after_although_a_folder_failed_once(
    tmp_path: Path, nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network folder that is stale for a moment costs one look, not all that follow."""
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    size, has_failed = BoundedLog._size, asyncio.Event()

    def stale_once(log: BoundedLog) -> int:
        if log.path == folder.launcher_log and not has_failed.is_set():
            has_failed.set()
            raise OSError(errno.ESTALE, "Stale file handle")
        return size(log)

    async def is_ready(_: str) -> bool:
        return has_failed.is_set()

    engine = ProcessSpec(
        name="rollout-0",
        command=[sys.executable, "-c", "import signal; signal.pause()"],
        environment=dict(os.environ),
        phase=StopPhase.SERVE,
        is_ready=is_ready,
    )
    monkeypatch.setattr(BoundedLog, "_size", stale_once)
    monkeypatch.setattr(launch_serving, "process_specs", lambda *_: [engine])
    lines: list[str] = []
    recipe = load(Recipe, [], [f"--bus.url={nats_url}"])
    async with serving(recipe, folder, asyncio.Event(), Security.from_environment(), lines.append):
        await until(lambda: any("rollout-0 is up after" in line for line in lines))
