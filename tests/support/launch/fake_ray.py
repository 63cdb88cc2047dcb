"""Ray's names, for what runs on Ray where that is not installed."""

import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

IMPORT_RAY = (
    "services.launch.on_ray.backend",
    "services.launch.on_ray.cluster",
    "services.launch.on_ray.launch",
    "services.cli.train.on_ray",
)
"""The modules that do."""


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


@contextmanager
def faking_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have what is imported during the context find a Ray that only has names."""
    ray, exceptions = ModuleType("ray"), ModuleType("ray.exceptions")
    vars(exceptions)["RayError"] = RayError
    vars(ray).update(exceptions=exceptions, kill=lambda actor: None, remote=lambda each: each)
    groups, strategies = ModuleType("ray.util.placement_group"), ModuleType("ray.util.scheduling_strategies")
    vars(groups).update(PlacementGroup=object, placement_group=None, remove_placement_group=lambda group: None)
    strategy = SimpleNamespace
    vars(strategies).update(
        NodeAffinitySchedulingStrategy=lambda node_id, **_: strategy(node_id=node_id),
        PlacementGroupSchedulingStrategy=lambda group, **_: strategy(group=group),
    )
    for module in (ray, exceptions, ModuleType("ray.util"), groups, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    kept = {name: module for name in IMPORT_RAY if (module := _forget(name)) is not None}
    yield
    for name in IMPORT_RAY:
        _forget(name)
    sys.modules.update(kept)


def _forget(name: str) -> ModuleType | None:
    """Have the module imported anew, also as an attribute of its package."""
    package, _, attribute = name.rpartition(".")
    if package in sys.modules:
        vars(sys.modules[package]).pop(attribute, None)
    return sys.modules.pop(name, None)
