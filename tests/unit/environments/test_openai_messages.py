"""Conversations in OpenAI's form are written and read without a loss."""

import base64

import pytest

from penstock.environments.openai_messages import read_messages, write_messages
from penstock.errors import EnvironmentFailedError
from penstock.records import ImagePart, Message, TextPart, ToolCall
from tests.support.worker.scripted_episodes import picture

PNG, GIF = picture(4, 3), picture(4, 3, form="GIF")
TALK = (
    Message(role="system", parts=(TextPart(text="Be brief."),)),
    Message(role="user", parts=(ImagePart(index=0), TextPart(text="Compare with "), ImagePart(index=1))),
    Message(
        role="assistant",
        parts=(TextPart(text="I look."),),
        tool_calls=(ToolCall(name="zoom", arguments={"box": [0, 0.5], "image": None}),),
    ),
    Message(role="tool", parts=(TextPart(text="done"),)),
)


def test_what_was_written_is_read_back() -> None:
    """Messages, calls and the bytes of images."""
    read = read_messages(write_messages(TALK, (PNG, GIF)), "x")
    assert (read.messages, read.images) == (TALK, (PNG, GIF))


def test_a_text_alone_is_written_as_a_text() -> None:
    """Environments for text read `content` as a string."""
    written = write_messages(TALK, (PNG, GIF))
    assert [message["content"] for message in written if message["role"] != "user"] == ["Be brief.", "I look.", "done"]
    assert written[1]["content"][0]["image_url"]["url"] == f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert written[1]["content"][2]["image_url"]["url"].startswith("data:image/gif;base64,")


def test_parts_stay_in_their_order() -> None:
    """In each form that libraries write."""
    url = write_messages(TALK, (PNG, GIF))[1]["content"][0]["image_url"]["url"]
    content = [
        {"type": "text", "text": "a"},
        {"type": "image", "image": PNG},
        "b",
        {"type": "image_url", "image_url": url},
        {"type": "image", "url": url},
        {"type": "text", "text": ""},
    ]
    read = read_messages([{"role": "user", "content": content}, {"role": "tool", "content": None}], "x")
    assert [getattr(part, "text", "picture") for part in read.messages[0].parts] == [
        *("a", "picture", "b", "picture", "picture", "")
    ]
    assert read.images == (PNG, PNG, PNG)
    assert read.messages[1] == Message(role="tool", parts=())


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("Hello", r"what it said = 'Hello' must be a list of messages; return \[\{\"role\""),
        (None, "what it said = None must be a list"),
        (["Hello"], r"what it said\[0\] = 'Hello' must be a message"),
        ([{"role": "bot", "content": ""}], r"what it said\[0\].role = 'bot' must be one of system, user, assistant"),
        ([{"content": ""}], r"what it said\[0\].role = None must be"),
        ([{"role": "user", "content": 3}], r"what it said\[0\].content = 3 must be a text or a list of parts"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"\.content\[0\] = \{'type': 'image'\} is no part"),
        ([{"role": "user", "content": [{"type": "video", "video": ""}]}], r"is no part that can be shown; write"),
        ([{"role": "user", "content": ["", {"type": "image", "image": 3}]}], r"content\[1\]\.image is a int; give"),
        ([{"role": "user", "content": "", "tool_calls": [{"name": "a", "arguments": {}}]}], "only the assistant's"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"name": "a", "arguments": "["}]}], "is no call; write"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"name": "a", "arguments": "3"}]}], "is no call; write"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: object, reason: str) -> None:
    """With the place, the value and the remedy."""
    with pytest.raises(EnvironmentFailedError, match=reason):
        read_messages(messages, "what it said")
