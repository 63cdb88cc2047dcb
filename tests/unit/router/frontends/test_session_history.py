"""The prompt of a session's next answer: what was said before stands in it id for id."""

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidRequestError
from penstock.model.chat.chat_template import Renderer
from penstock.records import ImagePart, Message, SessionCall, TextPart, ToolCall, VersionSpan
from services.router.frontends.openai.sessions.digests import digest_next, digest_start
from services.router.frontends.openai.sessions.history import Chat, NextPrompt, SessionHistory

END_ID = 356
A, B, C = "a" * 64, "b" * 64, "c" * 64
"""Hashes of images."""
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)


@pytest.fixture(scope="module")
def renderer(tiny_model_path: Path) -> Renderer:
    """The tiny model's renderer."""
    return Renderer.load(tiny_model_path)


def message(role: Any, text: str, *calls: ToolCall) -> Message:
    """A message of text."""
    return Message(role=role, parts=(TextPart(text=text),) if text else (), tool_calls=calls)


def chat(*messages: Message, tools: Sequence[Any] = (), images: Sequence[str] = (), **template_kwargs: Any) -> Chat:
    """A chat."""
    return Chat(messages=messages, images=images, tools=tools, template_kwargs=template_kwargs)


def make_call(prompt: NextPrompt, said: Message, ids: Sequence[int], begun: Sequence[int] = ()) -> SessionCall:
    """The record of what the policy said in these ids, after those with which the router began it."""
    return SessionCall(
        request_id="q",
        choice=0,
        continues=prompt.continues,
        conversation=digest_next(prompt.conversation, said),
        answer=digest_next("", said),
        input_ids=np.array([*prompt.added_ids, *begun], "<i4"),
        num_begun=len(begun),
        images=tuple(prompt.added_images),
        output_ids=np.array(ids, "<i4"),
        logprobs=np.zeros(len(ids), "<f4"),
        version_spans=(VersionSpan(num_tokens=len(ids), policy_version=1),),
        finish_reason="stop",
        num_prompt_tokens=len(prompt.input_ids) + len(begun) + 8 * len(prompt.images),
        num_cached_tokens=0,
    )


def answer(
    history: SessionHistory, prompt: NextPrompt, said: Message, ids: Sequence[int], begun: Sequence[int] = ()
) -> int:
    """Record it; returns the call's number."""
    number = history.last_number + 3
    history.add(number, make_call(prompt, said, ids, begun))
    return number


HI, MORE = message("user", "hi"), message("user", "more")


def test_a_conversation_goes_on_with_the_ids_that_were_sampled(renderer: Renderer) -> None:
    """White space around the answer, the order of a call's arguments and the way of writing JSON do not matter."""
    history = SessionHistory()
    first = history.next_prompt(chat(HI, tools=TOOLS), renderer)
    assert first.input_ids.tolist() == renderer.render_prompt([HI], num_images=0, tools=TOOLS)
    said = message("assistant", "I add.\n", ToolCall(name="add", arguments={"a": True, "b": [1, {"c": None}]}))
    number = answer(history, first, said, [5, 6, END_ID])
    back = message("assistant", " I add.", ToolCall(name="add", arguments={"b": [1, {"c": None}], "a": True}))
    reply = Message(role="tool", parts=(TextPart(text="2"),))
    second = history.next_prompt(chat(HI, back, reply, tools=TOOLS), renderer)
    assert second.continues == number
    assert second.input_ids[: len(first.input_ids) + 3].tolist() == [*first.input_ids, 5, 6, END_ID]
    assert second.added_ids.tolist() == renderer.render_continuation(END_ID, [reply], num_images=0)


@pytest.mark.parametrize(
    "back",
    [
        message("assistant", "I  add.", ToolCall(name="add", arguments={"a": 1})),
        message("assistant", "I add.", ToolCall(name="sub", arguments={"a": 1})),
        message("assistant", "I add.", ToolCall(name="add", arguments={"a": 2})),
        message("assistant", "I add."),
    ],
)
def test_another_answer_than_the_policys_is_a_fork_and_text(renderer: Renderer, back: Message) -> None:
    """It is the agent's own: rendered as the template does."""
    history = SessionHistory()
    said = message("assistant", "I add.", ToolCall(name="add", arguments={"a": 1}))
    answer(history, history.next_prompt(chat(HI), renderer), said, [5, END_ID])
    prompt = history.next_prompt(chat(HI, back, MORE), renderer)
    assert prompt.continues == 0
    assert prompt.input_ids.tolist() == renderer.render_prompt([HI, back, MORE], num_images=0)


def test_the_longest_conversation_is_gone_on_with(renderer: Renderer) -> None:
    """And of several answers that said the same, the last."""
    history = SessionHistory()
    said, again = message("assistant", "one"), message("assistant", "two")
    first = history.next_prompt(chat(HI), renderer)
    answer(history, first, said, [5, END_ID])
    other = answer(history, first, said, [6, END_ID])
    second = history.next_prompt(chat(HI, said, MORE), renderer)
    assert second.continues == other
    third = answer(history, second, again, [7, END_ID])
    prompt = history.next_prompt(chat(HI, said, MORE, again, MORE), renderer)
    assert prompt.continues == third
    assert prompt.input_ids[: len(second.input_ids)] == second.input_ids


def test_other_tools_or_template_arguments_begin_anew_with_the_answers_ids(renderer: Renderer) -> None:
    """The prompt's beginning is another; what the policy said is the same."""
    history = SessionHistory()
    said = message("assistant", "one")
    answer(history, history.next_prompt(chat(HI), renderer), said, [5, 7, END_ID])
    for changed in (chat(HI, said, MORE, tools=TOOLS), chat(HI, said, MORE, mode="x"), chat(MORE, said, MORE)):
        prompt = history.next_prompt(changed, renderer)
        head = renderer.render_prompt(changed.messages[:1], num_images=0, tools=changed.tools)
        assert prompt.continues == 0
        assert prompt.input_ids[: len(head) + 3].tolist() == [*head, 5, 7, END_ID]


def test_an_answer_that_was_begun_for_the_policy_stands_with_its_beginning(renderer: Renderer) -> None:
    """A forced call: in a history that goes on and in one that was rewritten. The beginning is no answer to the
    policy."""
    history = SessionHistory()
    begun = renderer.render_text('<tool_call>\n{"name": "add", "arguments":')
    said = message("assistant", "", ToolCall(name="add", arguments={"a": 1}))
    first = history.next_prompt(chat(HI, tools=TOOLS), renderer)
    number = answer(history, first, said, [5, END_ID], begun)
    second = history.next_prompt(chat(HI, said, MORE, tools=TOOLS), renderer)
    assert second.continues == number
    assert second.input_ids[: second.num_prefix].tolist() == [*first.input_ids, *begun, 5, END_ID]
    answer(history, second, said, [6, END_ID], begun)
    third = history.next_prompt(chat(HI, said, MORE, said, MORE, tools=TOOLS), renderer)
    assert third.num_observed == len(second.added_ids)
    rewritten = history.next_prompt(chat(MORE, said, MORE, tools=TOOLS), renderer)
    head = renderer.render_prompt([MORE], num_images=0, tools=TOOLS)
    whole = [*head, *begun, 6, END_ID]
    assert rewritten.input_ids[: len(whole)].tolist() == whole


@pytest.mark.parametrize(
    ("num_dropped", "num_added", "expected"), [(0, 0, [5, 6, 7]), (1, 0, [6, 7]), (2, 0, [7]), (0, 1, [5, 5, 6, 7])]
)
def test_answers_that_say_the_same_keep_their_ids(
    renderer: Renderer, num_dropped: int, num_added: int, expected: list[int]
) -> None:
    """Each its own, the last the last one's, as histories lose their beginning; one too many has the first one's."""
    history, said = SessionHistory(), message("assistant", "one")
    messages = [HI]
    for number in (5, 6, 7):
        answer(history, history.next_prompt(chat(*messages), renderer), said, [number, END_ID])
        messages += [said, MORE]
    rewritten = [message("system", "Be brief."), *messages[2 * num_dropped :], *([said, MORE] * num_added)]
    prompt = history.next_prompt(chat(*rewritten), renderer)
    assert prompt.continues == 0
    ends = itertools.pairwise(prompt.input_ids)
    assert [before for before, number in ends if number == END_ID and before in (5, 6, 7)] == expected


def test_images_are_part_of_what_was_said(renderer: Renderer) -> None:
    """By their hashes: the same words under another image are another conversation."""
    history = SessionHistory()
    shown = Message(role="user", parts=(ImagePart(index=0), TextPart(text="look")))
    said = message("assistant", "one")
    number = answer(history, history.next_prompt(chat(shown, images=[A]), renderer), said, [5, END_ID])
    later = Message(role="user", parts=(ImagePart(index=1),))
    same = history.next_prompt(chat(shown, said, later, images=[A, B]), renderer)
    assert (same.continues, same.images, same.added_images) == (number, [A, B], [B])
    assert same.num_tokens == len(same.input_ids) + 8
    other = history.next_prompt(chat(shown, said, later, images=[C, B]), renderer)
    assert (other.continues, other.images) == (0, [C, B])


def test_what_came_after_the_first_prompt_is_counted(renderer: Renderer) -> None:
    """With its images as the engine expanded them, without the policy's answers and without what is new."""
    history = SessionHistory()
    shown, later = (Message(role="user", parts=(ImagePart(index=index),)) for index in range(2))
    said, again = message("assistant", "one"), message("assistant", "two")
    first = history.next_prompt(chat(shown, images=[A]), renderer)
    answer(history, first, said, [5, END_ID])
    second = history.next_prompt(chat(shown, said, later, images=[A, B]), renderer)
    answer(history, second, again, [6, 7, END_ID])
    third = history.next_prompt(chat(shown, said, later, again, MORE, images=[A, B]), renderer)
    assert [prompt.num_observed for prompt in (first, second, third)] == [0, 0, len(second.added_ids) + 8]


def test_a_call_that_is_known_is_added_once(renderer: Renderer) -> None:
    """Two requests read the bus at the same time."""
    history = SessionHistory()
    prompt = history.next_prompt(chat(HI), renderer)
    first = answer(history, prompt, message("assistant", "one"), [5])
    answer(history, prompt, message("assistant", "two"), [6])
    size = history.size_bytes
    history.add(first, make_call(prompt, message("assistant", "one"), [5]))
    assert (len(history), history.size_bytes, history.last_number) == (2, size, 6)


def test_a_template_that_cannot_continue_says_so(renderer: Renderer) -> None:
    """It writes answers in capitals, so what follows one cannot be told; the first answer is not concerned."""
    loud = copy.deepcopy(renderer)
    template = loud._tokenizer.chat_template
    loud._tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role | upper }}: "
        "{% set text = message.content if message.content is string "
        "else message.content | map(attribute='text') | join %}"
        "{{ (text | upper | replace('\ue002', '')) if message.role == 'assistant' else text }}{% endfor %}"
    )
    assert loud._tokenizer.chat_template != template
    history = SessionHistory()
    said = message("assistant", "one")
    answer(history, history.next_prompt(chat(HI), loud), said, [5])
    with pytest.raises(InvalidRequestError, match="changes an assistant's text, so turns cannot be appended"):
        history.next_prompt(chat(HI, said, MORE), loud)


texts = st.sampled_from(["a", "b", "a b"])


@settings(max_examples=60)
@given(st.data())
def test_every_answer_stands_in_later_prompts_as_it_was_sampled(renderer: Renderer, data: st.DataObject) -> None:
    """Conversations that go on from any point of any earlier one: each prompt begins with all ids of that one."""
    history = SessionHistory()
    paths: list[tuple[tuple[Message, ...], list[int]]] = [((), [])]
    for turn in range(data.draw(st.integers(1, 6))):
        before, ids = data.draw(st.sampled_from(paths))
        asked = (*before, message("user", f"{turn} {data.draw(texts)}"))
        prompt = history.next_prompt(chat(*asked), renderer)
        assert prompt.input_ids[: len(ids)].tolist() == ids
        said = message("assistant", data.draw(texts))
        sampled = [*data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=3)), END_ID]
        answer(history, prompt, said, sampled)
        paths.append(((*asked, said), [*prompt.input_ids, *sampled]))


def test_digests_tell_conversations_apart() -> None:
    """By order, role, tools and what comes before."""
    start = digest_start((), {})
    found = {
        start,
        digest_start(TOOLS, {}),
        digest_start((), {"x": 1}),
        digest_next(start, HI),
        digest_next(start, message("system", "hi")),
        digest_next(digest_next(start, HI), MORE),
        digest_next(digest_next(start, MORE), HI),
        digest_next("", HI),
    }
    assert len(found) == 8
