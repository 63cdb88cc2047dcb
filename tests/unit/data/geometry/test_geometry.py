"""The geometry data set: seeded, random access, right answers, geo3k's schema, valid pictures."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from services.trainer.data.geometry import (
    KINDS,
    NUM_CELLS,
    PICTURE_SIZE_PX,
    GeometryDataset,
    Kind,
    Pictures,
    is_held_out,
)

NUM_ROWS = 120
CELL_PX = 16
COLORS = {"P": (0, 0, 255), "A": (255, 0, 0), "B": (0, 128, 0)}


def find_points(png: bytes) -> dict[str, tuple[int, int]]:
    """Read the points back from the pixels alone: the middle of each colour, in grid coordinates."""
    pixels = np.asarray(Image.open(io.BytesIO(png)))
    found = {}
    for name, color in COLORS.items():
        rows, columns = np.nonzero((pixels == color).all(axis=2))
        if len(rows):
            middle_x, middle_y = (columns.min() + columns.max()) / 2, (rows.min() + rows.max()) / 2
            found[name] = (int(middle_x // CELL_PX), NUM_CELLS - int(middle_y // CELL_PX))
    return found


def test_a_row_depends_only_on_seed_and_index() -> None:
    """Another size or another order of reading gives the same rows; another seed gives others."""
    small, large = GeometryDataset(20, seed=3), GeometryDataset(10_000, seed=3)
    backwards = [large[index] for index in reversed(range(20))]
    assert list(small) == backwards[::-1]
    assert [row["answer"] for row in small] != [row["answer"] for row in GeometryDataset(20, seed=4)]


def test_rows_have_the_schema_of_geo3k() -> None:
    """One picture per row as bytes without a path, one placeholder in the text, a digit for an answer."""
    for row in GeometryDataset(NUM_ROWS, kinds=KINDS):
        assert set(row) == {"images", "problem", "answer"}
        (image,) = row["images"]
        assert set(image) == {"bytes", "path"}
        assert image["path"] is None
        assert row["problem"].startswith("<image>")
        assert row["problem"].count("<image>") == 1
        assert r"\boxed{}" in row["problem"]
        assert row["answer"].isdecimal()


def test_pictures_are_small_rgb_pngs() -> None:
    """Every picture opens as a 96 by 96 RGB PNG."""
    for row in GeometryDataset(NUM_ROWS, kinds=KINDS):
        picture = Image.open(io.BytesIO(row["images"][0]["bytes"]))
        picture.load()
        assert (picture.format, picture.mode) == ("PNG", "RGB")
        assert picture.size == (PICTURE_SIZE_PX, PICTURE_SIZE_PX)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_can_be_read_from_the_pixels(kind: Kind) -> None:
    """Points found in the drawing, and nothing else, give the answer of the row."""
    for row in GeometryDataset(NUM_ROWS, seed=1, kinds=[kind]):
        points = find_points(row["images"][0]["bytes"])
        if kind in ("x", "y"):
            expected = points["P"][kind == "y"]
        else:
            (ax, ay), (bx, by) = points["A"], points["B"]
            expected = abs(ax - bx) + abs(ay - by)
            assert kind == "distance" or ax == bx or ay == by
        assert row["answer"] == str(expected)


def pictures_of(pictures: Pictures, kind: Kind, *, seed: int = 0) -> set[tuple[tuple[str, tuple[int, int]], ...]]:
    """The different pictures among many rows, by their points."""
    dataset = GeometryDataset(4000, seed=seed, kinds=[kind], pictures=pictures)
    return {tuple(sorted(dataset.problem(index).points.items())) for index in range(len(dataset))}


@pytest.mark.parametrize(("kind", "num_pictures"), [("x", 36), ("y", 36), ("length", 360)])
def test_training_never_draws_a_held_out_picture(kind: Kind, num_pictures: int) -> None:
    """One picture in six is held out, whatever the seed; A and B exchanged are the same picture to that rule."""
    held_out, training = pictures_of("held_out", kind), pictures_of("training", kind)
    assert not held_out & pictures_of("training", kind, seed=7)
    assert len(held_out) == num_pictures / 6
    assert held_out | training == pictures_of("all", kind)
    assert len(training) == 5 * num_pictures / 6
    segments = [(a, b) for (_, a), (_, b) in (each for each in held_out if len(each) == 2)]
    assert {(("A", b), ("B", a)) for a, b in segments} <= held_out


def test_a_coordinate_of_a_held_out_picture_is_not_the_other_one() -> None:
    """Who mixes x and y up is wrong on every one of them; each value of both occurs."""
    points = [each[0][1] for each in pictures_of("held_out", "x")]
    assert {x for x, _ in points} == {y for _, y in points} == set(range(6))
    assert all(x != y for x, y in points)
    lengths = [abs(a[0] - b[0]) + abs(a[1] - b[1]) for (_, a), (_, b) in pictures_of("held_out", "length")]
    assert set(lengths) == set(range(1, 6))


def test_a_row_of_training_changes_only_where_its_picture_is_held_out() -> None:
    """The others are drawn as from all pictures."""
    every, training = GeometryDataset(300), GeometryDataset(300, pictures="training")
    for index in range(300):
        drawn = every.problem(index)
        assert (training.problem(index) == drawn) is not is_held_out(drawn.points)
        assert training.problem(index).kind == drawn.kind


def test_every_kind_and_every_answer_occurs() -> None:
    """Guessing one number is near chance: no answer takes more than 30 percent of the rows."""
    dataset = GeometryDataset(1500)
    problems = [dataset.problem(index) for index in range(len(dataset))]
    assert {problem.kind for problem in problems} == set(KINDS)
    answers = [problem.answer for problem in problems]
    assert set(answers) == set("0123456789")
    assert max(answers.count(answer) for answer in set(answers)) < 0.3 * len(answers)


def test_indices_follow_the_sequence_protocol() -> None:
    """Negative indices count from the end, others beyond the size raise IndexError."""
    dataset = GeometryDataset(5)
    assert dataset[-1] == dataset[4]
    for index in (5, -6):
        with pytest.raises(IndexError, match="data set of 5 rows"):
            dataset[index]


@pytest.mark.parametrize(("size", "seed", "kinds"), [(-1, 0, ["x"]), (1, -1, ["x"]), (1, 0, []), (1, 0, ["z"])])
def test_a_wrong_argument_says_what_is_wrong(size: int, seed: int, kinds: list[Kind]) -> None:
    """A negative size or seed and a missing or unknown kind raise ValueError naming the field."""
    with pytest.raises(ValueError, match=r"size is|seed is|kinds is"):
        GeometryDataset(size, seed=seed, kinds=kinds)
