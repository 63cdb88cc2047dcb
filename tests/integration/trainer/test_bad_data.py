"""A data file that is wrong, as a person meets it: `penstock serve trainer` says so in one line and exits with 2."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.telemetry import spans
from services.cli import main
from tests.support.trainer.groups import picture

TEXTS = pa.array(["<image>Find x."])


def without_columns(path: Path) -> None:
    """A table of something else."""
    pq.write_table(pa.table({"title": TEXTS, "answer": ["1"]}), path)


def with_an_unreadable_image(path: Path) -> None:
    """A picture that is cut short, in the second of two rows."""
    images = [[{"bytes": data, "path": None}] for data in (picture(0), picture(1)[:200])]
    pq.write_table(pa.table({"images": images, "problem": ["<image>Find x."] * 2, "answer": ["1", "2"]}), path)


def empty(path: Path) -> None:
    """The right columns, and no row."""
    columns = {"images": pa.array([], pa.list_(pa.binary())), "problem": TEXTS[:0], "answer": TEXTS[:0]}
    pq.write_table(pa.table(columns), path)


def no_parquet(path: Path) -> None:
    """Text under the name of a Parquet file."""
    path.write_text("problem,answer\n1+1,2\n")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (without_columns, ("has no column problem or", "it has title, answer", "--data.problem_column=")),
        (with_an_unreadable_image, ("row 1", "image 0 (200 bytes) cannot be decoded", "repair the row")),
        (empty, ("holds no rows",)),
        (no_parquet, ("cannot be read as Parquet",)),
    ],
)
def test_a_data_file_that_is_wrong(
    write: Callable[[Path], None],
    words: tuple[str, ...],
    tiny_model_path: Path,
    tmp_path: Path,
    nats_url: str,
    run_name: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2 and exactly one line, which names the file, what is wrong with it, and what to do."""
    data, recipe = tmp_path / "data.parquet", tmp_path / "recipe.toml"
    write(data)
    recipe.write_text(
        f'[run]\nname = "{run_name}"\ndir = "{tmp_path}"\n[model]\npath = "{tiny_model_path}"\n'
        f'[bus]\nurl = "{nats_url}"\n[data]\npath = "{data}"\n[log]\nlevel = "error"\n'
    )
    code = main(["serve", "trainer", "--config", str(recipe)])
    out, err = capfd.readouterr()
    assert code == 2, err
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    for word in (str(data), *words):
        assert word in line
    assert out == ""
    assert spans.buffer() is None
