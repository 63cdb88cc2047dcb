"""Published chat templates, by the structures in tests/data/chat_templates: what each shows, continues and refuses."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from models.tiny_qwen3_vl import MARKUP_TOKENS, QWEN_PRETOKENIZE_REGEX, SPECIAL_TOKENS, build_tokenizer
from penstock.errors import InvalidRequestError
from penstock.model.chat.chat_template import Renderer
from penstock.records import ImagePart, Message, TextPart, ToolCall

Role = Literal["system", "user", "assistant", "tool"]

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
QWEN = Path(__file__).parents[4] / "shared" / "qwen" / "qwen.tiktoken"
QWEN2 = ["qwen2_5_vl"]
QWEN3 = ["qwen3_vl_instruct", "qwen3_vl_thinking"]
LATER = ["qwen3_5", "qwen3_5_small", "qwen3_6", "qwen3_8"]
WITH_TOOLS = [*QWEN3, *LATER]
ALL = [*QWEN2, *WITH_TOOLS]

ZOOM: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "zoom",
        "description": "Look closer.",
        "parameters": {"type": "object", "properties": {"factor": {"type": "integer"}}},
    },
}


@pytest.fixture(scope="module", params=["qwen", "tiny"])
def vocabulary(request: pytest.FixtureRequest) -> Any:
    """A tokenizer with the real vocabulary, or one of a few hundred tokens with the same special ones."""
    if request.param == "tiny":
        return build_tokenizer()
    if not QWEN.is_file():
        pytest.skip("needs the merge ranks in ../shared/qwen/qwen.tiktoken")
    converter = TikTokenConverter(vocab_file=str(QWEN), pattern=QWEN_PRETOKENIZE_REGEX)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=converter.converted())
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    tokenizer.add_tokens(list(MARKUP_TOKENS))
    assert tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|image_pad|>", "</think>"]) == [151645, 151655, 151668]
    return tokenizer


class Model:
    """A template with a tokenizer."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
        self.tokenizer = tokenizer
        self.end_id, self.image_id = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|image_pad|>"])
        self.renderer = Renderer(tokenizer, image_token_id=self.image_id, end_ids=[self.end_id])

    def prompt(self, *messages: Message, tools: Sequence[Any] = (), **kwargs: Any) -> str:
        """The text of a prompt's ids."""
        ids = self.renderer.render_prompt(
            messages, num_images=num_images(messages), tools=tools, template_kwargs=kwargs
        )
        return str(self.tokenizer.decode(ids))

    def follow(self, *messages: Message, num_earlier_images: int = 0, **kwargs: Any) -> str:
        """The text of the ids that follow a turn which ended itself."""
        ids = self.renderer.render_continuation(
            self.end_id,
            messages,
            num_images=num_images(messages),
            num_earlier_images=num_earlier_images,
            template_kwargs=kwargs,
        )
        return str(self.tokenizer.decode(ids))


@pytest.fixture
def model(vocabulary: Any, template: str) -> Model:
    """The template named by the test."""
    return Model(vocabulary, template)


def num_images(messages: Sequence[Message]) -> int:
    """Images that the messages show."""
    return sum(isinstance(part, ImagePart) for message in messages for part in message.parts)


def say(role: Role, *parts: str | ImagePart, calls: Sequence[ToolCall] = ()) -> Message:
    """A message."""
    shown = tuple(TextPart(text=part) if isinstance(part, str) else part for part in parts)
    return Message(role=role, parts=shown, tool_calls=tuple(calls))


IMAGE = ImagePart(index=0)
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
SYSTEM, QUESTION = say("system", " Be brief. "), say("user", IMAGE, "Find x.\n")
LOOK = ToolCall(name="zoom", arguments={"factor": 2})
HERMES_LOOK = '<tool_call>\n{"name": "zoom", "arguments": {"factor": 2}}\n</tool_call>'
XML_LOOK = "<tool_call>\n<function=zoom>\n<parameter=factor>\n2\n</parameter>\n</function>\n</tool_call>"
REPLIES = [say("tool", "closer: ", IMAGE), say("tool", " nothing \n")]

PROMPT_ENDS = {
    "qwen2_5_vl": "",
    "qwen3_vl_instruct": "",
    "qwen3_vl_thinking": "<think>\n",
    "qwen3_5": "<think>\n",
    "qwen3_5_small": "<think>\n\n</think>\n\n",
    "qwen3_6": "<think>\n",
    "qwen3_8": "<think>\n",
}


def trimmed(template: str, text: str) -> str:
    """What the template makes of a message's text."""
    return text.strip() if template in LATER else text


@pytest.mark.parametrize("template", ALL)
def test_a_first_prompt_shows_system_text_question_and_image(model: Model, template: str) -> None:
    """Then the generation prompt, which opens `<think>`, closes it at once, or leaves it to the policy."""
    system = trimmed(template, " Be brief. ")
    if template == "qwen3_8":
        system = f"Effort xhigh: think with care.\n\n{system}"
    question = trimmed(template, "Find x.\n")
    assert model.prompt(SYSTEM, QUESTION) == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{VISION}{question}<|im_end|>\n"
        f"<|im_start|>assistant\n{PROMPT_ENDS[template]}"
    )
    assert model.renderer.opens_thinking() == (PROMPT_ENDS[template] == "<think>\n")


@pytest.mark.parametrize("template", WITH_TOOLS)
def test_tools_stand_in_the_system_message(model: Model, template: str) -> None:
    """Behind its text, or before it from Qwen3.5 on."""
    prompt = model.prompt(SYSTEM, QUESTION, tools=[ZOOM])
    assert prompt.count("<|im_start|>system\n") == 1
    assert f"<tools>\n{json.dumps(ZOOM)}\n</tools>" in prompt
    assert (prompt.index("Be brief.") > prompt.index("</tools>")) == (template in LATER)


@pytest.mark.parametrize("template", LATER)
def test_thinking_is_a_variable_of_the_template(model: Model, template: str) -> None:
    """`enable_thinking` decides which of the two ends the prompt has, and how its answer is read."""
    for is_on, end in ((True, "<think>\n"), (False, "<think>\n\n</think>\n\n")):
        kwargs = {"enable_thinking": is_on}
        assert model.prompt(QUESTION, **kwargs).endswith(f"<|im_start|>assistant\n{end}")
        assert model.follow(say("user", "?"), **kwargs).endswith(f"<|im_start|>assistant\n{end}")
        turn = model.renderer.parse_turn(f"so {XML_LOOK}", tools=[ZOOM], template_kwargs=kwargs)
        assert (turn.calls, bool(turn.reasoning)) == (((), True) if is_on else ((LOOK,), False))


@pytest.mark.parametrize("template", ["qwen3_8"])
def test_effort_is_a_variable_of_the_template(model: Model) -> None:
    """A level that it does not know is refused in its words."""
    assert "Effort low" in model.prompt(QUESTION, reasoning_effort="low")
    assert "Effort" not in model.prompt(QUESTION, reasoning_effort="medium")
    with pytest.raises(InvalidRequestError, match="reasoning_effort huge is none of xhigh, medium and low"):
        model.prompt(QUESTION, reasoning_effort="huge")


@pytest.mark.parametrize(
    ("template", "written"), [*((each, HERMES_LOOK) for each in QWEN3), *((each, XML_LOOK) for each in LATER)]
)
def test_a_call_is_read_in_the_form_in_which_the_template_writes_it(model: Model, template: str, written: str) -> None:
    """The renderer finds the form by itself, and gives values of the xml form their types."""
    assert model.renderer.call_format == ("hermes" if template in QWEN3 else "xml")
    assert written in model.prompt(QUESTION, say("assistant", "I look.", calls=[LOOK]), *REPLIES, tools=[ZOOM])
    thought = "</think>\n\n" if model.renderer.opens_thinking() else ""
    turn = model.renderer.parse_turn(f"{thought}I look.\n{written}", tools=[ZOOM])
    assert (turn.content, turn.calls) == ("I look.", (LOOK,))


@pytest.mark.parametrize("template", WITH_TOOLS)
def test_consecutive_replies_of_tools_share_one_turn_with_their_images(model: Model, template: str) -> None:
    """In a first prompt and in a continuation alike."""
    nothing = trimmed(template, " nothing \n")
    replies = (
        f"<|im_start|>user\n<tool_response>\ncloser: {VISION}\n</tool_response>"
        f"\n<tool_response>\n{nothing}\n</tool_response><|im_end|>\n"
    )
    tail = f"{replies}<|im_start|>assistant\n{PROMPT_ENDS[template]}"
    assert model.follow(*REPLIES) == f"\n{tail}"
    assert model.prompt(QUESTION, say("assistant", "I look.", calls=[LOOK]), *REPLIES, tools=[ZOOM]).endswith(tail)


TURNS = {
    "tools": [[say("tool", "closer: ", IMAGE)], [say("tool", "1"), say("tool", " 2")], [say("tool", "last", IMAGE)]],
    "users": [[say("user", "Look here: ", IMAGE)], [say("user", " again "), say("user", "and again")]],
    "mixed": [[say("tool", "1"), say("user", "go on")], [say("tool", "2"), say("user", IMAGE)]],
}
STABLE = {
    ("qwen2_5_vl", "users"),
    *((template, kind) for template in ("qwen3_vl_instruct",) for kind in TURNS),
    *((template, "tools") for template in ("qwen3_vl_thinking", *LATER)),
    *((template, kind) for template in ("qwen3_6", "qwen3_8") for kind in TURNS),
}
"""Where the rendering of a whole conversation begins with what the policy was shown and said. Elsewhere a user's query
makes the template drop earlier thoughts."""


@pytest.mark.parametrize("kind", TURNS)
@pytest.mark.parametrize("template", ALL)
def test_each_turn_begins_with_all_ids_of_the_turns_before(model: Model, template: str, kind: str) -> None:
    """They are those of the template itself where it only ever appends, and it appends wherever thoughts do not go."""
    if template == "qwen2_5_vl" and kind != "users":
        pytest.skip("the template knows no tools")
    is_thinking = model.renderer.opens_thinking()
    kwargs = {"preserve_thinking": True} if template in ("qwen3_6", "qwen3_8") else {}
    messages = [SYSTEM, QUESTION]
    tools = [] if template == "qwen2_5_vl" else [ZOOM]
    ids = model.renderer.render_prompt(messages, num_images=1, tools=tools, template_kwargs=kwargs)
    for number, observation in enumerate(TURNS[kind]):
        answer = f"turn {number}"
        said = f"hm\n</think>\n\n{answer}" if is_thinking else answer
        ids += model.tokenizer(f"{said}<|im_end|>", add_special_tokens=False).input_ids
        shown = num_images(messages)
        ids += model.renderer.render_continuation(
            ids[-1],
            observation,
            num_images=num_images(observation),
            num_earlier_images=shown,
            template_kwargs=kwargs,
        )
        messages += [say("assistant", f"<think>\n{said}" if is_thinking else said), *observation]
    whole = whole_rendering(model, messages, tools, kwargs)
    is_stable = model.tokenizer.decode(ids) == whole
    assert is_stable == ((template, kind) in STABLE)
    if is_stable:
        assert ids == model.tokenizer(whole, add_special_tokens=False).input_ids


def whole_rendering(model: Model, messages: Sequence[Message], tools: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """What the template makes of the conversation, thoughts given apart as its clients give them."""
    chat: list[dict[str, Any]] = []
    for message in messages:
        content = [
            {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
            for part in message.parts
        ]
        text = content[0].get("text", "")
        if message.role == "assistant" and "</think>" in text:
            thought, text = text.split("</think>")
            chat.append(
                {
                    "role": "assistant",
                    "reasoning_content": thought.removeprefix("<think>").strip(),
                    "content": text.strip(),
                }
            )
        else:
            chat.append({"role": message.role, "content": content})
    return str(
        model.tokenizer.apply_chat_template(
            chat, tools=list(tools) or None, tokenize=False, add_generation_prompt=True, **kwargs
        )
    )


@pytest.mark.parametrize("template", ALL)
def test_what_stands_before_a_turn_does_not_change_what_follows_it(model: Model, template: str) -> None:
    """Tools, system text and the thoughts before: so a continuation needs none of them."""
    observation = say("user", "go on")
    for tools, first in (([], []), ([], [SYSTEM]), ([ZOOM], [SYSTEM])):
        if tools and template == "qwen2_5_vl":
            continue
        chat = [*first, QUESTION, say("assistant", "I am sure."), observation]
        _, _, tail = model.prompt(*chat, tools=tools).partition("I am sure.<|im_end|>")
        assert tail == model.follow(observation)


@pytest.mark.parametrize("template", ALL)
def test_pictures_are_numbered_on(model: Model, template: str) -> None:
    """With `add_vision_id` a template counts them from the beginning of the conversation."""
    observation = say("user", "and ", IMAGE)
    whole = model.prompt(QUESTION, say("assistant", "I am sure."), observation, add_vision_id=True)
    _, _, tail = whole.partition("I am sure.<|im_end|>")
    assert f"Picture 2: {VISION}" in tail
    assert model.follow(observation, num_earlier_images=1, add_vision_id=True) == tail


MULTI = [QUESTION, say("assistant", "I am sure.")]


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        *(
            (
                each,
                [SYSTEM, QUESTION, say("assistant", "3"), SYSTEM, say("user", "?")],
                "message 3, .*system.* its text; ",
            )
            for each in ["qwen3_vl_instruct"]
        ),
        *((each, [SYSTEM, SYSTEM, QUESTION], "refuses messages of roles system, system, user: ") for each in LATER),
        (
            "qwen3_vl_instruct",
            [say("system", "See ", IMAGE), QUESTION],
            "message 0, .*system.* its images; show them in",
        ),
        (
            "qwen3_vl_instruct",
            [QUESTION, say("assistant", "I drew ", IMAGE)],
            "message 1, .*assistant.* its images; show",
        ),
        *((each, [say("system", "See ", IMAGE), QUESTION], "A system message holds images") for each in LATER),
        *((each, [SYSTEM], "No message is a query of the user") for each in LATER),
        *(
            (each, [say("user", "<tool_response>\n7\n</tool_response>")], "No message is a query of the user")
            for each in LATER
        ),
        ("qwen2_5_vl", [*MULTI, say("tool", "7")], "message 2 has the role tool, .* give it the role user"),
        (
            "qwen2_5_vl",
            [QUESTION, say("assistant", "", calls=[LOOK]), say("user", "7")],
            "message 1, .*assistant.* its tool_calls; write them as text",
        ),
    ],
)
def test_what_a_template_refuses_or_drops_is_told_with_its_message(
    model: Model, messages: list[Message], reason: str
) -> None:
    """Nothing that a task shows is missing from its prompt without a word."""
    with pytest.raises(InvalidRequestError, match=reason):
        model.prompt(*messages)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        *((each, [SYSTEM, SYSTEM, QUESTION]) for each in ("qwen2_5_vl", "qwen3_vl_thinking")),
        *((each, [say("system", "See ", IMAGE), QUESTION]) for each in ("qwen2_5_vl", "qwen3_vl_thinking")),
        *((each, [SYSTEM]) for each in ("qwen2_5_vl", "qwen3_vl_instruct", "qwen3_vl_thinking")),
        *((each, [say("system", " \n"), say("user", " "), say("user", "x", " ", "y")]) for each in ALL),
        *((each, [QUESTION, say("assistant", "<think>\nhm\n</think>\n\n3"), say("user", "?")]) for each in ALL),
    ],
)
def test_what_a_template_shows_is_not_refused(model: Model, messages: list[Message]) -> None:
    """A blank text is no loss, and neither are earlier thoughts, which their templates leave out on purpose."""
    assert model.prompt(*messages)


@pytest.mark.parametrize("template", QWEN2)
def test_a_task_with_tools_needs_a_template_that_shows_them(model: Model) -> None:
    """The policy could not know what it may call."""
    assert not model.renderer.takes_tools
    with pytest.raises(InvalidRequestError, match=r"does not show tools.*describe them in the system message"):
        model.prompt(QUESTION, tools=[ZOOM])


@pytest.mark.parametrize(
    ("template", "message", "reason"),
    [
        ("qwen3_vl_instruct", say("system", "hurry"), "message 0, of role system: .* its text; put it into"),
        *((each, say("system", "hurry"), "A system message can only be the first") for each in LATER),
        ("qwen2_5_vl", say("tool", "7"), "message 0 has the role tool"),
    ],
)
def test_an_observation_that_a_template_drops_is_refused_too(model: Model, message: Message, reason: str) -> None:
    """Messages count from the observation's first."""
    with pytest.raises(InvalidRequestError, match=reason):
        model.follow(message)


@pytest.mark.parametrize("template", ["qwen3_vl_instruct"])
def test_a_shape_is_tried_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand rows of one form cost a thousand renderings and one."""
    filled: list[Any] = []
    fill = model.tokenizer.apply_chat_template
    monkeypatch.setattr(
        model.tokenizer, "apply_chat_template", lambda chat, **rest: (filled.append(chat), fill(chat, **rest))[1]
    )
    for number in range(1000):
        model.prompt(SYSTEM, say("user", IMAGE, f"{number}"))
    assert len(filled) == 1001


@pytest.mark.parametrize("template", ["qwen3_vl_instruct"])
def test_a_dropped_text_is_noticed_though_another_message_says_it(model: Model) -> None:
    """What counts is the part, not the words."""
    with pytest.raises(InvalidRequestError, match="message 1, of role system"):
        model.prompt(SYSTEM, say("system", "user"), say("user", "user"))
