"""Which columns are read without settings, and when a person has to say it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import DataError
from services.trainer.data.config import DataConfig
from services.trainer.data.dataset import open_dataset
from services.trainer.data.rows.columns import Columns, cell, find_columns
from tests.support.trainer.data.pictures import png

PICTURE = {"bytes": png(), "path": None}


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"problem": "?", "answer": "1"}, Columns(text="problem", gold="answer", images=())),
        ({"problem": "?", "answer": "1", "image": PICTURE}, Columns(text="problem", gold="answer", images=("image",))),
        (
            {"images": [PICTURE], "problem": "?", "answer": "1", "choices": [1], "ground_truth": "B", "id": "7"},
            Columns(text="problem", gold="answer", images=("images",)),
        ),
        (
            {"prompt": [], "reward_model": {}, "extra_info": {"answer": "1", "question": "?"}},
            Columns(text="prompt", gold="reward_model", images=()),
        ),
        (
            {"prompt": [], "reward_spec": {}, "env_class": "geometry3k"},
            Columns(text="prompt", gold="reward_spec", images=()),
        ),
        ({"input": "?", "label": "1", "metadata": {}}, Columns(text="input", gold="label", images=())),
        ({"instruction": "", "problem": "?", "answer": "1"}, Columns(text="problem", gold="answer", images=())),
        ({"conversations": [], "label": "1"}, Columns(text="conversations", gold="label", images=())),
        ({"question": "?", "answer": 1, "image": None}, Columns(text="question", gold="answer", images=("image",))),
        (
            {"problem": "?", "solution": "<answer>1</answer>", "image": PICTURE},
            Columns(text="problem", gold="solution", images=("image",)),
        ),
        ({"problem": "?", "answer": "1", "solution": "It is 1."}, Columns(text="problem", gold="answer", images=())),
        (
            {"question": "?", "image": "images/1.jpg", "decoded_image": PICTURE, "answer": "1"},
            Columns(text="question", gold="answer", images=("decoded_image",)),
        ),
        (
            {"problem": "?", "answer": "1", "images": [PICTURE], "original": "images/1.jpg", "files": ["a.png"]},
            Columns(text="problem", gold="answer", images=("images",)),
        ),
        (
            {"problem": "a.png", "answer": "b.png", "note": "a.png is\nnot b.png", "page": "http://x.org/png"},
            Columns(text="problem", gold="answer", images=()),
        ),
        (
            {"problem": "?", "answer": "1", "link": "https://[site]/a.png", "source": "http://www.x.org\uff1ax"},
            Columns(text="problem", gold="answer", images=()),
        ),
    ],
)
def test_published_names_are_found(row: dict[str, Any], found: Columns) -> None:
    """Each data set of the table in docs/training/data.md needs no setting."""
    assert replace(find_columns(row, DataConfig(), name="x"), extra=()) == found


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"problem": "?", "prompt": "?", "answer": "1"}, "problem and prompt could both.*--data.problem_column=prompt"),
        ({"question": "?", "query": "?", "answer": "1"}, "question and query could both hold the prompt's text"),
        ({"instruction": "Add.", "input": "", "answer": "5"}, "columns instruction and input are one prompt together"),
        ({"problem": "?", "answer": "1", "reward_model": {}}, "answer and reward_model could both.*answer_column="),
        (
            {"problem": "?", "answer": "1", "image": PICTURE, "images": []},
            "images and image could both.*images_column=",
        ),
        ({"problem": "?", "answer": "1", "decoded_image": PICTURE}, "'decoded_image' holds images.*=decoded_image, or"),
        ({"problem": "?", "answer": "1", "pic": "data:image/png;base64,xx"}, "'pic' holds images that would not be"),
        ({"problem": "?", "answer": "1", "pics": [png()]}, "'pics' holds images that would not be read"),
        ({"problem": "?", "answer": "1", "image_path": "a.PNG"}, "'image_path' holds images that would not be read"),
        ({"problem": "?", "answer": "1", "link": "https://x.org/a.webp?size=9"}, "'link' holds images that would"),
        ({"problem": "?", "answer": "1", "pic": {"bytes": None, "path": "a.gif"}}, "'pic' holds images that would"),
        ({"problem": "?", "answer": "1", "pic": {"url": "http://x.org/a.jpeg"}}, "'pic' holds images that would not"),
        ({"problem": "?", "answer": "1", "pics": [None, {"image": PICTURE}]}, "'pics' holds images that would not be"),
        (
            {"question": "?", "answer": "1", "image": PICTURE, "image_2": PICTURE, "image_3": PICTURE},
            r"'image_2' holds images that would not be read beside those of 'image'; read all with "
            r'--data\.images_column=\["image","image_2","image_3"\], or one with --data\.images_column=image$',
        ),
        ({"problem": "?", "answer": "1", "images": [PICTURE], "after": [png()]}, "'after' holds images that would not"),
        ({"problem": "?", "answer": "1", "image": None, "pic": "data:image/png;base64,xx"}, "'pic' holds images that"),
        (
            {"question": "?", "answer": "1", "image": "1.jpg", "left": PICTURE, "right": PICTURE},
            "'left' holds images that would not be read beside those of 'image'",
        ),
    ],
)
def test_what_could_mean_two_things_is_asked(row: dict[str, Any], words: str) -> None:
    """With the settings that answer it; images are never left unread in silence."""
    with pytest.raises(DataError, match=words):
        find_columns(row, DataConfig(), name="x")


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_column_of_images_may_begin_without_one(tmp_path: Path, suffix: str) -> None:
    """The first rows decide, not the first one: a whole file would be read as text."""
    picture = {"bytes": png(), "path": None} if suffix == "parquet" else {"url": "http://x.org/a.png"}
    rows = [{"problem": "?", "answer": "1", "shown": None}] * 2 + [{"problem": "?", "answer": "1", "shown": picture}]
    file = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="column 'shown' holds images that would not be read"):
        open_dataset(DataConfig(path=str(file)))
    assert open_dataset(DataConfig(path=f"{file}@[:2]"))[0].images == ()


def test_a_column_of_images_beside_another_can_be_left_out() -> None:
    """By naming those that are meant, in the form that the error shows."""
    row = {"question": "?", "answer": "1", "image": PICTURE, "image_2": PICTURE}
    assert find_columns(row, DataConfig(images_column="image"), name="x").images == ("image",)
    assert find_columns(row, DataConfig(images_column=("image", "image_2")), name="x").images == ("image", "image_2")


def test_settings_name_columns_and_paths_into_structs() -> None:
    """One or several image columns, none at all, and dots; a name with a dot in it comes first."""
    row = {"a": {"b": {"c": "deep"}}, "a.b": "flat", "image_1": PICTURE, "image_2": PICTURE, "images": 3, "answer": 1}
    config = DataConfig(problem_column="a.b.c", images_column=("image_1", "image_2"))
    found = find_columns(row, config, name="x")
    assert found == Columns(text="a.b.c", gold="answer", images=("image_1", "image_2"), extra=("a", "a.b", "images"))
    assert cell(row, "a.b.c") == "deep"
    assert cell(row, "a.b") == "flat"
    assert cell(row, "a.x.c") is None
    assert find_columns(row, DataConfig(problem_column="a", images_column=()), name="x").images == ()
    with pytest.raises(DataError, match=r"x has no column 'pic'; it has a, a\.b, .*--data\.images_column="):
        find_columns(row, DataConfig(problem_column="a", images_column="pic"), name="x")
