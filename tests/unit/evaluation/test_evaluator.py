"""When a run evaluates, and which evaluations a resumed run keeps."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.recipe import Recipe
from services.trainer.evaluation.config import EvaluationConfig, EvaluationSetConfig
from services.trainer.evaluation.evaluator import Evaluator
from services.trainer.evaluation.report import EVALUATIONS_FILE

NOBODY: Any = None
DISCARDED_FILE = "evaluations-discarded.jsonl"


async def evaluator(folder: Path, *, step: int = 0, is_resumed: bool = True, **settings: Any) -> Evaluator:
    """Of a run of ten steps, opened."""
    config = EvaluationConfig(sets={"s": EvaluationSetConfig()}, **settings)
    found = Evaluator(
        config,
        {},
        bus=NOBODY,
        images=NOBODY,
        trackers=NOBODY,
        folder=folder,
        run_id="run",
        epoch="a",
        step=step,
        num_steps=10,
        is_resumed=is_resumed,
    )
    await found.open()
    return found


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, []),
        ({"every": 4}, [4, 8]),
        ({"at_start": True}, [0]),
        ({"at_end": True}, [10]),
        ({"every": 5, "at_start": True, "at_end": True}, [0, 5, 10]),
    ],
)
async def test_when_a_run_evaluates(tmp_path: Path, settings: dict[str, Any], steps: list[int]) -> None:
    """Not at all unless the recipe says when."""
    found = await evaluator(tmp_path, **settings)
    assert [step for step in range(11) if found.is_due(step)] == steps


async def test_a_resumed_run_keeps_what_is_of_its_own_weights(tmp_path: Path) -> None:
    """Lines of later steps, and one that a crash cut short, are moved; those steps are due again."""
    lines = [json.dumps({"step": step}) for step in (2, 4, 6)]
    (tmp_path / EVALUATIONS_FILE).write_text("\n".join([*lines, '{"step": 8, "se']))
    found = await evaluator(tmp_path, step=4, every=2)
    assert [step for step in range(11) if found.is_due(step)] == [6, 8, 10]
    assert (tmp_path / EVALUATIONS_FILE).read_text().splitlines() == lines[:2]
    assert (tmp_path / DISCARDED_FILE).read_text().splitlines() == [lines[2], '{"step": 8, "se']


async def test_a_run_goes_on_behind_a_line_that_was_cut_at_any_byte(tmp_path: Path) -> None:
    """Evaluations whose lines are whole are kept, and no other line of the file is left."""
    path, whole = tmp_path / EVALUATIONS_FILE, b'{"step": 2}\n{"step": 4}\n'
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        found = await evaluator(tmp_path, step=6, every=2)
        kept = [step for step in (2, 4) if not found.is_due(step)]
        assert kept == [2, 4][: (whole[:cut] + b"\n").count(b"}\n")]
        assert path.read_text() == "".join(f'{{"step": {step}}}\n' for step in kept)


async def test_a_line_that_lost_only_its_newline_is_kept_and_ended(tmp_path: Path) -> None:
    """The next line does not go on where it stopped."""
    path = tmp_path / EVALUATIONS_FILE
    path.write_text('{"step": 2}')
    found = await evaluator(tmp_path, step=4, every=2)
    assert not found.is_due(2)
    assert path.read_text() == '{"step": 2}\n'


async def test_a_run_that_begins_anew_evaluates_its_first_model_again(tmp_path: Path) -> None:
    """A crash before the first checkpoint left its line; the model may be another one by now."""
    path = tmp_path / EVALUATIONS_FILE
    path.write_text('{"step": 0}\n')
    assert not (await evaluator(tmp_path, at_start=True)).is_due(0)
    assert (await evaluator(tmp_path, at_start=True, is_resumed=False)).is_due(0)
    assert (path.read_text(), (tmp_path / DISCARDED_FILE).read_text()) == ("", '{"step": 0}\n')


def test_a_run_cannot_evaluate_without_sets() -> None:
    """A recipe that says when must say what."""
    with pytest.raises(ValueError, match="need a set; add one"):
        Recipe.model_validate({"evaluation": {"every": 5}})
