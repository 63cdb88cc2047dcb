"""Lines of `penstock score` that are nearly too much to read."""

import io
from pathlib import Path

import pytest

from services.cli.score.lines import Line, LineReader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the lines are."""
    return tmp_path / "lines.jsonl"


def read(path: Path, *texts: str) -> list[Line]:
    path.write_text("\n".join(texts))
    with io.FileIO(path) as source:
        reader = LineReader(source, name="in", profile="math", known_profiles={"math"}, max_lines=500)
        return [line for window in reader.windows() for line in window]


def test_a_long_deadline_is_the_longest(path: Path) -> None:
    """However many digits it has."""
    (line,) = read(path, f'{{"id": 1, "gold": "5", "response": "5", "deadline_s": 1{"0" * 400}}}')
    assert line.item is not None
    assert line.item.deadline_s == 1e6


def test_a_field_that_is_nested_as_deeply_as_can_be_read_is_told(path: Path) -> None:
    """To show it takes a few more calls than to read it."""
    depths = range(900, 1000)
    lines = read(path, *(f'{{"id": 1, "gold": "5", "response": {"[" * n}{"]" * n}}}' for n in depths))
    assert len(lines) == len(depths)
    assert all(line.item is None and line.error.startswith("in:") for line in lines)
