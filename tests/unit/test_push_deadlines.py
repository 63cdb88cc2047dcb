"""One deadline of a push for both sides: what the trainer allows its stages is what it tells the engines."""

from pathlib import Path

import pytest

from penstock.config import load
from penstock.errors import ConfigError
from services.recipe import Recipe
from services.rollout.engine.config import RolloutConfig
from services.trainer.config import WeightSyncConfig
from services.trainer.weight_sync.deadlines import PushDeadlines


@pytest.mark.parametrize(("transport", "expected"), [("broadcast", 450.0), ("delta", 650.0)])
def test_a_push_has_the_time_of_all_its_stages(transport: str, expected: float) -> None:
    """Prepare and pause, transfer and verify, three short calls; with delta the upload too."""
    config = WeightSyncConfig.model_validate(
        {"transport": transport, "stage_timeout_s": 10.0, "transfer_timeout_s": 200.0}
    )
    assert PushDeadlines.of(config).push_s == expected


def test_the_defaults_fit_each_other() -> None:
    """An engine accepts the deadline of every transport."""
    for transport in ("auto", "delta"):
        push_s = PushDeadlines.of(WeightSyncConfig.model_validate({"transport": transport})).push_s
        assert push_s <= RolloutConfig().push_deadline_s


def test_a_recipe_whose_engines_would_refuse_every_push_is_refused(tmp_path: Path) -> None:
    """Before anything starts, with both settings."""
    (tmp_path / "config.json").write_text("{}")
    overrides = [f"--model.path={tmp_path}", "--trainer.weight_sync.transfer_timeout_s=900"]
    with pytest.raises(ConfigError, match=r"rollout\.push_deadline_s = 1800 .* 1890 s .*transfer_timeout_s"):
        load(Recipe, (), overrides)
    load(Recipe, (), [*overrides, "--rollout.push_deadline_s=2000"])


def test_a_recipe_whose_engines_would_leave_a_forming_group_is_refused(tmp_path: Path) -> None:
    """Engines wait at least as long for a process group as the trainer does."""
    (tmp_path / "config.json").write_text("{}")
    overrides = [f"--model.path={tmp_path}", "--trainer.weight_sync.stage_timeout_s=60"]
    with pytest.raises(ConfigError, match=r"rollout\.prepare_deadline_s = 30 .* 60 s of trainer\.weight_sync\.stage"):
        load(Recipe, (), overrides)
    load(Recipe, (), [*overrides, "--rollout.prepare_deadline_s=60"])
