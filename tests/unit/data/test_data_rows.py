"""What a row says for itself: profile, environment, length of answers, and the columns that travel with it."""

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import structlog
from pydantic import ValidationError

from penstock.errors import DataError
from services.trainer.data.config import DataConfig
from services.trainer.data.dataset import open_dataset
from services.trainer.data.rows.example import Example
from tests.support.trainer.data.pictures import png


def examples(tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> list[Example]:
    """The rows of a file, in order."""
    pq.write_table(
        pa.Table.from_pylist([{"problem": "?", "answer": "1", **row} for row in rows]), tmp_path / "a.parquet"
    )
    dataset = open_dataset(DataConfig(path=str(tmp_path / "a.parquet"), shuffle=False, **settings))
    return [dataset[position] for position in range(len(rows))]


def test_a_row_has_its_own_profile_environment_and_length(tmp_path: Path) -> None:
    """Where it has none, the settings of its source hold."""
    rows = [
        {"data": {"profile": "mcq", "env": None}, "sampling": {"max_new_tokens": 64, "temperature": None}},
        {"data": {"profile": None, "env": "tools"}, "sampling": None},
    ]
    named = {"profile_column": "data.profile", "environment_column": "data.env", "sampling_column": "sampling"}
    found = examples(tmp_path, rows, profile="math", **named)
    assert [(each.profile, each.environment, each.max_new_tokens) for each in found] == [
        ("mcq", "single_turn", 64),
        ("math", "tools", None),
    ]


TOOL = {"type": "function", "function": {"name": "zoom", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("cell", [json.dumps([TOOL]), [{**TOOL, "function": {**TOOL["function"], "strict": None}}]])
def test_a_row_may_have_tools(tmp_path: Path, cell: Any) -> None:
    """As JSON text, or as structs, where a field of another row's tool is null."""
    found = examples(tmp_path, [{"tools": cell}, {"tools": None}], tools_column="tools")
    assert [each.tools for each in found] == [(TOOL,), ()]


def test_a_null_that_the_text_of_a_tool_spells_stays(tmp_path: Path) -> None:
    """As the default of a parameter."""
    tool = {**TOOL, "function": {"name": "zoom", "parameters": {"properties": {"unit": {"default": None}}}}}
    [found] = examples(tmp_path, [{"tools": json.dumps([tool])}], tools_column="tools")
    assert found.tools == (tool,)


def test_rows_without_tools_have_those_of_their_source(tmp_path: Path) -> None:
    """A row's own replace them."""
    other = {**TOOL, "function": {"name": "crop"}}
    found = examples(tmp_path, [{"tools": json.dumps([TOOL])}, {"tools": None}], tools_column="tools", tools=(other,))
    assert [each.tools for each in found] == [(TOOL,), (other,)]
    with pytest.raises(ValidationError, match=r"tools\.1 has no function with a name; write a tool in OpenAI's form"):
        DataConfig(tools=(other, {"type": "function"}))


def test_several_image_columns_are_read_in_their_order(tmp_path: Path) -> None:
    """Each may hold one image, a list or none; places in the text take them column by column."""
    red, green, blue = (png(color) for color in ("red", "green", "blue"))
    rows = [
        {"problem": "<image>a<image>b<image>", "left": red, "right": [green, blue]},
        {"problem": "<image>a", "left": red, "right": []},
        {"problem": "a", "left": None, "right": []},
    ]
    found = examples(tmp_path, rows, images_column=("left", "right"))
    assert [each.images for each in found] == [(red, green, blue), (red,), ()]
    swapped = examples(tmp_path, rows[:1], images_column=("right", "left"))
    assert swapped[0].images == (green, blue, red)
    with pytest.raises(DataError, match=r"row 0: its text has 3 <image>, but there are 2 images"):
        examples(tmp_path, rows, images_column=("right",))


def test_rows_without_marks_are_counted(tmp_path: Path) -> None:
    """With images_first, the log says of how many rows the images were put before the text."""
    rows = [{"problem": text, "images": [png()]} for text in ("<image>a", "a", "b", "c<image>")]
    with structlog.testing.capture_logs() as logged:
        found = examples(tmp_path, rows, images_first=True)
    assert [each.images_put_first for each in found] == [False, True, True, False]
    (event,) = [each for each in logged if each["event"] == "data.images_put_first"]
    assert (event["num_rows"], event["num_rows_checked"]) == (2, 4)
    with structlog.testing.capture_logs() as logged:
        examples(tmp_path, [rows[0]], images_first=True)
    assert not [each for each in logged if each["event"] == "data.images_put_first"]


def test_tool_calls_come_with_their_message(tmp_path: Path) -> None:
    """From JSON Lines and from Parquet, whose structs have the fields of every tool."""
    calls = [
        {"type": "function", "function": {"name": "zoom", "arguments": {"factor": 2, "label": None}}},
        {"type": "function", "function": {"name": "find", "arguments": {"factor": None, "label": "A"}}},
    ]
    messages = [
        {"role": "user", "content": "?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_calls": None},
        {"role": "tool", "content": "2", "tool_calls": None},
    ]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": messages, "answer": "1"}))
    pq.write_table(pa.Table.from_pylist([{"prompt": messages, "answer": "1"}]), tmp_path / "b.parquet")
    for file in ("a.jsonl", "b.parquet"):
        example = open_dataset(DataConfig(path=str(tmp_path / file)))[0]
        assert [(call.name, call.arguments) for call in example.messages[1].tool_calls] == [
            ("zoom", {"factor": 2}),
            ("find", {"label": "A"}),
        ]


def test_a_conversation_may_end_with_the_answer(tmp_path: Path) -> None:
    """The assistant's last message, if the settings say so; the policy never sees it."""
    conversation = [{"from": "human", "value": "2 + 3?"}, {"from": "gpt", "value": "<answer>5</answer>"}]
    pq.write_table(pa.Table.from_pylist([{"conversations": conversation}]), tmp_path / "a.parquet")
    config = DataConfig(path=str(tmp_path / "a.parquet"), answer_column="conversations")
    example = open_dataset(config)[0]
    assert [message.role for message in example.messages] == ["user"]
    assert example.golds == ("5",)


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        (
            {"s": {"temperature": 0.5}},
            {"sampling_column": "s"},
            "column 's' holds .*temperature.* a row may have its own",
        ),
        ({"s": {"max_new_tokens": 0}}, {"sampling_column": "s"}, "row 0: column 's' holds"),
        ({"t": "[{"}, {"tools_column": "t"}, "row 0: column 't' holds text that is no JSON"),
        ({"t": ["zoom"]}, {"tools_column": "t"}, "row 0: column 't' holds .*; want a list of tools in OpenAI's form"),
        ({"p": 3}, {"profile_column": "p"}, "row 0: column 'p' holds int; want a name as text"),
        ({}, {"environment_column": "env_class"}, "no column 'env_class'; .* --data.environment_column="),
        ({}, {"extra_columns": ("tools",)}, "no column 'tools'; .* --data.extra_columns="),
    ],
)
def test_what_a_row_may_not_say(tmp_path: Path, row: dict[str, Any], settings: dict[str, Any], words: str) -> None:
    """Log-probabilities are computed for one temperature, so a row cannot choose another in silence."""
    with pytest.raises(DataError, match=words):
        examples(tmp_path, [row], **settings)


def test_what_the_bus_cannot_hold_is_refused_or_made_to_fit(tmp_path: Path) -> None:
    """JSON can write half of a character, integers of any size and lists of any depth."""
    file = tmp_path / "a.jsonl"
    file.write_text(r'{"problem": "?", "answer": "1", "note": "a\ud800b", "id": 18446744073709551616}')
    assert open_dataset(DataConfig(path=str(file)))[0].extra == {"note": "a?b", "id": "18446744073709551616"}
    file.write_text(r'{"problem": "a\ud800b", "answer": "1"}')
    with pytest.raises(DataError, match=r"row 0: a text has half of a character at 1 \('.ud800'\)"):
        open_dataset(DataConfig(path=str(file)))
    file.write_text(f'{{"problem": "?", "answer": "1", "deep": {"[" * 900}{"]" * 900}}}')
    with pytest.raises(DataError, match=r"row 0: .*recursion"):
        open_dataset(DataConfig(path=str(file)))


def test_further_columns_travel_with_the_prompt(tmp_path: Path) -> None:
    """As JSON: without bytes, NaN as null. A list of columns takes these alone, an empty one none."""
    row = {
        "problem": "<image>?",
        "images": [png()],
        "data_source": "geo3k",
        "extra_info": {"index": 3, "tools_kwargs": {"calc": {"gold": "1"}}, "raw": b"x"},
        "score": float("nan"),
        "made": datetime.date(2026, 1, 2),
        "thumbnail": b"bytes",
        "nothing": None,
    }
    everything = {
        "data_source": "geo3k",
        "extra_info": {"index": 3, "tools_kwargs": {"calc": {"gold": "1"}}},
        "score": None,
        "made": "2026-01-02",
    }
    assert examples(tmp_path, [row])[0].extra == everything
    some = examples(tmp_path, [row], extra_columns=("data_source", "extra_info.index"))
    assert some[0].extra == {"data_source": "geo3k", "extra_info.index": 3}
    assert examples(tmp_path, [row], extra_columns=())[0].extra == {}
