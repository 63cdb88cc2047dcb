"""What is thought and what is said, however it comes in pieces, and turns taken apart by both readers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.chat.assistant_turn import AssistantTurn
from penstock.model.chat.reasoning import ReasoningReader, ThoughtSplitter
from penstock.records import ToolCall
from tests.unit.model.test_tool_calls import cut


def read(pieces: list[str], *, is_open: bool) -> tuple[str, str]:
    """Reasoning and content."""
    reader = ReasoningReader(is_open=is_open)
    spoken = [*map(reader.add, pieces), reader.finish()]
    return "".join(piece.reasoning for piece in spoken), "".join(piece.content for piece in spoken)


@pytest.mark.parametrize(
    ("is_open", "text", "reasoning", "content"),
    [
        (True, "I see.\n</think>\n\nIt is 3.\n", "I see.", "It is 3.\n"),
        (True, "\n<think>\nI see.\n</think>\n\nIt is 3.", "I see.", "It is 3."),
        (True, "I see and see", "I see and see", ""),
        (True, "</think>3", "", "3"),
        (True, "", "", ""),
        (True, "a </think> b </think> c", "a", "b </think> c"),
        (True, "a </thin", "a </thin", ""),
        (True, "<thi", "<thi", ""),
        (False, "<think>\nI see.\n</think>\n\nIt is 3.", "I see.", "It is 3."),
        (False, " \n<think>never closed", "never closed", ""),
        (False, "It is <think>so</think> 3.", "", "It is <think>so</think> 3."),
        (False, "a </think> b", "", "a </think> b"),
        (False, "  spaced ", "", "  spaced "),
        (False, " <thin", "", " <thin"),
        (False, " \n", "", " \n"),
    ],
)
def test_reasoning_ends_with_its_mark_or_never(is_open: bool, text: str, reasoning: str, content: str) -> None:
    """At once and character by character; thinking that is not closed says nothing."""
    assert read([text], is_open=is_open) == read(list(text), is_open=is_open) == (reasoning, content)


SOUP = st.lists(st.sampled_from(["<think>", "</think>", "<", "<thi", "a", " ", "\n", "</"]), max_size=20)


@given(SOUP, st.booleans(), st.lists(st.integers(0, 60)))
def test_nothing_is_lost_but_marks_and_white_space(parts: list[str], is_open: bool, cuts: list[int]) -> None:
    """And pieces do not matter."""
    text = "".join(parts)
    reasoning, content = read([text], is_open=is_open)
    assert read(cut(text, cuts), is_open=is_open) == (reasoning, content)

    def bare(said: str) -> str:
        return "".join(said.replace("<think>", "", 1).replace("</think>", "", 1).split())

    if not reasoning and not content.strip():
        assert bare(text) == ""
    assert "".join(text.split()).endswith("".join(content.split()))
    assert len("".join(text.split())) - len("".join((reasoning + content).split())) in (0, 7, 8, 15)


@given(SOUP, st.booleans(), st.lists(st.integers(0, 60)))
def test_thoughts_and_what_is_said_are_the_text(parts: list[str], is_open: bool, cuts: list[int]) -> None:
    """With all marks and white space; what is said begins behind the closing mark."""
    text = "".join(parts)
    splitter = ThoughtSplitter(is_open=is_open)
    spoken = [*map(splitter.add, cut(text, cuts)), splitter.finish()]
    reasoning, content = "".join(piece.reasoning for piece in spoken), "".join(piece.content for piece in spoken)
    assert reasoning + content == text
    if is_open or text.lstrip().startswith("<think>"):
        thought, mark, said = text.partition("</think>")
        assert (reasoning, content) == (thought + mark, said)
    else:
        assert reasoning == ""


@pytest.mark.parametrize("is_open", [True, False])
def test_of_endless_white_space_or_thought_nothing_is_read_twice(is_open: bool) -> None:
    """What is kept to be searched again is shorter than a mark."""
    for piece in (" ", "x", "<", "</think", "<think"):
        splitter = ThoughtSplitter(is_open=is_open)
        for _ in range(2000):
            splitter.add(piece)
            assert len(splitter._tail) < len("</think>")


CALL = '<tool_call>\n{"name": "zoom", "arguments": {"factor": 2}}\n</tool_call>'
ZOOM = ToolCall(name="zoom", arguments={"factor": 2})


def test_a_turn_has_reasoning_content_calls_and_what_is_wrong() -> None:
    """A call inside of reasoning is a thought."""
    text = f"maybe {CALL}\n</think>\n\nI look.\n{CALL}\n<tool_call>zoom!</tool_call> then\n<tool_call>cut"
    turn = AssistantTurn.parse(text, is_thinking=True)
    assert turn == AssistantTurn(
        text=text,
        reasoning=f"maybe {CALL}",
        content="I look. then",
        calls=(ZOOM,),
        malformed_calls=("zoom!", "cut"),
    )


def test_a_turn_that_never_stops_thinking_calls_nothing() -> None:
    """It said nothing."""
    turn = AssistantTurn.parse(f"hm {CALL}", is_thinking=True)
    assert (turn.reasoning, turn.content, turn.calls) == (f"hm {CALL}", "", ())
    assert AssistantTurn.parse(f"hm {CALL}").calls == (ZOOM,)


def test_the_form_and_the_schemas_of_a_turn_are_the_callers() -> None:
    """The same text means other values under another schema."""
    text = "<tool_call>\n<function=zoom>\n<parameter=factor>\n2\n</parameter>\n</function>\n</tool_call>"
    tool = {"name": "zoom", "parameters": {"properties": {"factor": {"type": "string"}}}}
    assert AssistantTurn.parse(text, call_format="xml").calls == (ZOOM,)
    assert AssistantTurn.parse(text, call_format="xml", tools=[tool]).calls[0].arguments == {"factor": "2"}
    assert AssistantTurn.parse(text).malformed_calls == (text[len("<tool_call>") : -len("</tool_call>")],)
