"""The page of an evaluation's prompts and answers."""

import base64
import json
from pathlib import Path

import msgspec
import pytest

from services.trainer.data.config import DataConfig
from services.trainer.evaluation.config import EvaluationConfig, EvaluationSetConfig
from services.trainer.evaluation.outcome import PlayedPrompt, PlayedSample
from services.trainer.evaluation.samples_page import PAGE_FILE, ROWS_PER_SET, write_page
from services.trainer.evaluation.sets import EvaluationSet, open_sets
from tests.support.trainer.data.pictures import png

NUM_ROWS = 100
SAMPLE = PlayedSample(text="It is <b>3</b>.", score=1.0, extracted="3", status="", finish_reason="stop", num_tokens=7)


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, EvaluationSet]:
    """A set of rows with a picture each."""
    picture = base64.b64encode(png(size=(64, 48))).decode()
    rows = [{"images": [picture], "problem": f"<image>Find x{n}.", "answer": "3"} for n in range(NUM_ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = EvaluationSetConfig(path=str(tmp_path / "rows.jsonl"), profile="math")
    return open_sets(EvaluationConfig(sets={"s": config}), DataConfig())


def played(sets: dict[str, EvaluationSet], row: int, *samples: PlayedSample, error: str = "") -> PlayedPrompt:
    """A row's outcome."""
    described = sets["s"].described(row, sets["s"][row])
    return msgspec.structs.replace(described, samples=samples, error=error)


def page(tmp_path: Path, sets: dict[str, EvaluationSet], *outcomes: PlayedPrompt) -> str:
    """What is written."""
    write_page(tmp_path, "An <evaluation>", sets, {"s": outcomes})
    assert not list(tmp_path.glob("*.tmp"))
    return (tmp_path / PAGE_FILE).read_text()


def test_prompts_have_their_pictures_answers_and_scores(tmp_path: Path, sets: dict[str, EvaluationSet]) -> None:
    """Text stands as the policy wrote it; only right answers are marked so."""
    wrong = msgspec.structs.replace(SAMPLE, text="four", score=0.0, extracted="4", finish_reason="length")
    unjudged = msgspec.structs.replace(SAMPLE, text="five", score=None, extracted="", error="the verifier is away")
    found = page(tmp_path, sets, played(sets, 3, SAMPLE, wrong, unjudged))
    assert found.count('<img src="data:image/png;base64,') == 1
    assert found.count('class="answer right"') == 1
    for words in (
        "An &lt;evaluation&gt;",
        "s, row 3",
        "Find x3.",
        "It is &lt;b&gt;3&lt;/b&gt;.",
        "score 1 · extracted 3 · 7 tokens<",
        "score 0 · extracted 4 · 7 tokens · ended by length",
        "not judged · 7 tokens · the verifier is away",
        '<span class="gold">3</span>',
    ):
        assert words in found, words


def test_a_row_that_could_not_be_played_says_why(tmp_path: Path, sets: dict[str, EvaluationSet]) -> None:
    """With its picture, which may be the reason."""
    found = page(tmp_path, sets, played(sets, 0, error="the prompt is too long"))
    assert "s, row 0, could not be played: the prompt is too long" in found
    assert "<img" in found


def test_a_large_set_is_shown_in_part(tmp_path: Path, sets: dict[str, EvaluationSet]) -> None:
    """From its first row to its last, in their order, whatever order they were played in."""
    outcomes = [played(sets, row, *[SAMPLE] * 8) for row in range(NUM_ROWS)]
    found = page(tmp_path, sets, *reversed(outcomes))
    assert found.count("<article>") == ROWS_PER_SET
    assert found.count('class="answer right"') == 4 * ROWS_PER_SET
    assert found.index("s, row 0 ") < found.index("s, row 99 ")


def test_a_row_that_is_gone_is_left_out(tmp_path: Path, sets: dict[str, EvaluationSet]) -> None:
    """The file was replaced while the evaluation ran; the numbers are reported all the same."""
    outcomes = [played(sets, row, SAMPLE) for row in (0, 1)]
    (tmp_path / "rows.jsonl").write_text("")
    assert "<article>" not in page(tmp_path, sets, *outcomes)
