"""What a source's path may be: formats, folders, globs, several files, slices, folders of `datasets`."""

import base64
import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from penstock.errors import ConfigError, DataError
from penstock.records import TextPart
from services.trainer.admission.filters import FilterReason
from services.trainer.data.config import DataConfig
from services.trainer.data.dataset import open_dataset
from services.trainer.data.sources.files import require_files
from services.trainer.data.sources.splits import choose_files
from tests.support.trainer.data.pictures import png

Rows = list[dict[str, Any]]


def rows(first: int, last: int) -> Rows:
    """Problems whose answer is their number."""
    return [{"problem": f"What is {number}?", "answer": str(number)} for number in range(first, last)]


def write(file: Path, content: Rows) -> Path:
    """A file in the format that its name says."""
    file.parent.mkdir(parents=True, exist_ok=True)
    match "".join(file.suffixes):
        case ".jsonl.gz" | ".json.gz":
            plain = write(file.with_suffix(""), content)
            file.write_bytes(gzip.compress(plain.read_bytes()))
            plain.unlink()
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(content), file)
        case ".arrow":
            table = pa.Table.from_pylist(content)
            with pa.ipc.new_stream(str(file), table.schema) as writer:
                writer.write_table(table, max_chunksize=2)
        case ".jsonl":
            file.write_text("".join(f"{json.dumps(row)}\n" for row in content))
        case ".json":
            file.write_text(json.dumps(content))
        case ".csv":
            with file.open("w", newline="") as opened:
                writer_of_rows = csv.DictWriter(opened, content[0])
                writer_of_rows.writeheader()
                writer_of_rows.writerows(content)
        case _:
            file.write_text("not data")
    return file


def answers(path: str | Path | tuple[str, ...], **settings: Any) -> list[str]:
    """The answers of one epoch, in the order of the files."""
    config = DataConfig(path=str(path) if isinstance(path, Path) else path, shuffle=False, **settings)
    dataset = open_dataset(config)
    return [dataset[position].golds[0] for position in range(dataset.num_rows)]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl", "json", "csv", "jsonl.gz", "json.gz"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    """A picture in base64 comes through each of them, text with line ends too."""
    picture = base64.b64encode(png(size=(300, 300))).decode()
    content = [
        {"problem": '<image>Find\r\n"x", é.', "answer": 5, "image": picture},
        *({"problem": "<image>?", "answer": n, "image": picture} for n in (6, 7)),
    ]
    dataset = open_dataset(DataConfig(path=str(write(tmp_path / f"a.{suffix}", content)), shuffle=False))
    assert [dataset[position].golds for position in range(3)] == [("5",), ("6",), ("7",)]
    assert dataset[0].images == (base64.b64decode(picture),)
    assert dataset[0].messages[0].parts[1] == TextPart(text='Find\r\n"x", é.')


def test_json_may_be_lines_and_rows_may_have_other_keys(tmp_path: Path) -> None:
    """Many `.json` files on the Hub are lines. A row whose picture has a key of its own is not read as text."""
    file = tmp_path / "a.json"
    content = [
        {"problem": "1+1?", "answer": 2},
        {"problem": "<image>?", "answer": 3, "image": base64.b64encode(png()).decode()},
    ]
    file.write_text("\n\n".join(map(json.dumps, content)))
    dataset = open_dataset(DataConfig(path=str(file), shuffle=False))
    assert [len(dataset[position].images) for position in range(2)] == [0, 1]
    late = [
        *content[:1] * 120,
        {"problem": "?", "answer": 3, "picture": f"data:image/png;base64,{base64.b64encode(png()).decode()}"},
    ]
    with pytest.raises(DataError, match="'picture' holds images that would not be read"):
        open_dataset(DataConfig(path=str(write(tmp_path / "b.jsonl", late))))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.jsonl", "0123"),
        ("a.jsonl@[1:3]", "12"),
        ("a.jsonl@[-1:]", "3"),
        ("a.jsonl@[:-3]", "0"),
        ("*.*", "012345"),
        ("*.*@[3:5]", "34"),
        ("**/*.csv", "4567"),
        (("b.csv", "a.jsonl@[:1]"), "450"),
    ],
)
def test_paths_globs_lists_and_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, expected: str
) -> None:
    """Files stand behind each other in the order given, those of a glob by name; a slice counts over all of them."""
    monkeypatch.chdir(tmp_path)
    write(Path("a.jsonl"), rows(0, 4))
    write(Path("b.csv"), rows(4, 6))
    write(Path("deeper/c.csv"), rows(6, 8))
    assert "".join(answers(path)) == expected


def test_an_error_counts_rows_from_the_start_of_the_file(tmp_path: Path) -> None:
    """Also behind a slice, and in the second file."""
    write(tmp_path / "a.jsonl", rows(0, 3))
    write(tmp_path / "b.jsonl", [*rows(0, 5), {"problem": "<image>", "answer": "1"}])
    with pytest.raises(DataError, match=r"b\.jsonl', row 5: its text has 1 <image>"):
        answers((str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl@[3:]")))


@pytest.mark.parametrize(
    ("files", "settings", "expected"),
    [
        (["train.jsonl", "test.jsonl"], {}, "0"),
        (["train.jsonl", "test.jsonl"], {"split": "test"}, "1"),
        (
            [
                "data/train-00000-of-00002.parquet",
                "data/train-00001-of-00002.parquet",
                "data/testmini-00000-of-00001.parquet",
            ],
            {},
            "01",
        ),
        (["data/train-00000-of-00001.parquet", "data/testmini-00000-of-00001.parquet"], {"split": "testmini"}, "1"),
        (["easy/train.csv", "hard/train.csv", "hard/val.csv"], {"hub_config": "hard"}, "1"),
        (["easy/train.csv", "hard/train.csv", "hard/val.csv"], {"hub_config": "hard", "split": "validation"}, "2"),
        (["x.json", "y.json"], {}, "01"),
        (["dev/x.json"], {}, "0"),
        (["train.parquet", "train.jsonl", "dataset_infos.json", "README.txt"], {}, "0"),
        (["train.jsonl.gz", "test.jsonl"], {}, "0"),
        (["train.jsonl", "test.parquet"], {"split": "train"}, "0"),
        (["test.parquet", "metadata.json"], {}, "0"),
        (["geo-00000-of-00001.parquet", "scores.csv"], {}, "0"),
        (["train.csv", "val.jsonl"], {}, "0"),
        (["hard/train.csv", "hard/test.parquet", "test.parquet"], {"hub_config": "hard"}, "0"),
    ],
)
def test_a_folder_has_splits_by_its_names(
    tmp_path: Path, files: list[str], settings: dict[str, str], expected: str
) -> None:
    """Held-out files are never trained on for lying in the same folder."""
    for number, file in enumerate(files):
        write(tmp_path / file, rows(number, number + 1))
    assert "".join(answers(tmp_path, **settings)) == expected


def test_a_file_has_the_split_that_its_name_says(tmp_path: Path) -> None:
    """As in a folder, but for a file or a glob without a split, which is read whatever its name."""
    for number, name in enumerate(("train.jsonl", "test.jsonl", "geometry.jsonl")):
        write(tmp_path / name, rows(number, number + 1))
    assert answers(tmp_path / "test.jsonl", split="test") == ["1"]
    assert answers(tmp_path / "geometry.jsonl", split="train") == ["2"]
    assert answers(tmp_path / "geometry.jsonl", split="geometry") == ["2"]
    write(tmp_path / "val/hard.jsonl", rows(3, 4))
    assert answers(str(tmp_path / "val/*.jsonl"), split="validation") == ["3"]
    assert answers(str(tmp_path / "*.jsonl")) == ["2", "1", "0"]


@pytest.mark.parametrize("check", [require_files, open_dataset])
@pytest.mark.parametrize(
    ("path", "settings", "words"),
    [
        (
            "train.jsonl",
            {"split": "test"},
            "is of one split, 'train' by its name, so split = 'test' .*; give the",
        ),
        ("all.jsonl@[:1]", {"split": "test"}, "is of one split, 'train'"),
        ("*.jsonl", {"split": "test"}, r"all\.jsonl' is of one split, 'train'"),
        (
            "train.jsonl",
            {"hub_config": "hard"},
            "has no configurations, so hub_config = 'hard' would change nothing",
        ),
    ],
)
def test_settings_that_choose_nothing_of_a_file_are_refused(
    tmp_path: Path, check: Callable[[DataConfig], object], path: str, settings: dict[str, str], words: str
) -> None:
    """An evaluation set that takes the path of training would be measured on training rows."""
    for name in ("train.jsonl", "test.jsonl", "all.jsonl"):
        write(tmp_path / name, rows(0, 1))
    with pytest.raises(ConfigError, match=words):
        check(DataConfig(path=str(tmp_path / path), **settings))


@pytest.mark.parametrize(
    "hidden", [".ipynb_checkpoints/train-checkpoint.jsonl", "__MACOSX/train.jsonl", "._train.jsonl"]
)
def test_files_that_programs_keep_for_themselves_are_no_data(tmp_path: Path, hidden: str) -> None:
    """Old copies would be played beside the rows."""
    write(tmp_path / "train.jsonl", rows(0, 1))
    write(tmp_path / hidden, rows(1, 2))
    assert answers(tmp_path) == ["0"]


def test_a_missing_shard_is_noticed() -> None:
    """Two of three files are not the data set."""
    names = ["data/train-00000-of-00003.parquet", "data/train-00002-of-00003.parquet"]
    with pytest.raises(DataError, match="2 of 3 files of 'data/train' are there; download it completely"):
        choose_files(names, suffixes=(".parquet",), config="", split="", card={}, name="x")


def save(folder: Path, parts: list[Rows]) -> None:
    """A data set as `Dataset.save_to_disk` writes it."""
    for number, part in enumerate(parts):
        write(folder / f"data-{number:05}-of-{len(parts):05}.arrow", part)
    names = [{"filename": f"data-{number:05}-of-{len(parts):05}.arrow"} for number in range(len(parts))]
    (folder / "state.json").write_text(json.dumps({"_data_files": names, "_split": None}))
    (folder / "dataset_info.json").write_text("{}")


def save_splits(folder: Path) -> None:
    """A row in each of two splits, as `DatasetDict.save_to_disk` writes them."""
    save(folder / "train", [rows(0, 1)])
    save(folder / "test", [rows(1, 2)])
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))


def test_folders_that_datasets_saved(tmp_path: Path) -> None:
    """One data set, and a dictionary of splits; the files are mapped, in the order of state.json."""
    save(tmp_path / "one", [rows(0, 5), rows(5, 7)])
    assert answers(tmp_path / "one") == list("0123456")
    save_splits(tmp_path / "dict")
    assert answers(tmp_path / "dict") == ["0"]
    assert answers(tmp_path / "dict", split="test") == answers(tmp_path / "dict" / "test", split="test") == ["1"]


@pytest.mark.parametrize("check", [require_files, open_dataset])
def test_a_split_that_a_saved_data_set_lacks_is_refused(tmp_path: Path, check: Callable[[DataConfig], object]) -> None:
    """Before anything starts, as that of a file is; so is a data set that was damaged."""
    save(tmp_path / "one", [rows(0, 1)])
    save_splits(tmp_path / "dict")
    with pytest.raises(ConfigError, match=r"one' is of one split, 'train' by its name, so split = 'test' would change"):
        check(DataConfig(path=str(tmp_path / "one"), split="test"))
    with pytest.raises(DataError, match="has no split 'val'; it has train, test"):
        check(DataConfig(path=str(tmp_path / "dict"), split="val"))
    (tmp_path / "one" / "state.json").write_text(json.dumps({"_data_files": [{}]}))
    (tmp_path / "dict" / "train" / "state.json").unlink()
    for folder in ("one", "dict"):
        with pytest.raises(DataError, match=r"state\.json' cannot be read: .*; save the data set again"):
            check(DataConfig(path=str(tmp_path / folder)))
    (tmp_path / "dict" / "dataset_dict.json").write_text(json.dumps({"splits": 2}))
    with pytest.raises(DataError, match=r"dataset_dict\.json' cannot be read: .*; save the data set again"):
        check(DataConfig(path=str(tmp_path / "dict")))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "x", r"its format is not known by its name; use \.parquet, \.arrow"),
        ("a.parquet", "x", "cannot be read as Parquet"),
        ("a.arrow", "x", "cannot be read as Arrow"),
        ("a.jsonl", '{"problem": "x", "answer": 1}\n{"problem"', "row 1: it is not a JSON object"),
        ("a.jsonl", "[1]\n", "row 0: it is not a JSON object: a row is list"),
        ("a.json", '[{"a": 1}, 2]', "is not a JSON list of objects: a row is int"),
        ("a.csv", "problem,answer\n1,2,3\n", r"row 0: it has 3 fields, and the header 2; repair the row"),
        ("a.csv", "problem,answer\n", "holds no rows"),
        ("a.csv", "problem,answer,answer\n1,2,3\n", "has several columns called 'answer'; rename or remove all but"),
        ("a.jsonl", "", "holds no rows"),
        ("a.jsonl", '{"title": "x", "answer": 1}', "has no column problem or prompt .* it has title, answer"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, name: str, content: str, words: str) -> None:
    """With the row where there is one."""
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        open_dataset(DataConfig(path=str(tmp_path / name)))
    assert name in str(caught.value)


def values_that_are_wrong() -> dict[str, pa.Array]:
    """Columns that Arrow holds and Python cannot."""
    text = pa.array([b"\xff", b"x", b"y"])
    return {
        "no UTF-8": pa.Array.from_buffers(pa.string(), 3, text.buffers()),
        "no date": pa.array([2**31 - 1, 0, 0], pa.date32()),
    }


@pytest.mark.parametrize("wrong", ["no UTF-8", "no date"])
def test_a_value_that_cannot_be_decoded_is_a_wrong_row(tmp_path: Path, wrong: str) -> None:
    """Also in the first row, which shows the columns."""
    columns = {"problem": ["a", "b", "c"], "answer": ["0", "1", "2"], "note": values_that_are_wrong()[wrong]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet', row 0: .*; repair the row or remove it"):
        answers(tmp_path / "a.parquet")
    dataset = open_dataset(DataConfig(path=str(tmp_path / "a.parquet"), shuffle=False, wrong_rows="drop"))
    played = [dataset.playable(position) for position in range(3)]
    assert played[0] == FilterReason.WRONG_ROW
    assert [each.golds for each in played[1:]] == [("1",), ("2",)]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "json.gz"])
def test_a_first_line_that_is_wrong_can_be_dropped(tmp_path: Path, suffix: str) -> None:
    """As any other line, zipped or not; a byte-order mark and empty lines are no rows."""
    content = b'\xef\xbb\xbf{"problem": "x\n\n{"problem": "x", "answer": 1}\n'
    content = content if suffix == "jsonl" else gzip.compress(content)
    (tmp_path / f"a.{suffix}").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.{suffix}', row 0: it is not a JSON object"):
        open_dataset(DataConfig(path=str(tmp_path / f"a.{suffix}")))
    dataset = open_dataset(DataConfig(path=str(tmp_path / f"a.{suffix}"), shuffle=False, wrong_rows="drop"))
    assert dataset.playable(0) == FilterReason.WRONG_ROW
    assert dataset[1].golds == ("1",)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    """Lines are read when they are played."""
    file = write(tmp_path / "a.jsonl", rows(0, 2))
    dataset = open_dataset(DataConfig(path=str(file)))
    file.unlink()
    with pytest.raises(DataError, match=r"a\.jsonl' cannot be read: No such file"):
        dataset.playable(0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[]", "cannot be unzipped: Not a gzipped file"),
        (gzip.compress(b"[1]")[:-9], "cannot be unzipped"),
        (
            gzip.compress(b'{"problem": "x", "answer": 1}\n{"problem"'),
            "row 1: it is not a JSON object: .*; repair the li",
        ),
        (gzip.compress(b'[{"problem": "x"}, {]'), "is not JSON"),
        (gzip.compress(b"[1]"), "is not a JSON list of objects: a row is int"),
        (gzip.compress(b" " * 2_000_000), r"more than 1073741 bytes when unzipped.*unzip it to \.jsonl"),
    ],
    ids=["plain", "cut short", "broken line", "broken list", "no objects", "bomb"],
)
def test_a_zipped_file_that_is_wrong_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    """Before a bomb fills the memory."""
    (tmp_path / "a.json.gz").write_bytes(content)
    with pytest.raises(DataError, match=words):
        open_dataset(DataConfig(path=str(tmp_path / "a.json.gz"), memory_gib=0.001))


def test_what_must_be_read_as_a_whole_has_to_fit(tmp_path: Path) -> None:
    """CSV and JSON lists; lines and Parquet are read piece by piece."""
    for suffix in ("csv", "json"):
        with pytest.raises(DataError, match=r"must be read as a whole; convert it to \.jsonl or \.parquet"):
            open_dataset(DataConfig(path=str(write(tmp_path / f"a.{suffix}", rows(0, 99))), memory_gib=1e-6))
    assert len(answers(write(tmp_path / "a.jsonl", rows(0, 99)), memory_gib=1e-6)) == 99


@pytest.mark.parametrize("check", [require_files, open_dataset])
def test_a_path_that_does_not_exist_is_a_setting_to_change(check: Callable[[DataConfig], object]) -> None:
    """Before anything starts."""
    for path in ("/no/such.parquet", "nowhere/*.jsonl", "./no/folder", "no/such.csv@[1:]"):
        with pytest.raises(
            ConfigError, match=r"there is no such file; give a file .*, a folder, a glob or a data set on"
        ):
            check(DataConfig(path=path))
    with pytest.raises(ValueError, match="path holds an empty name; give a file, a folder or a glob"):
        DataConfig(path=("",))
    with pytest.raises(ConfigError, match="one of several paths; give each data set a source of its own"):
        require_files(DataConfig(path=("some/dataset", "other/dataset")))
