"""Processes on Ray whose launcher has a full disk, or whose cluster fails for a moment, without Ray."""

import asyncio
import importlib
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.config import load
from services.launch.bounded_log import BoundedLog
from services.launch.on_ray.actor import Started
from services.launch.on_ray.placement import Host
from services.launch.process.backend import Ending
from services.launch.process.spec import ProcessSpec, StopPhase
from services.recipe import Recipe

_ON_RAY = ("services.launch.on_ray.backend", "services.launch.on_ray.cluster")


class RayError(Exception):
    """Ray's own."""


class Remote:
    """A method of an actor, or a reference: what it resolves to is settled."""

    def __init__(self, value: Any) -> None:
        """Resolve to `value`, or fail with it."""
        self._value = value

    def remote(self, *_: Any) -> "Remote":
        """Call it."""
        return self

    def future(self) -> Future[Any]:
        """The reference's value."""
        future: Future[Any] = Future()
        if isinstance(self._value, Exception):
            future.set_exception(self._value)
        else:
            future.set_result(self._value)
        return future


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the backend, on a Ray that only has names."""
    ray, exceptions = ModuleType("ray"), ModuleType("ray.exceptions")
    vars(exceptions)["RayError"] = RayError
    vars(ray).update(exceptions=exceptions, kill=lambda actor: None, remote=lambda each: each)
    groups, strategies = ModuleType("ray.util.placement_group"), ModuleType("ray.util.scheduling_strategies")
    vars(groups).update(PlacementGroup=object, placement_group=None, remove_placement_group=lambda group: None)
    strategy = SimpleNamespace
    vars(strategies).update(
        NodeAffinitySchedulingStrategy=strategy,
        PlacementGroupSchedulingStrategy=lambda group, **_: strategy(group=group),
    )
    for module in (ray, exceptions, ModuleType("ray.util"), groups, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    kept = {name: sys.modules.pop(name) for name in _ON_RAY if name in sys.modules}
    yield importlib.import_module(_ON_RAY[0])
    for name in _ON_RAY:
        sys.modules.pop(name, None)
    sys.modules.update(kept)


async def test_an_error_that_does_not_fit_on_the_disk_ends_its_process_only(backend: Any, tmp_path: Path) -> None:
    """The launcher logs it, and starts the process again."""
    (tmp_path / "file").write_text("")
    error_file = tmp_path / "file" / "error.json"  # cannot be written
    spec = ProcessSpec(name="worker-0", command=[], environment={}, phase=StopPhase.WORK, error_file=error_file)
    actor = SimpleNamespace(wait=Remote((1, '{"message": "NATS is away"}')), read=Remote(b""), close=Remote(None))
    started = Started(address="h:1", host="h", node_id="n", pid=1)
    process = backend.RayProcess(actor, started, spec, BoundedLog(tmp_path / "worker-0.log"), lambda: None)
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
    cluster = SimpleNamespace(notice=notice, hosts=[Host(node_id="a", address="a", num_gpus=0)], launcher_id="a")
    placing = backend.RayBackend(cluster, load(Recipe, [], []), has_gpus=False, write=lambda line: None)
    with capture_logs() as lines:
        options = await placing._place("worker-0", "worker", asyncio.Event())
    assert (options["num_cpus"], failures) == (1, [])
    not_removed = ["placement_group.not_removed"] if fails == "group" else []
    assert sorted(line["event"] for line in lines) == [*not_removed, "process.not_placed"]
    assert len(removed) == len(not_removed)
