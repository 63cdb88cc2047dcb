"""What the tests of the launcher share."""

from pathlib import Path

import pytest

from penstock.config import load
from services.recipe import Recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """A small recipe that keeps its runs in `tmp_path`."""
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "recipe.toml"
    path.write_text(
        f'[run]\nname = "r"\ndir = "{tmp_path}/runs"\n[model]\npath = "{tmp_path}"\n[rollout]\nreplicas = 2\n'
    )
    return load(Recipe, [path])
