"""Which interrupted evaluations `penstock eval --resume` goes on with."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock import config as configuration
from penstock.errors import ConfigError
from services.cli import main
from services.cli.evaluation.begun import BEGUN_FILE, Begun, read_begun, require_same, require_same_rows
from services.recipe import Recipe
from services.trainer.data.config import DataConfig
from services.trainer.evaluation.config import EvaluationConfig, EvaluationSetConfig
from services.trainer.evaluation.outcome import PlayedPrompt, PlayedSample
from services.trainer.evaluation.report import SAMPLES_FILE, read_samples
from services.trainer.evaluation.sets import EvaluationSet, open_sets
from tests.support.trainer.data.pictures import png


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model."""
    folder = tmp_path / "model"
    (folder / "parts").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "parts" / "a.safetensors").write_bytes(b"weights")
    return folder


def recipe(model: Path, *overrides: str) -> Recipe:
    """Of an evaluation with one set."""
    given = [f"--model.path={model}", "--evaluation.sets.s.profile=math", *overrides]
    return configuration.load(Recipe, [], given)


def check(model: Path, begun: Begun, *overrides: str) -> None:
    """Go on with `begun` under these overrides."""
    require_same(begun, model.parent, before=recipe(model), now=recipe(model, *overrides))


@pytest.mark.parametrize(
    "override",
    [
        "--evaluation.sets.s.num_prompts=7",
        "--evaluation.sets.s.pass_score=0.5",
        "--worker.concurrency=3",
        "--worker.environment_processes=3",
        "--rollout.replicas=4",
        "--rollout.gpu_memory_fraction=0.5",
        "--reward.workers=5",
        "--run.grace_s=1",
        "--log.level=debug",
    ],
)
def test_what_changes_no_answer_may_change(model: Path, override: str) -> None:
    """More rows, more processes, other ports."""
    check(model, Begun.with_engines(model, "now"), override)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("--evaluation.sets.s.temperature=0.5", "evaluation.sets.s.temperature differs"),
        ("--evaluation.sets.s.profile=mcq", "evaluation.sets.s.profile differs"),
        ("--evaluation.sets.t.profile=math", "evaluation.sets.t.*, .* and [0-9]+ more differ from"),
        ("--model.path=/elsewhere", "model.path differs"),
        ("--rollout.context_length=99", "rollout.context_length differs"),
        ("--rollout.dtype=float32", "rollout.dtype differs"),
        ("--trainer.float32_head=true", "trainer.float32_head differs"),
        ("--rollout.sglang.attention_backend=fa3", "rollout.sglang"),
        ("--evaluation.sets.s.limits.max_turns=3", "evaluation.sets.s.limits differs"),
        ("--worker.episode_timeout_s=3", "worker.episode_timeout_s differs"),
        ("--reward.profiles.math.format_weight=0.5", "reward.profiles"),
        ("--reward.deadline_s=9", "reward.deadline_s differs"),
    ],
)
def test_answers_to_other_settings_are_not_mixed(model: Path, override: str, key: str) -> None:
    """The error names each setting that differs."""
    with pytest.raises(ConfigError, match=f"--resume .*{key}.*leave the override out, or begin a new evaluation"):
        check(model, Begun.with_engines(model, "now"), override)


def test_another_model_in_the_same_folder_is_refused(model: Path) -> None:
    """A file that was written again, one more, and one less; each is named."""
    begun = Begun.with_engines(model, "now")
    check(model, begun)
    weights = model / "parts" / "a.safetensors"
    os.utime(weights, ns=(0, 0))
    with pytest.raises(ConfigError, match=r"the model .* has changed since it was begun \(parts/a.safetensors\)"):
        check(model, begun)
    (model / "b.json").write_text("")
    weights.unlink()
    with pytest.raises(ConfigError, match=r"\(b.json, parts/a.safetensors\); begin a new evaluation"):
        check(model, begun)


def test_another_version_of_penstock_is_refused(model: Path) -> None:
    """It may render or judge otherwise."""
    begun = msgspec.structs.replace(Begun.with_engines(model, "now"), penstock="0.0.0")
    with pytest.raises(ConfigError, match=r"begun with Penstock 0\.0\.0, and this is .*; install penstock==0\.0\.0"):
        check(model, begun)


def test_what_was_begun_is_read_back(model: Path, tmp_path: Path) -> None:
    """A folder without it, or with half of it, has nothing that can go on."""
    begun = Begun.with_engines(model, "now")
    begun.write(tmp_path)
    assert read_begun(tmp_path) == begun
    assert set(begun.files) == {"config.json", "parts/a.safetensors"}
    for content in (b"", (tmp_path / BEGUN_FILE).read_bytes()[:-3]):
        (tmp_path / BEGUN_FILE).write_bytes(content)
        with pytest.raises(ConfigError, match="no `penstock eval` has begun to play in it"):
            read_begun(tmp_path)


ROW = {"problem": "<image>Find x.", "answer": "3", "sampling": {}, "level": 1}


def opened(tmp_path: Path, row: dict[str, Any], picture: bytes) -> dict[str, EvaluationSet]:
    """A set of this row."""
    (tmp_path / "a.png").write_bytes(picture)
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "images": ["a.png"]}))
    config = EvaluationSetConfig(path=str(tmp_path / "rows.jsonl"), profile="math", sampling_column="sampling")
    return open_sets(EvaluationConfig(sets={"s": config}), DataConfig())


@pytest.mark.parametrize(
    ("row", "color"),
    [
        ({**ROW, "answer": "4"}, "red"),
        ({**ROW, "problem": "<image>Find y."}, "red"),
        (ROW, "blue"),
        ({**ROW, "sampling": {"temperature": 0.5}}, "red"),
        ({**ROW, "level": 2}, "red"),
    ],
    ids=["answer", "prompt", "picture", "sampling", "further column"],
)
def test_rows_that_are_others_now_are_refused(tmp_path: Path, row: dict[str, Any], color: str) -> None:
    """The data file was replaced: something of a row that was played is not what it was. A line that an earlier version
    wrote says less, and is compared as far as it goes."""
    sets = opened(tmp_path, ROW, png("red"))
    sample = PlayedSample(text="3", score=1.0, extracted="3", status="", finish_reason="stop", num_tokens=1)
    described = sets["s"].described(0, sets["s"][0])
    answer = msgspec.structs.replace(described, samples=(sample,), versions=(0, 0))
    (tmp_path / SAMPLES_FILE).write_bytes(msgspec.json.encode(answer))
    kept: list[PlayedPrompt] = read_samples(tmp_path / SAMPLES_FILE)
    require_same_rows(tmp_path, sets, kept)
    require_same_rows(tmp_path, sets, [msgspec.structs.replace(each, terms="") for each in kept])
    with pytest.raises(ConfigError, match=r"row 0 of evaluation\.sets\.s is not the one that was answered; bring"):
        require_same_rows(tmp_path, opened(tmp_path, row, png(color)), kept)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model=a"], "goes on with the model that it was begun with; leave out --model"),
        (["--url=http://b/v1"], "leave out --url"),
        (["--url-model=m"], "leave out --url-model"),
        (["r.toml"], "brings its own recipe; leave out r.toml"),
        ([], "no `penstock eval` has begun to play in it"),
    ],
)
def test_mistakes_are_answered_in_a_line(
    tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything starts; the folder is one of `penstock train`, say."""
    (tmp_path / "config.toml").write_text('[evaluation.sets.s]\nprofile = "math"\n')
    assert main(["eval", "--resume", str(tmp_path), *arguments]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert words in line
