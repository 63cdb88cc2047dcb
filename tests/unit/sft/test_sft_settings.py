"""What `penstock sft` refuses before it reads data or model, and what it warns of, with the reason and the remedy."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import structlog

from penstock.config import dump, load
from penstock.errors import ConfigError
from services.launch.settings.service_settings import for_sft
from services.recipe import Recipe
from services.trainer.sft.loop import Observer
from services.trainer.sft.main import train

pytestmark = pytest.mark.leaves_behind("matplotlib keeps the fonts that a thread has used open", "descriptor")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"evaluation": {"every": 5, "sets": {"a": {}}}},
            r"evaluation\.every, .* engines.*sft\.validate_every.*penstock eval",
        ),
        ({"sft": {"validate_every": 5}}, r"sft\.validate_every = 5 needs rows .*\[evaluation\.sets\.test\]"),
        ({"data": {"pools": {"easy_chance": 0.5}}}, r"data\.pools .*leave easy_chance and hard_chance at 1"),
        ({"data": {"max_prompt_tokens": 9}}, r"data\.max_prompt_tokens = 9 .*sft\.max_tokens"),
        ({"trainer": {"record_groups": True}}, r"trainer\.record_groups = true .*leave it out"),
        ({"metrics": {"port": 9400}}, r"metrics\.port = 9400 .*--metrics\.port=, .*metrics\.jsonl .*trackers\.use"),
        ({"metrics": {"port": 0}}, r"metrics\.port = 0 .*leave it out"),
        ({"sft": {"epochs": 2, "batch_unit": "tokens"}}, r"sft\.epochs = 2 .*give trainer\.num_steps"),
        (
            {"sft": {"epochs": 1}, "data": {"sources": {"a": {}, "b": {"weight": 9}}}},
            r"sft\.epochs = 1 with 2 sources: .*by their weights.*give trainer\.num_steps",
        ),
        ({"model": None}, r"section \[model\] is missing"),
        ({"data": {"path": "/nowhere.parquet"}}, r"'/nowhere\.parquet': there is no such file"),
    ],
    ids=str,
)
def test_what_does_not_apply_is_refused(tiny_model_path: Path, sections: dict[str, Any], words: str) -> None:
    """Nothing that a person wrote is ignored where they would expect it to act."""
    recipe = Recipe.model_validate({"model": {"path": tiny_model_path}, **sections})
    with pytest.raises(ConfigError, match=words):
        for_sft(recipe)


def test_one_recipe_serves_supervised_training_and_reinforcement_learning(tiny_model_path: Path) -> None:
    """Sections of engines, rewards and algorithm are left alone."""
    recipe = Recipe.model_validate(
        {
            "model": {"path": tiny_model_path},
            "sft": {"validate_every": 5},
            "evaluation": {"sets": {"a": {}}},
            "algorithm": {"preset": "dapo"},
            "rollout": {"replicas": 3},
            "sampling": {"temperature": 0.7},
        }
    )
    assert for_sft(recipe).sft.validate_every == 5


def test_a_port_of_a_recipe_or_of_a_resumed_run_can_be_unset(tiny_model_path: Path, tmp_path: Path) -> None:
    """TOML has no null, and a run that is resumed brings its recipe; its next config.toml names no port."""
    file = tmp_path / "config.toml"
    file.write_text(f'model.path = "{tiny_model_path}"\nmetrics.port = 9400\n')
    recipe = load(Recipe, [file], ["--metrics.port="])
    for_sft(recipe)
    file.write_text(dump(recipe))
    for_sft(load(Recipe, [file]))


def test_a_single_source_may_have_a_name(tiny_model_path: Path) -> None:
    """Epochs are refused where weights deal the rows of several sources."""
    recipe = Recipe.model_validate(
        {"model": {"path": tiny_model_path}, "sft": {"epochs": 2}, "data": {"sources": {"a": {}}}}
    )
    assert for_sft(recipe).sft.epochs == 2


async def test_a_run_that_ends_within_its_warm_up_is_doubted(tiny_model_path: Path, tmp_path: Path) -> None:
    """Its steps are those that the epochs make."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    recipe = Recipe.model_validate(
        {
            "model": {"path": tiny_model_path},
            "data": {"path": str(tmp_path / "rows.jsonl"), "answer_format": "", "cache_dir": tmp_path / "cache"},
            "sft": {"batch_size": 1, "epochs": 2},
            "trainer": {"device": "cpu", "micro_batch_tokens": 100, "optimizer": {"warmup_steps": 2}},
        }
    )
    with structlog.testing.capture_logs() as logs:
        await train(for_sft(recipe), tmp_path, asyncio.Event(), Observer())
    [warning] = [entry for entry in logs if entry["event"] == "settings.doubtful"]
    assert warning["log_level"] == "warning"
    assert "trainer.optimizer.warmup_steps = 2 is not below the number of steps, 2: the run ends" in warning["reason"]
