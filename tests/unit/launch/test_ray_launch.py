"""Starts of runs on Ray that are refused or broken off before anything runs there, without Ray."""

import asyncio
import importlib
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import load
from penstock.errors import ConfigError, SetupError
from penstock.runtime.security import Security
from services.launch.on_ray.placement import Host
from services.launch.run_folder import RunFolder
from services.launch.scaling.fleet import Fleet
from services.recipe import Recipe
from tests.support.launch.fake_ray import faking_ray


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of `penstock train` on Ray; its cluster and its inputs are not looked at."""
    with faking_ray(monkeypatch):
        module: Any = importlib.import_module("services.cli.train.on_ray")
        monkeypatch.setattr(module, "connected", lambda config: nullcontext())
        monkeypatch.setattr(module, "Cluster", lambda recipe, folder: None)
        monkeypatch.setattr(module.hub_models, "with_models", lambda recipe, fetch: recipe)
        monkeypatch.setattr(module.run_inputs, "require_at_launcher", lambda recipe: None)
        monkeypatch.setattr(module.run_inputs, "pin_inputs", lambda recipe, **_: recipe)
        yield module


@pytest.mark.parametrize("failure", [ConfigError("no room"), KeyboardInterrupt(), OSError("gone")], ids=repr)
def test_a_start_that_is_broken_off_leaves_no_folder(
    command: Any, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    """A mistake, Ctrl-C or a fault while hosts are examined."""

    async def examine(cluster: object, settings: Recipe) -> list[str]:
        raise failure

    monkeypatch.setattr(command.launch, "examine", examine)
    with pytest.raises(type(failure)):
        command.train(recipe, None, dry_run=False, view=False)
    assert list(recipe.run.dir.iterdir()) == []


async def test_services_of_the_launchers_host_have_different_ports(command: Any) -> None:
    """A run would begin and end when the second one finds its port taken; engines may be elsewhere."""

    async def look() -> None:
        pass

    host = Host(node_id="a", address="a", num_gpus=8, num_cpus=8, sees_run_folder=True)
    cluster: Any = SimpleNamespace(look=look, hosts=[host], has_gpus=True, lines=[])
    with pytest.raises(ConfigError, match=r"router\.port = 7001 is reward\.port too"):
        await command.launch.examine(cluster, load(Recipe, [], ["--router.port=7001", "--reward.port=7001"]))
    await command.launch.examine(cluster, load(Recipe, [], ["--router.port=7001", "--rollout.port=7001"]))


async def test_a_bus_that_does_not_answer_is_noticed_before_anything_is_placed(
    command: Any, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without Ray: no process has to find out."""
    monkeypatch.setattr("penstock.bus.connection._CONNECT_TIMEOUT_S", 0.2)
    recipe = recipe.model_copy(update={"bus": recipe.bus.model_copy(update={"url": "nats://127.0.0.1:1"})})
    cluster: Any = SimpleNamespace(own_address="127.0.0.1", hosts=[], has_gpus=False)
    folder = RunFolder.create(recipe.run)
    with pytest.raises(SetupError, match=r"^bus\.url = 'nats://127\.0\.0\.1:1'"):
        await command.launch.launch(recipe, folder, asyncio.Event(), security=Security(), cluster=cluster)


async def test_a_run_on_cpus_gains_engines_although_a_host_with_a_gpu_has_joined(
    command: Any, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes on CPUs to its end, so too few GPUs are no reason to refuse."""
    hosts = [Host(node_id="a", address="a", num_gpus=0, num_cpus=16, is_launchers=True)]
    said: list[str] = []

    async def nothing(*_: object, **__: object) -> None:
        pass

    async def scale(*_: object, fleet: Fleet, **__: object) -> bool:
        hosts.append(Host(node_id="b", address="b", num_gpus=1, num_cpus=16))
        cluster.has_gpus = True
        supervisor: Any = SimpleNamespace(has_begun_to_stop=False, add=lambda spec, has_left: None)
        said.extend(fleet.scale({"rollout": 3}, supervisor))
        return True

    cluster: Any = SimpleNamespace(own_address="127.0.0.1", hosts=hosts, has_gpus=False, keep_noticing=nothing)
    monkeypatch.setattr(command.launch.RayBackend, "reserve", nothing)
    monkeypatch.setattr(command.launch, "run_processes", scale)
    folder = RunFolder.create(recipe.run)
    assert await command.launch.launch(recipe, folder, asyncio.Event(), security=Security(), cluster=cluster)
    assert said == ["starting rollout-2"]
