"""Folders that the package `datasets` itself has saved."""

from pathlib import Path

import datasets
import pytest

from services.trainer.data.config import DataConfig
from services.trainer.data.dataset import open_dataset
from tests.support.trainer.data.pictures import jpeg


def rows(*answers: str) -> datasets.Dataset:
    """As Geometry3K is published: images as a sequence of Image, which Arrow keeps as bytes and path."""
    columns = {
        "problem": ["<image>Find x."] * len(answers),
        "answer": list(answers),
        "images": [[{"bytes": jpeg(), "path": None}]] * len(answers),
    }
    text = datasets.Value("string")
    features = datasets.Features({"problem": text, "answer": text, "images": datasets.List(datasets.Image())})
    return datasets.Dataset.from_dict(columns, features=features)


def read(folder: Path, **settings: str) -> list[str]:
    """The answers of one epoch, in order; every row has its picture."""
    dataset = open_dataset(DataConfig(path=str(folder), shuffle=False, **settings))
    found = [dataset[position] for position in range(dataset.num_rows)]
    assert [example.images for example in found] == [(jpeg(),)] * len(found)
    return [example.golds[0] for example in found]


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_data_set_that_datasets_saved(tmp_path: Path, num_shards: int) -> None:
    """In the order in which it has its rows, however many files they are in."""
    rows(*"01234").save_to_disk(tmp_path / "one", num_shards=num_shards)
    assert read(tmp_path / "one") == list("01234")


def test_a_dictionary_that_datasets_saved(tmp_path: Path) -> None:
    """Training takes its split, evaluation names another."""
    datasets.DatasetDict({"test": rows("9"), "train": rows("0", "1")}).save_to_disk(tmp_path / "all")
    assert read(tmp_path / "all") == ["0", "1"]
    assert read(tmp_path / "all", split="test") == ["9"]
