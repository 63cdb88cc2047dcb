"""Processes on Ray whose launcher has a full disk, or whose cluster fails for a moment, without Ray."""

import asyncio
import importlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.config import load
from services.launch.on_ray.actor import Started
from services.launch.on_ray.placement import Host
from services.launch.process.backend import Ending
from services.launch.process.bounded_log import BoundedLog
from services.launch.process.spec import ProcessSpec, StopPhase
from services.recipe import Recipe
from tests.support.launch.fake_ray import RayError, Remote, faking_ray
from tests.support.waiting import HANG_S


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the backend, on a Ray that only has names."""
    with faking_ray(monkeypatch):
        yield importlib.import_module("services.launch.on_ray.backend")


async def test_an_error_that_does_not_fit_on_the_disk_ends_its_process_only(backend: Any, tmp_path: Path) -> None:
    """The launcher logs it, and starts the process again."""
    (tmp_path / "file").write_text("")
    error_file = tmp_path / "file" / "error.json"  # cannot be written
    spec = ProcessSpec(name="worker-0", command=[], environment={}, phase=StopPhase.WORK, error_file=error_file)
    actor = SimpleNamespace(wait=Remote((1, '{"message": "NATS is away"}')), read=Remote(b""), close=Remote(None))
    started = Started(address="h:1", host="h", node_id="n", pid=1)
    lost: Any = None
    process = backend.RayProcess(actor, started, spec, BoundedLog(tmp_path / "worker-0.log"), lost)
    with capture_logs() as lines:
        assert await process.wait() == Ending(code=1)
    [line] = [line for line in lines if line["event"] == "error.not_kept"]
    assert "NATS is away" in line["error"]


@pytest.mark.parametrize("fails", ["head", "group"])
async def test_a_process_is_placed_when_ray_answers_again(
    backend: Any, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A head that is away, or a host that dies as it is chosen, fails one try, and the group is removed later."""
    failures, removals, removed = [RayError("gone")], [RayError("not now")], []

    async def notice() -> None:
        if fails == "head" and failures:
            raise failures.pop()

    def group(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(ready=lambda: Remote(failures.pop() if failures else True))

    def remove(group: Any) -> None:
        if removals:
            raise removals.pop()
        removed.append(group)

    monkeypatch.setattr(backend, "placement_group", group)
    monkeypatch.setattr(backend, "remove_placement_group", remove)
    monkeypatch.setattr(backend, "_PLACE_EVERY_S", 0.01)
    host = Host(node_id="a", address="a", num_gpus=0, num_cpus=1)
    cluster = SimpleNamespace(notice=notice, hosts=[host], launcher_id="a")
    placing = backend.RayBackend(cluster, load(Recipe, [], []), has_gpus=False, write=lambda line: None)
    with capture_logs() as lines:
        options = await placing._place("worker-0", "worker", asyncio.Event())
    assert (options["num_cpus"], failures) == (1, [])
    not_removed = ["placement_group.not_removed"] if fails == "group" else []
    assert sorted(line["event"] for line in lines) == [*not_removed, "process.not_placed"]
    assert len(removed) == len(not_removed)


async def test_a_head_that_is_slow_holds_nothing_else_up(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray removes a placement group in a call that blocks; meanwhile the launcher hears signals and processes."""
    went_on, removed = threading.Event(), []

    def remove(group: Any) -> None:
        removed.append((group, went_on.wait(HANG_S)))

    monkeypatch.setattr(backend, "remove_placement_group", remove)
    placing = backend.RayBackend(SimpleNamespace(), load(Recipe, [], []), has_gpus=False, write=lambda line: None)
    placing._groups["worker-0"] = "group"
    asyncio.get_running_loop().call_soon(went_on.set)
    await placing.forget(ProcessSpec(name="worker-0", command=[], environment={}, phase=StopPhase.WORK))
    assert removed == [("group", True)]
