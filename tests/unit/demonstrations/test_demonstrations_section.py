"""Section `[demonstrations]`: what it refuses, where it shows, and the rows that it leads to."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import structlog

from penstock import config as configuration
from penstock.errors import ConfigError, DataError
from services.cli import main
from services.doctor.inputs import check_data
from services.launch.checks.row_check import check_rows
from services.launch.settings import service_settings
from services.recipe import Recipe
from services.trainer.demonstrations.config import DemonstrationsConfig
from services.trainer.demonstrations.opening import open_demonstrations
from services.trainer.sft.batches import BatchesAhead
from services.trainer.telemetry.trackers import described

BUILT_IN: dict[str, Any] = {"sources": {"built_in": {"answer_format": r"\boxed{{answer}}"}}}


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of rows."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def opened(model: Path, folder: Path, rows: list[dict[str, Any]], **settings: Any) -> BatchesAhead:
    """Batches of two of these rows, in their order."""
    values = {
        "path": str(written(folder, rows)),
        "shuffle": False,
        "samples_per_step": 2,
        "cache_dir": folder / "cache",
    }
    return open_demonstrations(DemonstrationsConfig.model_validate({**values, **settings}), model, seed=0, position=0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["coef=0.5"], r"demonstrations: path is empty and there are no sources.*give path"),
        (["path=a.jsonl", "coef=0"], r"demonstrations\.coef = '0': Input should be greater than 0"),
        (["path=a.jsonl", "coef=-1"], r"demonstrations\.coef = '-1': Input should be greater than 0"),
        (["path=a.jsonl", "coef=nan"], r"demonstrations\.coef"),
        (["path=a.jsonl", "samples_per_step=0"], r"demonstrations\.samples_per_step = '0'"),
        (["path=a.jsonl", "max_prompt_tokens=9"], r"max_prompt_tokens = 9 bounds prompts.*max_tokens"),
        (["path=a.jsonl", "pools.easy_chance=0.5"], r"pools pass over rows.*leave easy_chance and hard_chance at 1"),
        (["path=a.jsonl", "sources.b.path=b.jsonl"], r"path and sources exclude each other"),
        (["path=a.jsonl", "weight=1"], r"unknown key demonstrations\.weight"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(overrides: list[str], words: str) -> None:
    """With the setting, its value and the remedy."""
    with pytest.raises(ConfigError, match=words):
        configuration.load(Recipe, [], [f"--demonstrations.{each}" for each in overrides])


def test_the_section_is_off_unless_it_is_there_and_survives_a_run_folder(tiny_model_path: Path, tmp_path: Path) -> None:
    """A run's config.toml reads back as the same; trackers get it as they get other sections."""
    assert Recipe().demonstrations is None
    values = {"model": {"path": tiny_model_path}, "demonstrations": {**BUILT_IN, "coef": 0.5}}
    recipe = Recipe.model_validate(values)
    (tmp_path / "config.toml").write_text(configuration.dump(recipe))
    assert configuration.load(Recipe, [tmp_path / "config.toml"]) == recipe
    settings = service_settings.for_trainer(recipe)
    assert settings.demonstrations == recipe.demonstrations
    assert described(settings)["demonstrations.coef"] == "0.5"
    without = service_settings.for_trainer(Recipe.model_validate({"model": {"path": tiny_model_path}}))
    assert not any(name.startswith("demonstrations") for name in described(without))


def test_a_dry_run_names_the_demonstrations(
    tiny_model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """How many, from where, and with which factor; and their file must be there."""
    file = written(tmp_path, [{"prompt": "a", "completion": "b"}])
    command = ["train", "tiny-cpu", f"--model.path={tiny_model_path}", "--dry-run"]
    assert main([*command, f"--demonstrations.path={file}", "--demonstrations.coef=0.2"]) == 0
    assert f"8 demonstrations a step from {file}, with coef 0.2" in capsys.readouterr().out
    assert main([*command, "--demonstrations.path=/nowhere.jsonl"]) == 2
    said = capsys.readouterr().err
    assert "demonstrations: data.path = '/nowhere.jsonl': there is no such file" in said
    assert main(command) == 0
    assert "demonstrations" not in capsys.readouterr().out


def test_columns_are_looked_at_before_engines_start(tiny_model_path: Path, tmp_path: Path) -> None:
    """A file of prompts without answers is refused by name; so is a template's variable that it does not read."""
    file = written(tmp_path, [{"prompt": "a"}])
    values: dict[str, Any] = {"model": {"path": tiny_model_path}, "demonstrations": {"path": str(file)}}
    with pytest.raises(DataError, match=r"^demonstrations: data\.path '.*rows\.jsonl'"):
        check_rows(Recipe.model_validate(values), with_sets=False, say=print)
    values["demonstrations"]["chat_template_kwargs"] = {"enable_thinking": False}
    with pytest.raises(ConfigError, match=r"^demonstrations\.chat_template_kwargs"):
        service_settings.for_trainer(Recipe.model_validate(values))
    values["demonstrations"] = {"path": "/nowhere.jsonl"}
    assert "demonstrations: data.path = '/nowhere.jsonl'" in check_data(Recipe.model_validate(values)).seen
    assert "nowhere" not in check_data(Recipe.model_validate(values), is_sft=True).seen


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, r"row 1: .*assistant"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}, r"row 1: .*empty"),
    ],
    ids=["without an answer", "with an empty one"],
)
def test_a_row_that_teaches_nothing_ends_the_start_or_is_dropped(
    tiny_model_path: Path, tmp_path: Path, row: dict[str, Any], words: str
) -> None:
    """As in supervised training, under the section's name."""
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(DataError, match=rf"^demonstrations: .*{words}"):
        opened(tiny_model_path, tmp_path, [good, row])
    with structlog.testing.capture_logs() as logs:
        batches = opened(tiny_model_path, tmp_path, [good, row, good], wrong_rows="drop")
    assert "data.wrong_rows_dropped" in [entry["event"] for entry in logs]
    batch = asyncio.run(taken(batches))
    assert (len(batch.sequences), batch.stop, batch.num_passed_over) == (2, 3, 1)


def test_demonstrations_that_are_too_long_are_passed_over_never_cut(tiny_model_path: Path, tmp_path: Path) -> None:
    """Counted in a warning; if all are, the start is refused with the section's own setting."""
    rows = [{"prompt": "a", "completion": text} for text in ("b", "much " * 99, "c")]
    with structlog.testing.capture_logs() as logs:
        batches = opened(tiny_model_path, tmp_path, rows, max_tokens=80)
    assert "data.overlong_prompts_dropped" in [entry["event"] for entry in logs]
    batch = asyncio.run(taken(batches))
    assert (len(batch.sequences), batch.num_passed_over) == (2, 1)
    with pytest.raises(DataError, match=r"^demonstrations: .*all 1 conversations .*raise demonstrations\.max_tokens"):
        opened(tiny_model_path, tmp_path, rows[1:2], max_tokens=80)


async def taken(batches: BatchesAhead) -> Any:
    """The first batch, with nothing read behind it."""
    return await batches.take(is_last=True)
