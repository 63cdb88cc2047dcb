"""The overlays of examples/: each is a recipe over the tiny one, and what it names can be loaded where it says."""

import re
from pathlib import Path

import pytest

from penstock import config, shipped
from services.launch.checks.known_names import require_names
from services.recipe import Recipe
from services.reward.worker_tasks.custom_verifier import load_verifier
from services.rollout.worker.environments.loading import load_class
from services.trainer.algorithm.plugin import load_function, require_functions
from tests.conftest import ROOT

_OVERLAYS = sorted((ROOT / "examples").glob("*/recipe.toml"), key=str)
_PYTHONPATH = re.compile(r"PYTHONPATH=(\S+) ")


def test_there_are_overlays() -> None:
    """Of a reward, an environment, an agent and an algorithm."""
    assert {path.parent.name for path in _OVERLAYS} == {"agent", "algorithm", "environment", "reward"}


@pytest.mark.parametrize("overlay", _OVERLAYS, ids=lambda path: path.parent.name)
def test_what_an_overlay_names_can_be_loaded(overlay: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the PYTHONPATH of the command in its first line of prose, from the root of the repository."""
    monkeypatch.chdir(ROOT)
    first = next(line for line in overlay.read_text().splitlines() if not line.startswith("#:"))
    assert first.endswith(f"penstock train tiny-cpu {overlay.relative_to(ROOT)}")
    for folder in _PYTHONPATH.findall(first):
        monkeypatch.syspath_prepend(ROOT / folder)
    load_function.cache_clear()
    recipe = config.load(Recipe, [shipped.find_recipe(Path("tiny-cpu")), overlay], [])
    require_names(recipe, sets=True)
    require_functions(recipe.algorithm)
    for name, spec in recipe.reward.verifiers.items():
        load_verifier(name, spec)
    for environment in recipe.worker.environments.values():
        load_class(environment.class_, environment.args)
    for agent in recipe.worker.agents.values():
        load_function(agent.function, "worker.agents")
    named = (recipe.reward.verifiers, recipe.worker.environments, recipe.worker.agents)
    assert any(named) or recipe.algorithm.trust_region.function
