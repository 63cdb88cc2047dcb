"""Pictures on sheets: where they are, and that demonstrations show what the environment does."""

import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.environments import AssistantTurn, Task
from penstock.records import ImagePart, Message, TextPart
from services.rollout.worker.environments.geo3k_zoom import Geo3kZoom
from services.trainer.data.config import SourceConfig
from services.trainer.data.geometry import PAPER, PICTURE_SIZE_PX, GeometryDataset, draw_problem
from services.trainer.data.geometry_sheets import GeometrySheets
from services.trainer.data.sources.opening import built_in
from services.trainer.data.sources.source import DEMONSTRATIONS

CELLS = 5


def sheets(**options: Any) -> GeometrySheets:
    """Forty rows."""
    return GeometrySheets(GeometryDataset(40, seed=3, kinds=["x", "y", "length"]), num_cells=CELLS, **options)


def opened(cell: dict[str, Any]) -> Image.Image:
    """The picture in a cell of a row."""
    return Image.open(io.BytesIO(cell["bytes"]))


def test_a_sheet_shows_the_picture_in_its_cell_and_nothing_else() -> None:
    """Pixel for pixel."""
    table = sheets()
    for index in range(len(table)):
        column, row = table.cell(index)
        pixels = np.array(opened(table[index]["images"][0]))
        assert pixels.shape == (CELLS * PICTURE_SIZE_PX, CELLS * PICTURE_SIZE_PX, 3)
        top, left = row * PICTURE_SIZE_PX, column * PICTURE_SIZE_PX
        inside = pixels[top : top + PICTURE_SIZE_PX, left : left + PICTURE_SIZE_PX]
        assert (inside == np.array(draw_problem(table.pictures.problem(index)))).all()
        inside[:] = PAPER
        assert (pixels == PAPER).all()


def test_every_cell_is_drawn() -> None:
    """Forty rows of nine cells reach them all; the same row is in the same cell each time."""
    table = GeometrySheets(GeometryDataset(40, seed=3), num_cells=3)
    cells = [table.cell(index) for index in range(40)]
    assert len(set(cells)) == 9
    assert cells == [table.cell(index) for index in range(40)]


@pytest.mark.parametrize("misaimed", [0.0, 1.0])
async def test_a_demonstration_shows_what_the_environment_answers(misaimed: float) -> None:
    """To the letter and the pixel: what is learned from it holds when the policy plays."""
    problems, demonstrations = sheets(), sheets(demonstrations=True, misaimed=misaimed)
    for index in range(5):
        _, call, reply, answer = demonstrations[index]["messages"]
        environment = Geo3kZoom()
        sheet = problems[index]["images"][0]["bytes"]
        question = Message(role="user", parts=(ImagePart(index=0), TextPart(text="Find x.")))
        await environment.reset(Task(id="a", seed=0, messages=(question,), images=(sheet,), grade=_no_grade))
        said = json.dumps({"name": "zoom", "arguments": call["tool_calls"][0]["arguments"]})
        result = await environment.step(AssistantTurn.parse(f"<tool_call>\n{said}\n</tool_call>"))
        assert result.observation is not None
        [message] = result.observation.messages
        assert message.role == reply["role"] == "tool"
        text, picture = reply["content"]
        assert [part.text for part in message.parts if isinstance(part, TextPart)] == [text["text"]]
        [seen] = result.observation.images
        pixels = np.array(Image.open(io.BytesIO(seen)))
        assert (pixels == np.array(opened(picture["image"]))).all()
        assert (pixels == PAPER).all() == (misaimed == 1.0)
        assert answer["content"] == f"\\boxed{{{problems[index]['answer']}}}"


def test_some_demonstrations_answer_without_a_look() -> None:
    """As many as asked; the answer is right all the same."""
    lengths = [len(row["messages"]) for row in sheets(demonstrations=True, unzoomed=0.3)]
    assert set(lengths) == {2, 4}
    assert 4 <= lengths.count(2) <= 20
    assert {len(row["messages"]) for row in sheets(demonstrations=True)} == {4}
    assert {len(row["messages"]) for row in sheets(demonstrations=True, unzoomed=1.0)} == {2}


def test_some_demonstrations_zoom_in_on_an_empty_cell() -> None:
    """As many as asked, on one of all the others."""
    table = sheets(demonstrations=True, misaimed=0.5)
    boxes = [table[index]["messages"][1]["tool_calls"][0]["arguments"]["bbox_2d"] for index in range(len(table))]
    wrong = [box for index, box in enumerate(boxes) if (box[0] * CELLS, box[1] * CELLS) != table.cell(index)]
    assert 10 <= len(wrong) <= 30
    assert len({tuple(box) for box in wrong}) > 8


def test_a_source_gives_problems_or_demonstrations() -> None:
    """By what the rows are read for; held-out pictures stay held out."""
    config = SourceConfig(sheet_cells=CELLS)
    problem = built_in(config, num_rows=4)[1]
    assert problem.golds
    assert len(problem.images) == 1
    demonstration = built_in(config, num_rows=4, form=DEMONSTRATIONS)[1]
    assert [message.role for message in demonstration.messages] == ["user", "assistant", "tool", "assistant"]
    assert demonstration.images[0] == problem.images[0]
    assert demonstration.messages[-1].parts == (TextPart(text=f"\\boxed{{{problem.golds[0]}}}"),)


def test_a_sheet_of_one_cell_is_no_sheet() -> None:
    """The remedy is the plain data set."""
    with pytest.raises(ValueError, match="num_cells is 1"):
        GeometrySheets(GeometryDataset(1), num_cells=1)


async def _no_grade(text: str) -> Any:
    raise AssertionError(f"nothing is graded here: {text}")
