"""Ids to text, stop strings and calls of tools, however the text is cut into pieces."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import SamplingConfig
from penstock.errors import ConfigError
from penstock.model.chat.chat_template import Renderer
from penstock.model.chat.reasoning import ReasoningReader, ThoughtSplitter
from penstock.model.chat.tool_calls import ToolCallReader
from penstock.model.detokenize import IncrementalDetokenizer, TokenTexts
from penstock.records import ToolCall
from penstock.v1 import common_pb2, generate_pb2
from services.router.frontends.openai.choice import Choice
from services.router.frontends.openai.request_parser import RequestParser
from services.router.frontends.openai.responses import ChatFormat
from services.router.frontends.openai.schema.requests import ChatRequest
from services.router.frontends.openai.stop import StopFinder
from services.router.tuning import OpenAITuning
from tests.support.router.openai_tools import ADD as ADD_TOOL

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
ADD = ToolCall(name="add", arguments={"a": 1, "b": "é"})


@pytest.fixture(scope="module")
def renderer(tiny_model_path: Path) -> Renderer:
    return Renderer.load(tiny_model_path)


@pytest.fixture(scope="module")
def texts(renderer: Renderer) -> TokenTexts:
    return renderer.token_texts()


def cut(text: str, cuts: list[int]) -> list[str]:
    """`text` in pieces."""
    ends = sorted({min(cut_at, len(text)) for cut_at in cuts} | {len(text)})
    return [text[first:end] for first, end in zip([0, *ends], ends, strict=False)]


def test_pieces_are_the_text_of_the_tokenizer_whatever_the_ids(renderer: Renderer, texts: TokenTexts) -> None:
    """Random ids, most of them no UTF-8: together what transformers decodes, special tokens left out."""
    rng = random.Random(0)
    for _ in range(3000):
        ids = [rng.randrange(390) for _ in range(rng.randrange(1, 20))]
        stream = IncrementalDetokenizer(texts)
        assert "".join(map(stream.add, ids)) + stream.finish() == renderer.decode(ids), ids


def test_a_character_is_told_when_it_is_whole(renderer: Renderer, texts: TokenTexts) -> None:
    """No replacement character in mid-stream, though each character takes several tokens."""
    text = "é😀 日本語 👩‍👩‍👧"
    ids = renderer.render_text(text)
    assert len(ids) > len(text)
    stream = IncrementalDetokenizer(texts)
    pieces = [stream.add(number) for number in ids]
    assert "".join(pieces) == text
    assert "" in pieces
    assert stream.finish() == ""


def test_what_ends_within_a_character_says_so(renderer: Renderer, texts: TokenTexts) -> None:
    """As the tokenizer does: one U+FFFD."""
    ids = renderer.render_text("😀")[:-1]
    stream = IncrementalDetokenizer(texts)
    assert "".join(map(stream.add, ids)) == ""
    assert stream.finish() == "\ufffd"


def test_special_tokens_say_nothing_and_have_names(texts: TokenTexts, renderer: Renderer) -> None:
    """Markup that is not special is text."""
    end, call = renderer.render_text("<|im_end|>"), renderer.render_text("<tool_call>")
    assert len(end) > 1
    assert "".join(texts.name_of(number) for number in end) == "<|im_end|>"
    assert [texts.bytes_of(number) for number in call] == [b"<tool_call>"]
    assert (texts.bytes_of(10**6), texts.name_of(10**6)) == (b"", "")


def test_other_tokenizers_are_refused(tiny_model_path: Path) -> None:
    """Rather than stream text that is wrong."""
    from tokenizers import decoders
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tiny_model_path))
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace()
    with pytest.raises(ConfigError, match="only text of byte-level BPE can be streamed"):
        Renderer(tokenizer, image_token_id=None).token_texts()


@given(st.text("abE", max_size=12), st.lists(st.integers(0, 12)), st.lists(st.text("abE", min_size=1), max_size=3))
def test_stop_strings_cut_the_text_where_the_first_begins(text: str, cuts: list[int], stops: list[str]) -> None:
    """However it comes in pieces. One that completes earlier wins over one that begins earlier and completes later."""
    finder = StopFinder(stops)
    emitted = "".join(finder.add(piece) for piece in cut(text, cuts))
    emitted += finder.finish()
    found = [text.find(stop) for stop in stops if stop in text]
    assert finder.found == bool(found)
    if found:
        assert text.startswith(emitted)
        assert any(text[len(emitted) :].startswith(stop) for stop in stops)
    else:
        assert emitted == text


def test_nothing_of_a_stop_string_is_told_early() -> None:
    """What may become one is held back, and emitted when it does not."""
    finder = StopFinder(["END"])
    assert [finder.add(piece) for piece in ("a", "E", "N", "X", "EN")] == ["a", "", "", "ENX", ""]
    assert finder.add("D more") == ""
    assert finder.found
    assert finder.add("more") == finder.finish() == ""


def chunk(ids: list[int], version: int = 1, finish: int = 0) -> generate_pb2.GenerateChunk:
    return generate_pb2.GenerateChunk(
        output_ids=ids,
        logprobs=[-0.5] * len(ids),
        version_spans=[common_pb2.VersionSpan(num_tokens=len(ids), policy_version=version)],
        finish_reason=finish,
    )


def test_a_stop_string_cuts_tokens_after_the_one_that_completed_it(renderer: Renderer, texts: TokenTexts) -> None:
    """The policy did say it, so its tokens stay, with their logprobs and versions; what came behind is forgotten."""
    before, after = renderer.render_text("say END"), renderer.render_text(" and more")
    choice = Choice(texts, stops=["END"], calls=None)
    choice.take(chunk(before[:2], version=1))
    piece = choice.take(chunk([*before[2:], *after], version=2))
    assert piece.is_last
    assert (choice.content, choice.finish_reason, choice.was_cut) == ("say ", "stop", True)
    assert [token.number for token in choice.tokens] == before
    assert [(span.num_tokens, span.policy_version) for span in choice.version_spans] == [(2, 1), (len(before) - 2, 2)]


def test_an_answer_that_calls_ends_for_that_unless_it_was_cut_short(renderer: Renderer, texts: TokenTexts) -> None:
    """OpenAI's word for it is tool_calls; length stays length."""
    for finish, expected in (
        (generate_pb2.FINISH_REASON_STOP, "tool_calls"),
        (generate_pb2.FINISH_REASON_LENGTH, "length"),
    ):
        choice = Choice(texts, stops=[], calls=ToolCallReader("hermes"))
        choice.take(chunk(renderer.render_text(f"ok {CALL}"), finish=finish))
        assert (choice.content, choice.calls, choice.finish_reason) == ("ok", [ADD], expected)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("separates", [True, False])
def test_a_call_inside_of_thoughts_is_no_call(
    renderer: Renderer, texts: TokenTexts, is_open: bool, separates: bool
) -> None:
    """Whether the prompt or the answer opens them, and whether they are apart from the content or begin it."""
    thought = f"I could {CALL}."
    marked = f"{'' if is_open else '<think>'}{thought}</think>"
    choice = Choice(
        texts,
        stops=[],
        calls=ToolCallReader("hermes"),
        thoughts=(ReasoningReader if separates else ThoughtSplitter)(is_open=is_open),
        separates_reasoning=separates,
    )
    for number in renderer.render_text(f"{marked}\n\nSo: {CALL}"):
        choice.take(chunk([number]))
    choice.take(chunk([356], finish=generate_pb2.FINISH_REASON_STOP))
    assert (choice.calls, choice.finish_reason) == ([ADD], "tool_calls")
    expected = (thought, "So:") if separates else ("", f"{marked}\n\nSo:")
    assert (choice.reasoning, choice.content) == expected


def test_what_was_held_back_is_told_at_the_end(renderer: Renderer, texts: TokenTexts) -> None:
    """The beginning of a stop string that never came."""
    choice = Choice(texts, stops=["END"], calls=None)
    assert choice.take(chunk(renderer.render_text("the EN"))).content == "the "
    end = choice.take(chunk(renderer.render_text("\n"), finish=generate_pb2.FINISH_REASON_LENGTH))
    assert (end.content, choice.finish_reason) == ("EN\n", "length")


def test_a_stream_tells_of_what_it_has_sent(renderer: Renderer, texts: TokenTexts) -> None:
    """However far the policy is ahead of a slow client: its calls are numbered in order, and its counts and versions
    are those so far."""
    asked = {"stream": True, "stream_options": {"continuous_usage_stats": True}, "tools": [ADD_TOOL]}
    body = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **asked})
    parser = RequestParser(
        OpenAITuning(), SamplingConfig(), renderer, longest_token_bytes=1, context_length=lambda: 999
    )
    choice = Choice(texts, stops=[], calls=ToolCallReader("hermes"))
    request = parser.parse_chat(body, session_id="", is_recorded=False)
    form = ChatFormat(request, [choice], texts, model="m")
    ids = renderer.render_text(CALL)
    deltas = [choice.take(chunk(ids, version=version)) for version in (3, 4)]
    found = []
    for delta in deltas:
        form.take(delta)
        event = form.delta(0, delta)
        assert event is not None
        [call] = event["choices"][0]["delta"]["tool_calls"]
        found.append((call["index"], event["usage"]["completion_tokens"], event["system_fingerprint"]))
    assert found == [(0, len(ids), "policy-3"), (1, 2 * len(ids), "policy-4")]


def test_the_newest_version_of_a_choice(texts: TokenTexts) -> None:
    """It is the highest so far, also when an older engine goes on."""
    choice = Choice(texts, stops=[], calls=None)
    assert choice.newest_version == 0
    choice.take(chunk([5], version=2))
    choice.take(chunk([5], version=1))
    assert choice.newest_version == 2
