"""The built-in geometry pictures, too small to read: each is one cell of a large, otherwise empty sheet.

A model sees where on the sheet the picture is, but not its points. It must zoom in on the cell, which the environment
`geo3k_zoom` supports.
Invariants: row ``i`` shows problem ``i`` of the pictures' data set, in a cell that depends only on (seed, i). A
demonstration shows exactly the reply of `geo3k_zoom`, in text and pixels, wherever it zooms in.
"""

import io
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from PIL import Image

from services.trainer.data.geometry import PAPER, PICTURE_SIZE_PX, GeometryDataset, draw_problem

ZOOM_INSTRUCTION: Final = "Zoom in. "
_CELL_STREAM: Final = 1
_UNZOOMED_STREAM: Final = 2
_MISAIMED_STREAM: Final = 3


class GeometrySheets(Sequence[dict[str, Any]]):
    """Geometry problems on sheets of cells, with random access.

    Rows are problems (`images`, `problem`, `answer`) or demonstrations (`messages`): calls of the zoom, its replies,
    and answers, which are correct even if the demonstration has not seen the picture.
    """

    def __init__(
        self,
        pictures: GeometryDataset,
        *,
        num_cells: int,
        demonstrations: bool = False,
        unzoomed: float = 0.0,
        misaimed: float = 0.0,
    ) -> None:
        """Put ``pictures`` on sheets of ``num_cells`` by ``num_cells``.

        Args:
            pictures: The problems.
            num_cells: Cells along each edge of a sheet, at least 2.
            demonstrations: Whether rows are demonstrations.
            unzoomed: Share of demonstrations that answer at once, without zooming in.
            misaimed: Share of the others that zoom in on an empty cell.
        """
        if num_cells < 2:
            raise ValueError(f"num_cells is {num_cells}: give at least 2")
        self.pictures = pictures
        self.num_cells = num_cells
        self.demonstrations = demonstrations
        self.unzoomed = unzoomed
        self.misaimed = misaimed

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of a row's fields."""
        return ("messages",) if self.demonstrations else ("images", "problem", "answer")

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]  # rows only, no slices
        """Draw row ``index``; negative indices count from the end.

        Raises:
            IndexError: the row does not exist.
        """
        problem = self.pictures.problem(index)
        column, row = self.cell(index)
        picture = draw_problem(problem)
        edge = self.num_cells * PICTURE_SIZE_PX
        sheet = Image.new("RGB", (edge, edge), PAPER)
        sheet.paste(picture, (column * PICTURE_SIZE_PX, row * PICTURE_SIZE_PX))
        text = problem.text.replace("<image>", f"<image>{ZOOM_INSTRUCTION}")
        if not self.demonstrations:
            return {"images": [_cell(sheet)], "problem": text, "answer": problem.answer}
        question = {"role": "user", "content": [_part(sheet), {"type": "text", "text": text.removeprefix("<image>")}]}
        answer = {"role": "assistant", "content": f"\\boxed{{{problem.answer}}}"}
        if self._random(index, _UNZOOMED_STREAM).random() < self.unzoomed:
            return {"messages": [question, answer]}
        column, row = self._aim(index)
        box = [round(edge / self.num_cells, 3) for edge in (column, row, column + 1, row + 1)]
        call = {"role": "assistant", "tool_calls": [{"name": "zoom", "arguments": {"bbox_2d": box}}]}
        shown = f"Part [{', '.join(f'{value:g}' for value in box)}] of the picture, as {edge} x {edge} pixels:"
        left, top = column * PICTURE_SIZE_PX, row * PICTURE_SIZE_PX
        cell = sheet.crop((left, top, left + PICTURE_SIZE_PX, top + PICTURE_SIZE_PX))
        enlarged = cell.resize(sheet.size, Image.Resampling.BICUBIC)
        reply = {"role": "tool", "content": [{"type": "text", "text": shown}, _part(enlarged)]}
        return {"messages": [question, call, reply, answer]}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Draw every row in order."""
        return (self[index] for index in range(len(self)))

    def cell(self, index: int) -> tuple[int, int]:
        """Return column and row, from the top left, of the cell with the picture of row ``index``."""
        column, row = self._random(index, _CELL_STREAM).integers(self.num_cells, size=2).tolist()
        return column, row

    def _aim(self, index: int) -> tuple[int, int]:
        """Return the cell that the demonstration zooms in on."""
        column, row = self.cell(index)
        random = self._random(index, _MISAIMED_STREAM)
        if random.random() < self.misaimed:
            offset = int(random.integers(1, self.num_cells**2))
            row, column = divmod((row * self.num_cells + column + offset) % self.num_cells**2, self.num_cells)
        return column, row

    def _random(self, index: int, stream: int) -> np.random.Generator:
        return np.random.default_rng((self.pictures.seed, index % len(self), stream))


def _cell(image: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return {"bytes": file.getvalue(), "path": None}


def _part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image", "image": _cell(image)}
