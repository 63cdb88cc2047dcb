"""Calls of tools in text, in both forms, however the text is cut into pieces."""

import json
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.chat.tool_calls import Found, MalformedCall, ToolCallReader
from penstock.records import ToolCall

Format = Literal["hermes", "xml"]

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\né\n</parameter>\n</function>\n"
    "</tool_call>"
)
ADD = ToolCall(name="add", arguments={"a": 1, "b": "é"})
FORMS = [("hermes", CALL), ("xml", XML_CALL)]


def cut(text: str, cuts: list[int]) -> list[str]:
    """`text` in pieces."""
    ends = sorted({min(cut_at, len(text)) for cut_at in cuts} | {len(text)})
    return [text[first:end] for first, end in zip([0, *ends], ends, strict=False)]


def read(pieces: list[str], call_format: Format, tools: tuple[dict[str, Any], ...] = ()) -> list[Found]:
    """All that a reader finds."""
    reader = ToolCallReader(call_format, tools)
    return [each for piece in pieces for each in reader.add(piece)] + reader.finish()


def spoken(found: list[Found]) -> str:
    """All but calls that can be read."""
    return "".join(
        each.text if isinstance(each, MalformedCall) else each for each in found if not isinstance(each, ToolCall)
    )


def calls(found: list[Found]) -> list[Found]:
    """Calls that can be read."""
    return [each for each in found if isinstance(each, ToolCall)]


@pytest.mark.parametrize(("call_format", "call"), FORMS)
@given(cuts=st.lists(st.integers(0, 300)))
def test_calls_are_told_apart_however_they_come(call_format: Format, call: str, cuts: list[int]) -> None:
    """Text, two calls, and text after them."""
    found = read(cut(f"I add.\n{call}\n{call}\n done", cuts), call_format)
    assert calls(found) == [ADD, ADD]
    assert spoken(found) == "I add.done"


HERMES_JUNK = [
    "<tool_call>no JSON</tool_call>",
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {}}',
    "<tool_call>" + "[" * 100_000 + "</tool_call>",
    '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100 + "]" * 100 + "}}</tool_call>",
    "abc \n<tool_call>junk</tool_call>",
    "abc \n<tool_call>junk</tool_call>\n \n<tool_call>junk</tool_call>\n",
    "abc \n<tool_call>no end",
    '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": [-Infinity]}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
    XML_CALL,
]
XML_JUNK = [
    CALL,
    "<tool_call></tool_call>",
    "<tool_call><function=></function></tool_call>",
    "<tool_call><function=f\n<parameter=a>1</parameter></function></tool_call>",
    "<tool_call><parameter=a>1</parameter></tool_call>",
    "<tool_call>so <function=f></function></tool_call>",
    "<tool_call><function=f></function> so</tool_call>",
    "<tool_call><function=f>so<parameter=a>1</parameter></function></tool_call>",
    "<tool_call><function=f><parameter=>1</parameter></function></tool_call>",
    "<tool_call><function=f><function=g></function></tool_call>",
    "<tool_call><function=f></function></function></tool_call>",
    "<tool_call><function=f><parameter=a>1</parameter> so </function></tool_call>",
    "<tool_call><function=f></function>",
]


@pytest.mark.parametrize(
    ("call_format", "text"),
    [
        *(("hermes", text) for text in HERMES_JUNK),
        *(("xml", text) for text in XML_JUNK),
        ("hermes", "a < b <tool_cal"),
        ("hermes", "ends with space \n "),
    ],
)
def test_what_is_no_call_is_passed_on_whole(call_format: Format, text: str) -> None:
    """Whether it comes at once or character by character."""
    for pieces in ([text], [*text[:300], text[300:]]):
        found = read(pieces, call_format)
        assert (spoken(found), calls(found)) == (text, [])
        num_blocks = text.count("<tool_call>")
        assert len([each for each in found if isinstance(each, MalformedCall)]) == num_blocks


@pytest.mark.parametrize(("call_format", "call"), FORMS)
@given(
    parts=st.lists(st.sampled_from(["a", " ", "\n", "<tool_call>junk</tool_call>", "CALL"])),
    cuts=st.lists(st.integers(0, 300)),
)
def test_of_what_is_no_call_only_the_white_space_around_calls_is_dropped(
    call_format: Format, call: str, parts: list[str], cuts: list[int]
) -> None:
    """However text, calls and what looks like calls follow each other, and however they come."""
    text = "".join(parts).replace("CALL", call)
    found = read(cut(text, cuts), call_format)
    first, *rest = text.split(call)
    expected = [first.rstrip() if rest else first, *(part.strip() for part in rest[:-1]), *rest[-1:]]
    expected[1:] = [part.lstrip() for part in expected[1:]]
    assert spoken(found) == "".join(expected)
    assert calls(found) == [ADD] * len(rest)


TAGS = [
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<function=",
    "<parameter=", '{"name": "f", "arguments": {}}', "\n", " ", "x", ">", "<", "1",
]  # fmt: skip


@pytest.mark.parametrize("call_format", ["hermes", "xml"])
@given(parts=st.lists(st.sampled_from(TAGS), max_size=30), cuts=st.lists(st.integers(0, 200)))
def test_any_soup_of_tags_reads_the_same_however_it_is_cut(
    call_format: Format, parts: list[str], cuts: list[int]
) -> None:
    """Nothing raises; what is not part of a call is passed on, but for white space; pieces do not matter."""
    text = "".join(parts)
    whole, pieces = read([text], call_format), read(cut(text, cuts), call_format)
    assert (calls(pieces), spoken(pieces)) == (calls(whole), spoken(whole))
    if not calls(whole):
        assert spoken(whole) == text


@pytest.mark.parametrize("start", ["", "<tool_call>", "<tool_call><function=f><parameter=a>"])
@pytest.mark.parametrize("piece", [" ", "x", "<", "<tool_call", "</parameter>", "</parameter> <parameter=b>", "\n"])
@pytest.mark.parametrize("call_format", ["hermes", "xml"])
def test_of_an_endless_answer_only_the_beginning_of_a_mark_is_searched_again(
    call_format: Format, piece: str, start: str
) -> None:
    """Each token is searched once, however long a block or white space has become."""
    reader = ToolCallReader(call_format)
    reader.add(start)
    for _ in range(2000):
        reader.add(piece)
        assert len(reader._tail) < len("</tool_call>")


def test_a_long_block_is_read_in_one_pass() -> None:
    """A hundred thousand tags, none of which is what it seems: quadratic time would be minutes."""
    for piece in ("</parameter>", "</parameter> ", "\n<parameter=a", "</function>", "<function="):
        text = f"<tool_call><function=f><parameter=a>{piece * 100_000}</tool_call>"
        assert spoken(found := read([text], "xml")) == text or len(calls(found)) == 1


TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}},
}


def one_value(block: str) -> Any:
    """The argument `code` of the only call in a block of the xml form."""
    [call] = read([f"<tool_call>{block}</tool_call>"], "xml", (TOOL,))
    assert isinstance(call, ToolCall)
    assert set(call.arguments) == {"code"}
    return call.arguments["code"]


@pytest.mark.parametrize(
    "value",
    [
        "", "\n", "\n\na\n\n", "  indented\n\ttwice ", "a</parameter>b", "see </function> there", "x <parameter=y> z",
        "</parameter>\n</parameter>", "<function=g>", "null", "None", "5", "true", '{"a": 1}', "<think>", "é 漢字 😀",
    ],
)  # fmt: skip
def test_a_value_of_the_xml_form_is_what_stands_between_its_line_ends(value: str) -> None:
    """Also if it quotes the tags of its own form, and if it looks like another type than its schema's."""
    assert one_value(f"\n<function=f>\n<parameter=code>\n{value}\n</parameter>\n</function>\n") == value


@pytest.mark.parametrize(
    "block",
    [
        "<function=f><parameter=code>v</parameter></function>",
        "<function=f>\n<parameter=code>\nv\n</function>",
        "<function=f>\n<parameter=code>\nv\n</parameter>\n",
        "<function=f>\n<parameter=code>\nv\n",
        "\n\n<function= f >\n<parameter= code >\nv\n</parameter>\n\n</function>\n\n",
        "<function=f>\n<parameter=code>\nold\n</parameter>\n<parameter=code>\nv\n</parameter>\n</function>",
    ],
)
def test_the_xml_form_is_read_with_the_leniency_of_published_parsers(block: str) -> None:
    """Line ends and closing tags may be missing; the last of two values counts, as in JSON."""
    assert one_value(block) == "v"


def test_a_parameter_without_its_end_does_not_swallow_the_next() -> None:
    """The next one begins on a line of its own."""
    block = "<function=f>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>"
    assert read([f"<tool_call>{block}</tool_call>"], "xml") == [ToolCall(name="f", arguments={"a": 1, "b": 2})]


def test_a_block_of_the_xml_form_may_hold_several_calls() -> None:
    """Published parsers read them, too; one that cannot be read spoils its block."""
    two = "<tool_call><function=f>\n</function>\n<function=g>\n<parameter=a>\n1\n</parameter>\n</function></tool_call>"
    assert read([two], "xml") == [ToolCall(name="f", arguments={}), ToolCall(name="g", arguments={"a": 1})]


def test_lone_surrogates_of_a_call_become_replacement_characters() -> None:
    """Escapes can spell them, and no answer could carry them; pairs are the characters that they are."""
    block = r'{"name": "f\udc00", "arguments": {"\ud83d": ["\ud83d\ude00", "\ud83d"]}}'
    [call] = read([f"<tool_call>{block}</tool_call>"], "hermes")
    assert call == ToolCall(name="f\ufffd", arguments={"\ufffd": ["😀", "\ufffd"]})
    assert json.dumps(call.arguments, ensure_ascii=False).encode()
