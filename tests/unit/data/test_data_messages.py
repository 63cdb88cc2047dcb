"""Prompts as text, messages and messages with parts; where images go; what chat templates would drop."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.model.images import read_sizes
from penstock.records import ImagePart, Message, TextPart, ToolCall
from services.trainer.data.rows.images import ImageReader
from services.trainer.data.rows.messages import (
    make_messages,
    place_images,
    read_completion,
    read_demonstration,
    read_turns,
    split_answer,
)
from tests.support.trainer.data.pictures import png


def prompt(cell: Any, images: list[Any] | None = None, **settings: Any) -> tuple[tuple[Message, ...], list[Any]]:
    """The messages and the images of a row."""
    turns, found = place_images(read_turns(cell), images or [], images_first=settings.pop("images_first", False))
    return make_messages(turns, **settings), found


def user(*parts: TextPart | ImagePart) -> Message:
    """A user message."""
    return Message(role="user", parts=parts)


CALL = {"id": "call_1", "type": "function", "function": {"name": "zoom", "arguments": '{"factor": 2}'}}
A, B = TextPart(text="a"), TextPart(text="b")
FIRST, SECOND = ImagePart(index=0), ImagePart(index=1)


@pytest.mark.parametrize(
    ("cell", "images", "message", "found"),
    [
        ("a", [], user(A), []),
        ("a<image>b<image>", [1, 2], user(A, FIRST, B, SECOND), [1, 2]),
        ([{"role": "user", "content": "<image>a"}], [1], user(FIRST, A), [1]),
        ([{"from": "human", "value": "<image>a"}], [1], user(FIRST, A), [1]),
        (
            [{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "a"}]}],
            [1],
            user(FIRST, A),
            [1],
        ),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "a", "image_url": None},
                        {"type": "image_url", "image_url": {"url": "u"}, "text": None},
                        {"type": "text", "text": "<image>b"},
                    ],
                }
            ],
            [],
            user(A, FIRST, B),
            [{"url": "u"}],
        ),
        (
            [{"role": "user", "content": [{"type": "image", "image": "i"}, "a", "b"]}],
            [],
            user(FIRST, TextPart(text="ab")),
            ["i"],
        ),
    ],
)
def test_each_image_has_one_place(cell: Any, images: list[Any], message: Message, found: list[Any]) -> None:
    """Marks in text, or parts; parts may bring the image. A mark beside the part that replaced it is removed."""
    assert prompt(cell, images) == ((message,), found)


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ({"type": "image", "image": "i", "max_pixels": 9}, {"image": "i", "max_pixels": 9}),
        ({"type": "image", "image": "i", "min_pixels": 4, "max_pixels": None}, {"image": "i", "min_pixels": 4}),
        (
            {"type": "image_url", "image_url": {"url": "u", "min_pixels": 4, "max_pixels": 5}, "max_pixels": 9},
            {"url": "u", "min_pixels": 4, "max_pixels": 9},
        ),
        ({"type": "image", "image": {"bytes": b"i"}, "max_pixels": 9}, {"bytes": b"i", "max_pixels": 9}),
        ({"type": "image", "image": "i", "min_pixels": None, "max_pixels": None}, "i"),
    ],
)
def test_an_image_in_a_message_keeps_its_bounds(part: dict[str, Any], found: Any) -> None:
    """Qwen's form; what other rows of the column leave empty says nothing."""
    assert prompt([{"role": "user", "content": [part, "a"]}]) == ((user(FIRST, A),), [found])


def test_an_image_in_a_message_is_resized_to_its_bounds(tmp_path: Path) -> None:
    """As it is in a column of images."""
    (tmp_path / "a.png").write_bytes(png(size=(40, 30)))
    _, found = prompt([{"role": "user", "content": [{"type": "image", "image": "a.png", "max_pixels": 300}, "a"]}])
    assert read_sizes([ImageReader(folder=tmp_path, max_pixels=1000).read(each) for each in found]) == [(20, 15)]


def test_bounds_without_an_image_are_refused() -> None:
    """A column's image has its bounds in the column; those here would be ignored in silence."""
    part = {"type": "image", "max_pixels": 9}
    with pytest.raises(ValueError, match=r"the part \{'type': 'image', 'max_pixels': 9\}, .*; put max_pixels beside"):
        prompt([{"role": "user", "content": [part, "a"]}], [1])


def test_all_roles_and_the_suffix_of_the_last_user_message() -> None:
    """A conversation keeps its order, a tool's message with an image included."""
    roles = ("system", "user", "assistant", "tool", "user", "tool")
    messages, _ = prompt(
        [{"role": role, "content": "<image>a" if role == "tool" else "a"} for role in roles], [1, 2], prompt_suffix="b"
    )
    assert [message.role for message in messages] == list(roles)
    assert messages[3].parts == (FIRST, A)
    assert messages[4].parts == (TextPart(text="ab"),)


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        json.dumps([CALL]),
        [{"name": "zoom", "arguments": {"factor": 2}}],
        [{"id": None, "function": {"name": "zoom", "arguments": {"factor": 2, "of_another_tool": None}}}],
    ],
)
@pytest.mark.parametrize("content", [None, "", "a"])
def test_an_assistant_may_call_tools(calls: Any, content: str | None) -> None:
    """In OpenAI's form or bare, arguments as an object or as JSON; images stay where they are."""
    messages, found = prompt(
        [
            {"role": "user", "content": "<image>a", "tool_calls": ""},
            {"role": "assistant", "content": content, "tool_calls": calls},
            {"role": "tool", "content": "<image>b", "tool_calls": None},
        ],
        [1, 2],
    )
    assert found == [1, 2]
    assert messages[1].tool_calls == (ToolCall(name="zoom", arguments={"factor": 2}),)
    assert messages[1].parts == ((A,) if content else ())
    assert messages[0].tool_calls == messages[2].tool_calls == ()


@pytest.mark.parametrize(
    ("calls", "arguments"),
    [
        ([{"name": "zoom", "arguments": {"factor": 2, "unit": None}}], {"factor": 2}),
        ([{"name": "zoom", "arguments": '{"factor": 2, "unit": null}'}], {"factor": 2, "unit": None}),
        ('[{"name": "zoom", "arguments": {"factor": 2, "unit": null}}]', {"factor": 2, "unit": None}),
    ],
    ids=["struct", "text", "text of all calls"],
)
def test_a_null_argument_that_a_text_spells_stays(calls: Any, arguments: dict[str, Any]) -> None:
    """A struct's belongs to another row, because a column has one type."""
    [_, turn] = read_turns([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}])
    assert turn.tool_calls == (ToolCall(name="zoom", arguments=arguments),)


ASKED = {"role": "user", "content": "a", "weight": 0}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (
            {"content": "b", "reasoning_content": "c"},
            "message 1, .* with reasoning_content, which .*; put it into the con",
        ),
        ({"content": "b", "reasoning": "c"}, "message 1, .* with reasoning, .*, between <think> and </think>"),
        ({"content": "b", "thinking": "c"}, "message 1, .* with thinking, .*, between <think> and </think>"),
        ({"content": "b", "weight": 0}, "message 1, .* with weight = 0, .*; remove the message or the row"),
        ({"content": "b", "weight": 0.0}, "message 1, .* with weight = 0"),
    ],
    ids=str,
)
def test_what_a_demonstration_would_not_learn_as_it_says_is_refused(message: dict[str, Any], words: str) -> None:
    """Thoughts beside the content, and a message that is not to be learned."""
    with pytest.raises(ValueError, match=words):
        read_demonstration([ASKED, {"role": "assistant", **message}])
    with pytest.raises(ValueError, match=words.replace("1", "0")):
        read_completion([{"role": "assistant", **message}])
    assert len(read_turns([ASKED, {"role": "assistant", **message}, ASKED])) == 3, "as earlier turns of a prompt"


def test_fields_of_other_rows_say_nothing_in_a_demonstration() -> None:
    """Columns of structs have them in every message."""
    empty = {"reasoning_content": None, "reasoning": "", "thinking": None, "weight": None}
    cell = [{**ASKED, **empty}, {"role": "assistant", "content": "b", **empty, "weight": 1}]
    assert read_demonstration(cell) == read_turns(cell)
    assert read_demonstration("a") == read_turns("a")


def test_thoughts_that_the_content_has_too_are_learned() -> None:
    """Some data sets publish them in both places."""
    cell = [ASKED, {"role": "assistant", "content": "<think>\nc\n</think>\n\nb", "reasoning_content": "c"}]
    assert read_demonstration(cell) == read_turns(cell)


def test_roles_of_sharegpt() -> None:
    """Its own names and the usual ones."""
    roles = ("system", "human", "gpt", "observation", "user", "assistant", "tool")
    messages, _ = prompt([{"from": role, "value": "a"} for role in roles])
    assert [message.role for message in messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "user",
        "assistant",
        "tool",
    ]


def test_the_last_message_can_be_the_answer() -> None:
    """It is then no part of the prompt."""
    turns = read_turns([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}])
    assert split_answer(turns) == (turns[:1], "b")
    with pytest.raises(ValueError, match="end with no text of the assistant's"):
        split_answer(turns[:1])


def test_images_first_is_asked_for() -> None:
    """Rows without marks, as some publish them; a row with marks keeps them."""
    conversation = [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]
    messages, found = prompt(conversation, [1, 2], images_first=True)
    assert (messages[1], found) == (user(FIRST, SECOND, A), [1, 2])
    assert prompt("a<image>", [1], images_first=True)[0] == (user(A, FIRST),)
    with pytest.raises(ValueError, match=r"0 <image>, but there are 2 images; .*--data\.images_first=true"):
        prompt("a", [1, 2])
    with pytest.raises(ValueError, match=r"1 <image>, but there are 2 images$"):
        prompt("<image>a", [1, 2], images_first=True)


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ([], "list; want text, or a list of messages"),
        ([{"role": "developer", "content": "a"}], "want messages of role"),
        ([{"from": "function_call", "value": "{}"}], "want messages of role"),
        ([{"from": ["human"], "value": "a"}], "want messages of role"),
        ([{"from": "human", "value": None}], "want its content as text"),
        ([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "last message is the assistant's"),
        ([{"role": "user", "content": None}], "want its content as text"),
        (
            [{"role": "user", "content": [{"type": "video", "video": "v"}]}],
            "'video'.*want type text, image or image_url",
        ),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "last message is the assistant's"),
        ([{"role": "system", "content": "a"}], "no user message"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "the tool call {}; want its name, and arguments"),
        ([{"role": "assistant", "content": "", "tool_calls": 3}], "tool_calls of type int; want a list"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}], "a tool call with text that is no"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}], "want its name, and arguments as"),
        ([{"role": "user", "content": "a", "tool_calls": [CALL]}], "a message of role user with tool_calls"),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "image", "image": "i"}, {"type": "text", "text": "<image><image>"}],
                }
            ],
            "2 <image> beside 1 parts that are images",
        ),
    ],
)
def test_what_is_no_prompt_is_refused(cell: Any, reason: str) -> None:
    """With what was found and what is wanted. An answer at the end would be shown to the policy."""
    with pytest.raises(ValueError, match=reason):
        prompt(cell)


def test_a_second_system_message_is_refused() -> None:
    """Qwen3-VL's template drops it in silence, Qwen3.5's raises."""
    own = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert [message.role for message in prompt(own)[0]] == ["system", "user"]
    assert [message.role for message in prompt(own[1:], system_prompt="s")[0]] == ["system", "user"]
    with pytest.raises(ValueError, match=r"data\.system_prompt would be a second; leave the setting empty, or remove"):
        prompt(own, system_prompt="s")
    with pytest.raises(ValueError, match="a system message that is not the first"):
        prompt([own[0], *own])
