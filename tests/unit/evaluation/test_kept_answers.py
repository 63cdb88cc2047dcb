"""Which answers of an interrupted evaluation count when it goes on."""

from pathlib import Path
from typing import Any

import pytest
import structlog

from services.trainer.data.config import DataConfig
from services.trainer.evaluation.config import EvaluationConfig, EvaluationSetConfig
from services.trainer.evaluation.kept_answers import SETS_FILE, read_kept_answers, write_set_settings
from services.trainer.evaluation.outcome import PlayedPrompt, PlayedSample
from services.trainer.evaluation.report import SAMPLES_FILE, SamplesFile
from services.trainer.evaluation.sets import EvaluationSet, open_sets
from services.trainer.evaluation.summary import summarize

VERSION = 5
SAMPLE = PlayedSample(text="2", score=1.0, extracted="2", status="", finish_reason="stop", num_tokens=1)


def sets(names: str = "ab", **settings: Any) -> dict[str, EvaluationSet]:
    """Sets of two prompts; those of `settings` are of the set a."""
    own = {"a": settings}
    config = EvaluationConfig(
        sets={name: EvaluationSetConfig(**{"num_prompts": 2, **own.get(name, {})}) for name in names}
    )
    return open_sets(config, DataConfig())


def answer(name: str, row: int, *, version: int = VERSION) -> PlayedPrompt:
    """Of one sample."""
    return PlayedPrompt(
        set_name=name, row=row, source="", messages=[], golds=(), samples=(SAMPLE,), versions=(version, version)
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An evaluation that was interrupted after one row of b and both of a."""
    SamplesFile(tmp_path / SAMPLES_FILE, [answer("a", 0), answer("b", 1), answer("a", 1)])
    write_set_settings(tmp_path, sets())
    return tmp_path


def kept(folder: Path, now: dict[str, EvaluationSet], *, version: int = VERSION) -> list[tuple[str, int]]:
    """The rows that count."""
    return [(each.set_name, each.row) for each in read_kept_answers(folder, now, version=version)]


def test_answers_of_unchanged_sets_count(folder: Path) -> None:
    """Those of another version do not, nor those of rows that the set no longer has."""
    assert kept(folder, sets()) == [("a", 0), ("a", 1), ("b", 1)]
    assert kept(folder, sets(), version=VERSION + 1) == []
    assert kept(folder, sets(num_prompts=1, pass_score=0.5)) == [("a", 0), ("b", 1)]


def test_a_row_counts_once(tmp_path: Path) -> None:
    """A trainer that was frozen and replaced wrote its answer beside its successor's."""
    SamplesFile(tmp_path / SAMPLES_FILE, [answer("a", 0), answer("a", 1), answer("a", 0)])
    write_set_settings(tmp_path, sets())
    assert kept(tmp_path, sets()) == [("a", 0), ("a", 1)]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("samples_per_prompt", 4),
        ("temperature", 0.5),
        ("max_new_tokens", 9),
        ("profile", "math"),
        ("pictures", "held_out"),
    ],
)
def test_answers_to_other_settings_are_discarded(folder: Path, setting: str, value: Any) -> None:
    """Their set is played anew, and the log says why."""
    with structlog.testing.capture_logs() as logs:
        assert kept(folder, sets(**{setting: value})) == [("b", 1)]
    [event] = logs
    assert (event["event"], event["set_name"]) == ("evaluation.answers_discarded", "a")
    assert (event["num_prompts"], event["settings"]) == (2, [setting])


def test_more_samples_per_prompt_can_be_summarised(folder: Path) -> None:
    """pass@2 of one sample is no number."""
    now = sets(samples_per_prompt=4)
    answers = [each for each in read_kept_answers(folder, now, version=VERSION) if each.set_name == "a"]
    assert summarize(answers, samples_per_prompt=4, pass_score=1.0).num_prompts == 0


def test_answers_of_a_set_that_is_gone_are_discarded(folder: Path) -> None:
    """And all where nothing says how they were played."""
    assert kept(folder, sets("b")) == [("b", 1)]
    (folder / SETS_FILE).unlink()
    assert kept(folder, sets()) == []
