"""A built-in geometry data set: small pictures of points on a grid, each with a question.

Rows have the schema of hiyouga/geometry3k, so code that reads that data set reads this one.
Invariants: row ``i`` depends only on ``(seed, kinds, pictures, i)``, never on the size or on rows read before it. No
picture is both used for training and held out (`is_held_out`).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypedDict, get_args

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Kind = Literal["x", "y", "length", "distance"]
"""The question: a coordinate of P, the length of an axis-parallel AB, or the grid distance from A to B."""

Pictures = Literal["training", "held_out", "all"]
"""Pictures that rows are drawn from: those that training draws, those that it never draws, or both."""

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
NUM_CELLS: Final = 5
"""Grid cells along each axis: coordinates run from 0 to this number."""

_HELD_OUT_REMAINDER: Final = 3

PICTURE_SIZE_PX: Final = 96
_CELL_PX: Final = 16
_MARGIN_PX: Final = 8
_RADIUS_PX: Final = 7
PAPER: Final = (128, 128, 128)
"""Mid-grey: image processors that normalise around it turn empty paper into zeros. A small model then learns to see
points from several times fewer pictures than with white paper."""
_GRID: Final = (160, 160, 160)
_AXIS: Final = (0, 0, 0)
_POINT_COLORS: Final = {"P": (0, 0, 255), "A": (255, 0, 0), "B": (0, 128, 0)}
_QUESTIONS: Final[dict[Kind, str]] = {
    "x": "Find the x-coordinate of P.",
    "y": "Find the y-coordinate of P.",
    "length": "Find the length of AB.",
    "distance": "Find the grid distance from A to B.",
}
INSTRUCTION: Final = r"Put the answer in \boxed{}."

Point = tuple[int, int]


class ImageCell(TypedDict):
    """One picture of a row, as the Hugging Face ``Image`` feature stores it."""

    bytes: bytes
    path: None


class DrawnRow(TypedDict):
    """One row in the schema of hiyouga/geometry3k."""

    images: list[ImageCell]
    problem: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometryProblem:
    """A picture and its question, before they become a row."""

    kind: Kind
    """The kind of question."""
    points: dict[str, Point]
    """Label to grid coordinates, the origin at the bottom left."""

    @property
    def text(self) -> str:
        """The text of the row: one image placeholder, the question, the instruction."""
        return f"<image>{_QUESTIONS[self.kind]} {INSTRUCTION}"

    @property
    def answer(self) -> str:
        """The correct answer, a decimal integer."""
        if self.kind == "x":
            return str(self.points["P"][0])
        if self.kind == "y":
            return str(self.points["P"][1])
        (ax, ay), (bx, by) = self.points["A"], self.points["B"]
        return str(abs(ax - bx) + abs(ay - by))


def is_held_out(points: Mapping[str, Point]) -> bool:
    """Return whether a picture of these points is held out: one in six, by its parameters.

    Let (x, y) be the leftmost point (the lower of two on a vertical line), and d its grid distance to the other point
    (0 if there is none). A picture is held out if (x + y + d) mod 6 = 3. So every coordinate and every length occurs in
    held-out pictures and in others, no held-out P has x = y, and A and B may be exchanged.
    """
    (x, y), *others = sorted(points.values())
    distance = sum(abs(x - other_x) + abs(y - other_y) for other_x, other_y in others)
    return (x + y + distance) % (NUM_CELLS + 1) == _HELD_OUT_REMAINDER


def draw_problem(problem: GeometryProblem) -> Image.Image:
    """Draw the grid, its axes and the problem's points as an RGB picture of 96 by 96 pixels."""
    picture = Image.new("RGB", (PICTURE_SIZE_PX, PICTURE_SIZE_PX), PAPER)
    canvas = ImageDraw.Draw(picture)
    low, high = _MARGIN_PX, _MARGIN_PX + NUM_CELLS * _CELL_PX
    for cell in range(NUM_CELLS + 1):
        offset = low + cell * _CELL_PX
        canvas.line((offset, low, offset, high), fill=_GRID)
        canvas.line((low, offset, high, offset), fill=_GRID)
    canvas.line((low, low, low, high), fill=_AXIS)
    canvas.line((low, high, high, high), fill=_AXIS)
    centers = {name: (low + x * _CELL_PX, high - y * _CELL_PX) for name, (x, y) in problem.points.items()}
    if problem.kind == "length":
        canvas.line((centers["A"], centers["B"]), fill=_AXIS, width=2)
    font = ImageFont.load_default_imagefont()
    for name, (x_px, y_px) in centers.items():
        disc = (x_px - _RADIUS_PX, y_px - _RADIUS_PX, x_px + _RADIUS_PX, y_px + _RADIUS_PX)
        canvas.ellipse(disc, fill=_POINT_COLORS[name])
        canvas.text((x_px - 2, y_px - 5), name, fill=PAPER, font=font)
    return picture


class GeometryDataset(Sequence[DrawnRow]):
    """Seeded geometry problems with random access.

    Two data sets with the same seed, kinds and pictures agree on every row that both have. Different seeds draw
    independently from the same few hundred pictures.
    """

    columns: Final = ("images", "problem", "answer")

    def __init__(self, size: int, *, seed: int = 0, kinds: Sequence[Kind] = KINDS, pictures: Pictures = "all") -> None:
        """Describe a data set of ``size`` rows. Pictures are drawn when a row is read.

        Args:
            size: Number of rows.
            seed: Seed of the draws, not negative.
            kinds: Kinds of problem, drawn with equal probability.
            pictures: Which pictures to draw from.

        Raises:
            ValueError: size or seed is negative, or kinds is empty or names an unknown kind.
        """
        if size < 0:
            raise ValueError(f"size is {size}: give a number of rows that is not negative")
        if seed < 0:
            raise ValueError(f"seed is {seed}: give a seed that is not negative")
        unknown = sorted(set(kinds) - set(KINDS))
        if unknown or not kinds:
            raise ValueError(f"kinds is {list(kinds)}: choose one or more of {list(KINDS)}")
        self.size = size
        self.seed = seed
        self.kinds = tuple(kinds)
        self.pictures = pictures

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.size

    def __getitem__(self, index: int) -> DrawnRow:  # type: ignore[override]  # rows only, no slices
        """Draw row ``index``; negative indices count from the end.

        Raises:
            IndexError: the row does not exist.
        """
        problem = self.problem(index)
        png = io.BytesIO()
        draw_problem(problem).save(png, format="PNG")
        return DrawnRow(
            images=[ImageCell(bytes=png.getvalue(), path=None)], problem=problem.text, answer=problem.answer
        )

    def __iter__(self) -> Iterator[DrawnRow]:
        """Draw every row in order."""
        return (self[index] for index in range(self.size))

    def problem(self, index: int) -> GeometryProblem:
        """Return the problem of row ``index``, without drawing it.

        Raises:
            IndexError: the row does not exist.
        """
        if not -self.size <= index < self.size:
            raise IndexError(f"row {index} of a geometry data set of {self.size} rows")
        rng = np.random.default_rng((self.seed, index % self.size))
        kind = self.kinds[int(rng.integers(len(self.kinds)))]
        while True:
            points = _draw_points(rng, kind)
            if self.pictures == "all" or is_held_out(points) == (self.pictures == "held_out"):
                return GeometryProblem(kind=kind, points=points)


def _draw_points(rng: np.random.Generator, kind: Kind) -> dict[str, Point]:
    if kind in ("x", "y"):
        x, y = (int(value) for value in rng.integers(NUM_CELLS + 1, size=2))
        return {"P": (x, y)}
    return _draw_axis_parallel(rng) if kind == "length" else _draw_two_points(rng)


def _draw_axis_parallel(rng: np.random.Generator) -> dict[str, Point]:
    """Draw two points on a horizontal or a vertical line, at a distance uniform over 1 to ``NUM_CELLS``."""
    length = 1 + int(rng.integers(NUM_CELLS))
    start = int(rng.integers(NUM_CELLS + 1 - length))
    across = int(rng.integers(NUM_CELLS + 1))
    is_vertical, is_swapped = (bool(value) for value in rng.integers(2, size=2))
    ends: list[Point] = [(start, across), (start + length, across)]
    if is_vertical:
        ends = [(y, x) for x, y in ends]
    if is_swapped:
        ends.reverse()
    return {"A": ends[0], "B": ends[1]}


def _draw_two_points(rng: np.random.Generator) -> dict[str, Point]:
    """Draw two points whose grid distance has one digit."""
    while True:
        ax, ay, bx, by = (int(value) for value in rng.integers(NUM_CELLS + 1, size=4))
        if 1 <= abs(ax - bx) + abs(ay - by) <= 9:
            return {"A": (ax, ay), "B": (bx, by)}
