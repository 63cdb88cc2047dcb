"""One deadline of a push for both sides: what the trainer allows its stages is what it tells the engines."""

from pathlib import Path

import pytest

from penstock.config import load
from penstock.errors import ConfigError
from services.launch.settings.service_settings import for_engine
from services.recipe import Recipe
from services.rollout.engine.config import MAX_PUSH_S
from services.trainer.config import WeightSyncConfig
from services.trainer.weight_sync.deadlines import PushDeadlines


@pytest.mark.parametrize(("transport", "expected"), [("broadcast", 420.0), ("delta", 620.0)])
def test_a_push_has_the_time_of_all_its_stages(transport: str, expected: float) -> None:
    """Prepare and pause, transfer and commit; with delta the upload too."""
    config = WeightSyncConfig.model_validate(
        {"transport": transport, "stage_timeout_s": 10.0, "transfer_timeout_s": 200.0}
    )
    assert PushDeadlines.of(config).push_s == expected


def test_the_defaults_fit_each_other() -> None:
    """An engine accepts the deadline of every transport."""
    for transport in ("auto", "delta"):
        push_s = PushDeadlines.of(WeightSyncConfig.model_validate({"transport": transport})).push_s
        assert push_s <= MAX_PUSH_S


def test_a_recipe_whose_engines_would_refuse_every_push_is_refused(tmp_path: Path) -> None:
    """Before anything starts, with both settings."""
    (tmp_path / "config.json").write_text("{}")
    model = f"--model.path={tmp_path}"
    with pytest.raises(ConfigError, match=r"transfer_timeout_s = 1800 and stage_timeout_s = 30 let .* 3660 s, .* 3600"):
        load(Recipe, (), [model, "--trainer.weight_sync.transfer_timeout_s=1800"])
    load(Recipe, (), [model, "--trainer.weight_sync.transfer_timeout_s=1700"])


def test_engines_wait_for_a_group_as_long_as_the_trainer(tmp_path: Path) -> None:
    """One setting for both sides."""
    (tmp_path / "config.json").write_text("{}")
    recipe = load(Recipe, (), [f"--model.path={tmp_path}", "--trainer.weight_sync.stage_timeout_s=60"])
    assert for_engine(recipe).group_timeout_s == 60
