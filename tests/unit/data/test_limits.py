"""Budgets of episodes: from the settings of a source, and in their place from a row."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import DataError
from penstock.model.chat.chat_template import Renderer
from penstock.model.families.qwen_vl import ImageGrid
from penstock.records import Limits
from services.trainer.admission.filters import FilterReason
from services.trainer.data.config import DataConfig
from services.trainer.data.dataset import Dataset, open_dataset
from services.trainer.data.prompt_length import PromptLimit
from services.trainer.evaluation.config import inherit
from tests.support.trainer.data.pictures import png


def opened(tmp_path: Path, rows: list[dict[str, Any]], limit: PromptLimit | None = None, **settings: Any) -> Dataset:
    """A data set of these rows, in order."""
    table = pa.Table.from_pylist([{"problem": "?", "answer": "1", **row} for row in rows])
    pq.write_table(table, tmp_path / "a.parquet")
    return open_dataset(DataConfig(path=str(tmp_path / "a.parquet"), shuffle=False, **settings), limit=limit)


def test_a_source_has_limits(tmp_path: Path) -> None:
    """0 is no limit."""
    [row] = opened(tmp_path, [{}], limits={"max_turns": 3, "episode_timeout_s": 9.5}).sources[""]
    assert row.limits == Limits(max_turns=3, episode_timeout_s=9.5)


@pytest.mark.parametrize("as_text", [False, True])
def test_a_row_replaces_limits_one_by_one(tmp_path: Path, as_text: bool) -> None:
    """As a struct or as JSON; what it leaves out or has as null stays, and 0 lifts a limit."""
    cells: list[Any] = [{"max_turns": 5, "max_images": None}, {"max_turns": 0, "max_images": 4}, None]
    rows = [{"own": json.dumps(cell) if as_text and cell else cell} for cell in cells]
    data = opened(tmp_path, rows, limits_column="own", limits={"max_turns": 2, "max_pixels": 7})
    assert [data.sources[""][number].limits for number in range(3)] == [
        Limits(max_turns=5, max_pixels=7),
        Limits(max_images=4, max_pixels=7),
        Limits(max_turns=2, max_pixels=7),
    ]


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ({"max_turn": 3}, "row 0: column 'own' holds 'max_turn', which is no limit; known: max_turns, max_tokens"),
        ({"max_turns": -1}, "row 0: column 'own' holds max_turns = -1: .* greater than or equal to 0"),
        ({"max_turns": 1.5}, r"row 0: column 'own' holds max_turns = 1\.5: "),
        ({"max_turns": True}, "row 0: column 'own' holds max_turns = True; want a number"),
        ({"max_turns": "3"}, "row 0: column 'own' holds max_turns = '3'; want a number"),
        ("{", "row 0: column 'own' holds text that is no JSON"),
        ([3], r"row 0: column 'own' holds \[3\]; want a struct of limits"),
    ],
)
def test_limits_that_a_row_cannot_have(tmp_path: Path, cell: Any, words: str) -> None:
    """The row and the key are named."""
    with pytest.raises(DataError, match=words):
        opened(tmp_path, [{"own": cell}], limits_column="own")


def test_a_limits_column_that_is_missing_is_named(tmp_path: Path) -> None:
    """As every other column that the settings name."""
    with pytest.raises(DataError, match=r"no column 'budget'; .* --data.limits_column="):
        opened(tmp_path, [{}], limits_column="budget")


@pytest.mark.parametrize(("limits", "word"), [({"max_images": 1}, "max_images = 1"), ({"max_pixels": 9}, "max_pixels")])
def test_a_prompt_beyond_its_own_budget_is_a_wrong_row(tmp_path: Path, limits: dict[str, int], word: str) -> None:
    """Before anything is played."""
    rows = [{"problem": "<image><image>?", "images": [png("red"), png("blue")]}]
    with pytest.raises(DataError, match=rf"row 0: its images come to \d+, above limits\.{word}"):
        opened(tmp_path, rows, limits=limits)
    assert opened(tmp_path, rows, limits={"max_images": 2, "max_pixels": 10**6})[0].limits.max_images == 2


def test_a_prompt_that_fills_its_own_limit_of_tokens_is_passed_over(
    tmp_path: Path, renderer: Renderer, tiny_model_path: Path
) -> None:
    """One token of room is enough. The start counts them, by the rows' own limits too, and refuses a source of them."""
    limit = PromptLimit(renderer, ImageGrid.of(tiny_model_path), max_tokens=500)
    rows = [{"own": None}, {"problem": "How long?", "own": {"max_tokens": 0}}]
    short, long = (limit.num_tokens(opened(tmp_path, rows)[number]) for number in range(2))
    for max_tokens, num_passed_over in ((long, 1), (long + 1, 0)):
        data = opened(tmp_path, rows, limit, limits={"max_tokens": max_tokens})
        assert data.playable(0) is not FilterReason.OVERLONG_PROMPT
        assert (data.playable(1) is FilterReason.OVERLONG_PROMPT) == (num_passed_over == 1)
        assert data.num_passed_over() == num_passed_over
    lifted = opened(tmp_path, rows, limit, limits={"max_tokens": short}, limits_column="own")
    assert [lifted.playable(number) is FilterReason.OVERLONG_PROMPT for number in range(2)] == [True, False]
    assert lifted.num_passed_over() == 1
    own = [{"own": {"max_tokens": short}}, {"problem": "How long?", "own": {"max_tokens": short + 1}}]
    with pytest.raises(DataError, match=rf"the shortest of them {short}; raise max_tokens in the rows' own limits"):
        opened(tmp_path, own, limit, limits_column="own")
    words = (
        rf"all 2 prompts are longer than the {short - 1} tokens .*, the shortest of them {short}; raise data\.limits"
    )
    with pytest.raises(DataError, match=rf"{words}\.max_tokens = {short}, the budget of prompt and answers together"):
        opened(tmp_path, rows, limit, limits={"max_tokens": short})


def test_limits_of_rows_are_kept_with_their_lengths(
    tmp_path: Path, renderer: Renderer, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start measures no row again and counts the same."""
    limit = PromptLimit(renderer, ImageGrid.of(tiny_model_path), max_tokens=500, model="tiny")
    rows = [{"own": {"max_tokens": 1 if number < 7 else 400}} for number in range(500)]
    settings: dict[str, Any] = {"limits_column": "own", "cache_dir": tmp_path / "cache"}
    assert opened(tmp_path, rows, limit, **settings).num_passed_over() == 7
    monkeypatch.delattr(PromptLimit, "num_tokens")
    config = DataConfig(path=str(tmp_path / "a.parquet"), shuffle=False, **settings)
    assert open_dataset(config, limit=limit).num_passed_over() == 7


def test_sources_and_sets_take_over_single_limits() -> None:
    """And a run's config.toml keeps of each source what it says itself."""
    data = DataConfig.model_validate(
        {
            "limits": {"max_turns": 3, "max_images": 2},
            "sources": {"a": {"path": "a.jsonl", "limits": {"max_images": 9}}, "b": {"path": "b.jsonl"}},
        }
    )
    assert {name: (each.limits.max_turns, each.limits.max_images) for name, each in data.sources.items()} == {
        "a": (3, 9),
        "b": (3, 2),
    }
    dumped = data.model_dump(mode="json")["sources"]
    assert dumped["a"]["limits"] == {"max_images": 9}
    assert "limits" not in dumped["b"]
    recipe = inherit(
        {
            "data": {"path": "a.jsonl", "limits": {"max_turns": 3}},
            "evaluation": {"sets": {"test": {"split": "test", "limits": {"max_images": 1}}}},
        }
    )
    assert recipe["evaluation"]["sets"]["test"]["limits"] == {"max_turns": 3, "max_images": 1}
