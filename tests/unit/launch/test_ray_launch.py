"""Starts of runs on Ray that are refused or broken off before anything runs there, without Ray."""

import importlib
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from penstock.errors import ConfigError
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
        monkeypatch.setattr(module.service_settings, "require_at_launcher", lambda recipe: None)
        monkeypatch.setattr(module.service_settings, "pin_inputs", lambda recipe, **_: recipe)
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
