"""Evaluation sets: what they take from the recipe, their rows, and what is refused before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from penstock import config as configuration
from penstock.errors import ConfigError, DataError
from penstock.records import GroupId
from services.recipe import Recipe
from services.trainer.data.config import DataConfig
from services.trainer.data.dataset import open_dataset
from services.trainer.data.sources.opening import built_in
from services.trainer.evaluation.sets import EvaluationSet, open_sets

ROWS = [
    {"problem": "1 + 1?", "answer": "2", "level": "easy"},
    {"problem": "2 + 2?", "answer": "4", "level": "easy"},
    {"problem": "3 + 3?", "answer": "6", "level": "hard"},
]


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A file of three rows."""
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(file)


def recipe(tmp_path: Path, **sections: Any) -> Recipe:
    """The recipe, read from its file as always."""
    file = tmp_path / "recipe.toml"
    file.write_text(tomli_w.dumps(sections))
    return configuration.load(Recipe, [file])


def opened(tmp_path: Path, **settings: Any) -> EvaluationSet:
    """The only set of a recipe."""
    loaded = recipe(tmp_path, evaluation={"sets": {"s": settings}})
    return open_sets(loaded.evaluation, loaded.data)["s"]


def test_a_set_takes_what_it_leaves_out_from_data_and_sampling(tmp_path: Path, rows: str) -> None:
    """Profile, prompt and sampling as in training, unless the set says otherwise; never the split of another path."""
    loaded = recipe(
        tmp_path,
        data={"path": "train.parquet", "split": "train", "profile": "math", "prompt_suffix": " Box it."},
        sampling={"max_new_tokens": 77, "temperature": 0.5},
        evaluation={"sets": {"test": {"path": rows, "temperature": 0.0}, "same": {"split": "val"}}},
    )
    test, same = loaded.evaluation.sets["test"], loaded.evaluation.sets["same"]
    assert (test.profile, test.prompt_suffix, test.max_new_tokens, test.temperature) == ("math", " Box it.", 77, 0.0)
    assert (test.path, test.split) == (rows, "")
    assert (same.path, same.split, same.temperature) == ("train.parquet", "val", 0.5)
    again = tmp_path / "again.toml"
    again.write_text(configuration.dump(loaded))
    assert configuration.load(Recipe, [again]) == loaded


def test_a_split_of_the_file_that_training_reads_is_refused(tmp_path: Path, rows: str) -> None:
    """The set would be measured on the rows that are trained on."""
    trained = Path(rows).rename(tmp_path / "train.jsonl")
    loaded = recipe(tmp_path, data={"path": str(trained)}, evaluation={"sets": {"s": {"split": "test"}}})
    with pytest.raises(ConfigError, match=r"evaluation\.sets\.s: data\.path '.*train\.jsonl' is of one split, 'train'"):
        open_sets(loaded.evaluation, loaded.data)


def test_rows_keep_the_order_of_the_file(tmp_path: Path, rows: str) -> None:
    """The first num_prompts of them, and the prompt of each may be played by one version only."""
    found = opened(tmp_path, path=rows, num_prompts=2, samples_per_prompt=4, temperature=0, profile="math")
    assert [found[row].golds for row in range(len(found))] == [("2",), ("4",)]
    group_id = GroupId(run_id="r", index=1, attempt=0, trainer_epoch="e")
    prompt = found.prompt(1, found[1], group_id, version=7, images=())
    assert (prompt.purpose, prompt.exact_version, prompt.min_version, prompt.num_samples) == ("s", 7, 7, 4)
    assert (prompt.sampling.temperature, prompt.sampling.top_k, prompt.profile) == (0.0, 0, "math")


def test_the_built_in_problems_are_drawn_apart_from_training(tmp_path: Path) -> None:
    """Another seed: row 0 is not training's row 0."""
    found = opened(tmp_path, num_prompts=8)
    loaded = recipe(tmp_path)
    from services.trainer.data.sources.opening import open_sources

    trained = open_sources(loaded.data)[""]
    assert [found[row].images for row in range(8)] != [trained[row].images for row in range(8)]


def test_a_set_may_be_of_pictures_that_no_training_draws(tmp_path: Path) -> None:
    """Not one of them is among the rows of an epoch of training."""
    held_out = opened(tmp_path, pictures="held_out", num_prompts=40, kinds=["x", "y"])
    same = opened(tmp_path, num_prompts=40, kinds=["x", "y"])
    trained = built_in(DataConfig(kinds=("x", "y")), num_rows=1000)
    seen = {trained[row].images for row in range(1000)}
    assert not {held_out[row].images for row in range(40)} & seen
    assert {same[row].images for row in range(40)} <= seen
    with pytest.raises(ConfigError, match=r"sets\.s.*pictures = 'held_out' chooses among built-in pictures, and path"):
        opened(tmp_path, path="a.jsonl", pictures="held_out")


def test_held_out_pictures_stay_built_in_where_training_reads_other_data(tmp_path: Path, rows: str) -> None:
    """So a recipe with such a set can be run on data of one's own, without taking the set out."""
    sets = {"held_out": {"pictures": "held_out", "num_prompts": 4}, "own": {}}
    loaded = recipe(tmp_path, data={"path": rows, "split": "train"}, evaluation={"sets": sets})
    held_out = loaded.evaluation.sets["held_out"]
    assert (held_out.path, held_out.split) == ("", "")
    assert loaded.evaluation.sets["own"].path == rows
    sources = {"a": {"path": rows}, "b": {"path": rows}}
    several = recipe(tmp_path, data={"sources": sources}, evaluation={"sets": {"held_out": sets["held_out"]}})
    assert len(open_sets(several.evaluation, several.data)["held_out"]) == 4


def test_more_prompts_than_rows_are_refused(tmp_path: Path, rows: str) -> None:
    """Of the slice, not of the file."""
    with pytest.raises(ConfigError, match=r"evaluation\.sets\.s\.num_prompts = 3, but .* has 2 rows; lower it"):
        opened(tmp_path, path=f"{rows}@[1:3]", num_prompts=3)


def test_an_empty_set_is_refused(tmp_path: Path, rows: str) -> None:
    """A slice without rows."""
    with pytest.raises(DataError, match=r"evaluation\.sets\.s: data\.path .* holds no rows"):
        opened(tmp_path, path=f"{rows}@[3:3]")


def test_a_set_without_the_columns_is_refused(tmp_path: Path) -> None:
    """Its error names the set."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"problem": "1?"}\n')
    with pytest.raises(DataError, match=r"evaluation\.sets\.s: .*answer"):
        opened(tmp_path, path=str(file))


def test_a_wrong_row_is_refused_before_anything_is_played(tmp_path: Path) -> None:
    """Not when its turn comes."""
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, {"problem": "?", "answer": "", "level": "x"}]))
    with pytest.raises(DataError, match=r"evaluation\.sets\.s: .*row 3"):
        opened(tmp_path, path=str(file))


def test_a_column_that_does_not_travel_cannot_break_a_set_down(tmp_path: Path, rows: str) -> None:
    """The error says which could."""
    found = opened(tmp_path, path=rows, break_down_by="level")
    assert found.described(2, found[2]).source == "hard"
    with pytest.raises(DataError, match=r"break_down_by = 'source' is no column .* the first row has level"):
        opened(tmp_path, path=rows, break_down_by="source")


def test_a_set_may_be_broken_down_by_a_column_that_its_first_row_leaves_empty(tmp_path: Path) -> None:
    """Such rows count under none."""
    file = tmp_path / "a.jsonl"
    file.write_text(
        "".join(
            json.dumps({**row, "level": row["level"] if number else None}) + "\n" for number, row in enumerate(ROWS)
        )
    )
    found = opened(tmp_path, path=str(file), break_down_by="level")
    assert [found.described(row, found[row]).source for row in (0, 2)] == ["none", "hard"]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    """Its error names the set and the file."""
    with pytest.raises(ConfigError, match=r"evaluation\.sets\.s: .*nowhere\.parquet.*there is no such file"):
        opened(tmp_path, path="nowhere.parquet")


@pytest.mark.parametrize("name", ["train", "a b", "a/b", ""])
def test_names_that_cannot_travel_are_refused(tmp_path: Path, name: str) -> None:
    """A set's name is the purpose of its prompts, and part of their identity."""
    with pytest.raises(ConfigError, match="cannot name an evaluation set"):
        recipe(tmp_path, evaluation={"sets": {name: {}}})


def test_a_set_needs_a_path_beside_several_sources(tmp_path: Path, rows: str) -> None:
    """There is none that it could take over."""
    with pytest.raises(ConfigError, match=r"evaluation\.sets\.s has no path, and \[data\.sources\] has several"):
        recipe(tmp_path, data={"sources": {"a": {"path": rows}}}, evaluation={"sets": {"s": {}}})


def of_own_sampling(folder: Path, *samplings: Any) -> str:
    """A file of rows with these values in column `own`."""
    file = folder / "own.jsonl"
    rows = [{"problem": "1 + 1?", "answer": "2", "own": own} for own in samplings]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_rows_choose_their_own_sampling(tmp_path: Path) -> None:
    """What a row leaves out, or has null, is the set's."""
    file = of_own_sampling(
        tmp_path,
        {"temperature": 0, "top_p": 0.5, "top_k": 20, "max_new_tokens": 7},
        {"temperature": None, "top_k": -1},
        None,
    )
    found = opened(tmp_path, path=file, sampling_column="own", temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=8)
    group_id = GroupId(run_id="r", index=1, attempt=0, trainer_epoch="e")
    played = [found.prompt(row, found[row], group_id, version=7, images=()).sampling for row in range(3)]
    assert [(each.temperature, each.top_p, each.top_k, each.max_new_tokens) for each in played] == [
        (0.0, 0.5, 20, 7),
        (0.7, 0.9, 0, 8),
        (0.7, 0.9, 5, 8),
    ]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"temperature": -1}, r"temperature = -1; want a number from 0 to 100"),
        ({"temperature": True}, r"temperature = True; want a number"),
        ({"top_p": 0}, r"top_p = 0; want a number above 0 and at most 1"),
        ({"top_k": 0.5}, r"top_k = 0\.5; want an integer"),
        ({"max_new_tokens": 0}, r"max_new_tokens = 0; want an integer of at least 1"),
        ({"min_p": 0.1}, r"'min_p'; a row may have its own max_new_tokens, temperature, top_p, top_k"),
        ("greedy", r"greedy; want a struct"),
    ],
)
def test_a_row_of_wrong_sampling_is_named(tmp_path: Path, own: Any, words: str) -> None:
    """With its file, number, column, value, and what is wanted."""
    with pytest.raises(
        DataError, match=rf"evaluation\.sets\.s: data\.path '.*own\.jsonl', row 1: .*'own' holds {words}"
    ):
        opened(tmp_path, path=of_own_sampling(tmp_path, {}, own), sampling_column="own")


def test_rows_of_training_have_no_temperature_of_their_own(tmp_path: Path) -> None:
    """The trainer's log-probabilities are those of the run's."""
    file = of_own_sampling(tmp_path, {"temperature": 0.5})
    with pytest.raises(DataError, match=r"row 0: column 'own' holds .*the run's temperature, top_p and top_k"):
        open_dataset(DataConfig(path=file, sampling_column="own"))
