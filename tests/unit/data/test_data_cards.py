"""Which files a data set's card, the front matter of README.md, gives to a configuration and a split."""

import json
from pathlib import Path

import pytest
import structlog

from penstock.errors import DataError
from services.trainer.data.config import DataConfig
from services.trainer.data.dataset import open_dataset


def write(file: Path, answer: int) -> None:
    """A file with one problem."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"problem": "?", "answer": answer}))


def answers(path: Path, **settings: str) -> list[str]:
    """The answers of one epoch, in the order of the files."""
    dataset = open_dataset(DataConfig(path=str(path), shuffle=False, **settings))
    return [dataset[position].golds[0] for position in range(dataset.num_rows)]


CARD = """---
configs:
- config_name: plain
  data_files:
  - split: train
    path: a/*.jsonl
  - split: held_out
    path: [b/1.jsonl]
- config_name: other
  data_files: b/*
---
A data set.
"""


def test_the_card_says_which_files_belong_together(tmp_path: Path) -> None:
    """As on the Hub; with several configurations a person has to choose."""
    write(tmp_path / "a/0.jsonl", 0)
    write(tmp_path / "b/1.jsonl", 1)
    write(tmp_path / "b/2.jsonl", 2)
    (tmp_path / "README.md").write_text(CARD)
    assert answers(tmp_path, hub_config="plain") == ["0"]
    assert answers(tmp_path, hub_config="plain", split="held_out") == ["1"]
    assert answers(tmp_path, hub_config="other") == ["1", "2"]
    write(tmp_path / "a/0.parquet", 3)
    assert answers(tmp_path, hub_config="plain") == ["0"], "of another format than the card's"
    assert answers(tmp_path, hub_config="other") == ["1", "2"]
    with pytest.raises(
        DataError, match=r"has no configuration ''; it has plain, other\. Name one with --data\.hub_config"
    ):
        answers(tmp_path)
    with pytest.raises(DataError, match=r"has no split 'test'; it has train, held_out\. Name one with --data\.split="):
        answers(tmp_path, hub_config="plain", split="test")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jsonl", ["0"]),
        ("**/*.jsonl", ["0", "1", "2"]),
        ("**", ["0", "1", "2"]),
        ("a/**/*.jsonl", ["1", "2"]),
        ("a/*", ["1"]),
        ("./a/b/2.jsonl", ["2"]),
    ],
)
def test_patterns_of_a_card_choose_the_files_that_datasets_chooses(
    tmp_path: Path, pattern: str, expected: list[str]
) -> None:
    """A star ends at a slash, and two stars are any number of folders."""
    for number, file in enumerate(("0.jsonl", "a/1.jsonl", "a/b/2.jsonl")):
        write(tmp_path / file, number)
    (tmp_path / "README.md").write_text(f"---\nconfigs: [{{config_name: default, data_files: '{pattern}'}}]\n---\n")
    assert answers(tmp_path) == expected


FOLDERS = """---
configs:
- config_name: alg
  data_dir: algebra
- config_name: geo
  data_dir: ./tests/geometry/
  data_files:
  - split: train
    path: "*.jsonl"
  - split: held_out
    path: hard/*.jsonl
---
"""


def test_a_card_may_give_each_configuration_a_folder(tmp_path: Path) -> None:
    """Names of files inside it determine splits unless the card does, and the card's patterns are relative to it."""
    names = ("algebra/train.jsonl", "algebra/test.jsonl", "tests/geometry/a.jsonl", "tests/geometry/hard/b.jsonl")
    for number, name in enumerate(names):
        write(tmp_path / name, number)
    (tmp_path / "README.md").write_text(FOLDERS)
    assert answers(tmp_path, hub_config="alg") == ["0"]
    assert answers(tmp_path, hub_config="alg", split="test") == ["1"]
    assert answers(tmp_path, hub_config="geo") == ["2"]
    assert answers(tmp_path, hub_config="geo", split="held_out") == ["3"]
    with pytest.raises(DataError, match=r"has no configuration ''; it has alg, geo\. Name one with --data\.hub_config"):
        answers(tmp_path)


def test_a_card_whose_folder_is_named_like_a_split(tmp_path: Path) -> None:
    """What lies in it is training data unless the names inside say otherwise."""
    write(tmp_path / "tests/a.jsonl", 0)
    write(tmp_path / "b.jsonl", 1)
    (tmp_path / "README.md").write_text("---\nconfigs: [{config_name: default, data_dir: tests}]\n---\n")
    assert answers(tmp_path, split="train") == ["0"]


@pytest.mark.parametrize(
    "configs",
    [
        "plain",
        "[plain]",
        "3",
        "[{data_files: true}]",
        "[{data_files: {train: [{}]}}]",
        "[{data_files: {train: null}}]",
        "[{data_files: [{path: a.jsonl}]}]",
        "[{data_dir: [a, b]}]",
    ],
)
def test_a_card_that_names_no_files_is_refused(tmp_path: Path, configs: str) -> None:
    """Other files than its author meant would be read."""
    write(tmp_path / "train.jsonl", 0)
    (tmp_path / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    with pytest.raises(DataError, match=r"configs.* in the front matter of its README\.md does not say which files"):
        answers(tmp_path)


@pytest.mark.parametrize("entry", ["data_files: data/*.parquet", "data_dir: data", "data_dir: /"])
def test_a_card_whose_files_are_not_there_is_refused(tmp_path: Path, entry: str) -> None:
    """Others in the folder may be held out."""
    write(tmp_path / "train.jsonl", 0)
    (tmp_path / "README.md").write_text(f"---\nconfigs: [{{{entry}}}]\n---\n")
    with pytest.raises(DataError, match=r"its README\.md names no file that is there and can be read"):
        answers(tmp_path)


def test_a_card_that_is_no_yaml_says_nothing(tmp_path: Path) -> None:
    """The names of the files do."""
    write(tmp_path / "train.jsonl", 0)
    (tmp_path / "README.md").write_text("---\na: [1\n b: }\n---\n")
    with structlog.testing.capture_logs() as logs:
        assert answers(tmp_path) == ["0"]
    assert [entry["event"] for entry in logs] == ["data.card_unreadable"]


def test_an_entry_that_names_nothing_has_the_folder_where_others_name_theirs(tmp_path: Path) -> None:
    """It can be chosen, and nothing is chosen silently in its place."""
    write(tmp_path / "a/0.jsonl", 0)
    write(tmp_path / "b/1.jsonl", 1)
    (tmp_path / "README.md").write_text("---\nconfigs: [{config_name: a, data_dir: a}, {config_name: all}]\n---\n")
    assert answers(tmp_path, hub_config="a") == ["0"]
    assert answers(tmp_path, hub_config="all") == ["0", "1"]
    with pytest.raises(DataError, match="it has a, all"):
        answers(tmp_path)
