"""What a recipe says of ranks reaches whatever starts them, in both kinds of training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services.launch.settings import service_settings
from services.recipe import Recipe
from services.trainer import assembly
from services.trainer.sft import assembly as sft_assembly
from services.trainer.sft.loop import Observer
from tests.support.trainer.families import random_qwen3_vl_moe, write_model

ALONE = {"hsdp_replicas": 1, "expert_parallel": 1, "sequence_parallel": 1}
SIZES = [
    {"ranks": 8, "hsdp_replicas": 4, "sequence_parallel": 2},
    {"ranks": 6, "expert_parallel": 3},
]
"""Replicas do not go with divided experts."""


class OpenedError(Exception):
    """Ends what would go on with the backend."""


class Seam:
    """In place of what opens a backend or follows rank 0: keeps what it is given."""

    def __init__(self) -> None:
        self.given: dict[str, int] = {}

    def __call__(self, backend: Mapping[str, Any], *, num_ranks: int) -> None:
        self.given = {name: backend[name] for name in ALONE} | {"ranks": num_ranks}
        raise OpenedError


def recipe_of(model: Path, sizes: Mapping[str, int]) -> Recipe:
    """A run on the built-in problems."""
    return Recipe.model_validate(
        {"model": {"path": model}, "data": {"answer_format": "{answer}"}, "trainer": {"device": "cpu", **sizes}}
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose experts can be divided."""
    return write_model(random_qwen3_vl_moe(), tmp_path_factory.mktemp("models") / "mixture")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("follows", [False, True], ids=["rank 0", "another"])
def test_the_trainers_ranks_are_those_of_the_recipe(
    model: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], follows: bool
) -> None:
    """On rank 0, and on the others where torchrun starts them: each reads the recipe for itself."""
    settings, seam = service_settings.for_trainer(recipe_of(model, sizes)), Seam()
    monkeypatch.setattr(assembly, "follow_torchrun" if follows else "open_ranks", seam)
    monkeypatch.setattr(assembly, "is_follower", lambda: follows)
    with pytest.raises(OpenedError):
        (assembly.followed if follows else assembly.on_ranks)(settings)
    assert seam.given == ALONE | sizes


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_ranks_of_supervised_training_are_those_of_the_recipe(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    """The same settings."""
    settings, seam = service_settings.for_sft(recipe_of(model, sizes)), Seam()
    monkeypatch.setattr(sft_assembly, "open_supervised_ranks", seam)
    with pytest.raises(OpenedError):
        sft_assembly.assemble(settings, tmp_path / "run", Observer())
    assert seam.given == ALONE | sizes
