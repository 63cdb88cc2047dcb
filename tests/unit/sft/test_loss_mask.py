"""Which tokens of a conversation are learned: token by token, with and without marks in the template."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

from models.tiny_qwen3_vl import CHAT_TEMPLATE, MARKUP_TOKENS, QWEN_PRETOKENIZE_REGEX, SPECIAL_TOKENS
from penstock.errors import InvalidRequestError
from penstock.model.chat.chat_template import Renderer
from penstock.records import ImagePart, Message, TextPart, ToolCall
from services.trainer.data.rows.messages import Role

QWEN = Path(__file__).parents[4] / "shared" / "qwen" / "qwen.tiktoken"
IM_END, IMAGE_PAD = 151645, 151655
MARKED = CHAT_TEMPLATE.replace(
    "{{- '<|im_start|>assistant\\n' + render(message.content or '') }}",
    "{{- '<|im_start|>assistant\\n' }}{%- generation %}{{- render(message.content or '') }}",
).replace(
    "        {{- '<|im_end|>\\n' }}\n    {%- elif message.role == 'tool' %}",
    "        {{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}\n    {%- elif message.role == 'tool' %}",
)
"""The template of the tiny model, which says itself what the assistant says."""
FORGETFUL = CHAT_TEMPLATE.replace(
    "{{- '<|im_start|>assistant\\n' + render(message.content or '') }}",
    "{{- '<|im_start|>assistant\\n' + (render(message.content) if loop.last else 'forgotten') }}",
)
"""Shows what an assistant says in the last message only, as templates of thinking models do with thoughts."""


def say(role: Role, *parts: str | ImagePart) -> Message:
    """A message."""
    return Message(role=role, parts=tuple(TextPart(text=part) if isinstance(part, str) else part for part in parts))


QUESTION, ANSWER = say("user", ImagePart(index=0), "Find x."), say("assistant", "It is \\boxed{3}.")
TURNS = [say("system", "Be brief."), QUESTION, ANSWER, say("tool", "wrong"), say("assistant", "\\boxed{4}")]


@pytest.fixture(scope="module")
def qwen() -> Any:
    """A tokenizer with the vocabulary of Qwen3-VL."""
    if not QWEN.is_file():
        pytest.skip("needs the merge ranks in ../shared/qwen/qwen.tiktoken")
    converter = TikTokenConverter(vocab_file=str(QWEN), pattern=QWEN_PRETOKENIZE_REGEX)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=converter.converted(), chat_template=CHAT_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    tokenizer.add_tokens(list(MARKUP_TOKENS))
    assert tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|image_pad|>"]) == [IM_END, IMAGE_PAD]
    return tokenizer


@pytest.fixture
def tiny(tiny_model_path: Path) -> Any:
    """The tiny model's tokenizer."""
    return AutoTokenizer.from_pretrained(str(tiny_model_path))


def learned(tokenizer: Any, messages: Sequence[Message], *, num_images: int = 1) -> list[tuple[str, bool]]:
    """Each token's text, and whether it is learned; the ids are those of the template itself."""
    image_id, end_id = tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|im_end|>"])
    renderer = Renderer(tokenizer, image_token_id=image_id, end_ids=[end_id])
    ids, is_learned = renderer.render_conversation(messages, num_images=num_images)
    chat = [
        {
            "role": message.role,
            "content": [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
                for part in message.parts
            ],
        }
        for message in messages
    ]
    assert ids == tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)
    return list(zip(tokenizer.convert_ids_to_tokens(ids), is_learned, strict=True))


def test_on_the_vocabulary_of_qwen_the_answer_and_its_end_are_learned(qwen: Any) -> None:
    """And nothing else: not the question, its image, the start of the turn, or the newline behind it."""
    found = learned(qwen, [QUESTION, ANSWER])
    others = ["<|im_start|>", "user", "Ċ", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "Find", "Ġx", "."]
    others += ["<|im_end|>", "Ċ", "<|im_start|>", "assistant", "Ċ"]
    answer = ["It", "Ġis", "Ġ\\", "boxed", "{", "3", "}.", "<|im_end|>"]
    assert found == [*((token, False) for token in others), *((token, True) for token in answer), ("Ċ", False)]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED], ids=["no marks", "marks"])
def test_variables_reach_the_template(tiny: Any, template: str) -> None:
    """The same answer is learned behind another prompt; a template cannot be one of them."""
    tiny.chat_template = template
    image_id, end_id = tiny.convert_tokens_to_ids(["<|image_pad|>", "<|im_end|>"])
    renderer = Renderer(tiny, image_token_id=image_id, end_ids=[end_id])
    plain, told = (
        renderer.render_conversation([QUESTION, ANSWER], num_images=1, template_kwargs=variables)
        for variables in ({}, {"add_vision_id": True})
    )
    texts = [
        tiny.decode([token for token, is_learned in zip(ids, learned, strict=True) if is_learned])
        for ids, learned in (plain, told)
    ]
    assert texts[0] == texts[1] == "It is \\boxed{3}.<|im_end|>"
    assert len(told[0]) == len(plain[0]) + len(renderer.render_text("Picture 1: "))
    with pytest.raises(InvalidRequestError, match="sets \\['chat_template'\\], which are reserved"):
        renderer.render_conversation([QUESTION, ANSWER], num_images=1, template_kwargs={"chat_template": "x"})


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED], ids=["no marks", "marks"])
def test_every_assistants_turn_is_learned_and_nothing_between(tiny: Any, template: str) -> None:
    """System, user and tool are read only; each turn is learned with its end."""
    tiny.chat_template = template
    found = learned(tiny, TURNS)
    runs: list[list[str]] = []
    for place, (token, is_learned) in enumerate(found):
        if is_learned and not found[place - 1][1]:
            runs.append([])
        if is_learned:
            runs[-1].append(token)
    texts = [tiny.convert_tokens_to_string(run) for run in runs]
    assert texts == ["It is \\boxed{3}.<|im_end|>", "\\boxed{4}<|im_end|>"]


def test_tool_calls_are_learned_as_the_template_writes_them(tiny: Any) -> None:
    """With the turn that holds them; a template that drops them is refused."""
    end_id = tiny.convert_tokens_to_ids("<|im_end|>")
    renderer = Renderer(tiny, image_token_id=None, end_ids=[end_id])
    call = Message(role="assistant", parts=(), tool_calls=(ToolCall(name="zoom", arguments={"factor": 2}),))
    ids, is_learned = renderer.render_conversation([say("user", "x"), call], num_images=0)
    own = tiny.decode([token for token, is_own in zip(ids, is_learned, strict=True) if is_own])
    assert own == '<tool_call>\n{"name": "zoom", "arguments": {"factor": 2}}\n</tool_call><|im_end|>'
    tiny.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(InvalidRequestError, match=r"the model's chat template drops its tool_calls"):
        Renderer(tiny, image_token_id=None, end_ids=[end_id]).render_conversation(
            [say("user", "x"), call], num_images=0
        )


def test_marks_of_a_template_give_the_mask_of_transformers(qwen: Any) -> None:
    """Token by token as `apply_chat_template` has it."""
    chat = [
        {"role": "user", "content": "How many?\n\n"},
        {"role": "assistant", "content": "Three  apples, 3.14159\n"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Four – ünïcode 漢字"},
    ]
    qwen.chat_template = MARKED
    renderer = Renderer(qwen, image_token_id=None, end_ids=[IM_END])
    messages = [Message(role=m["role"], parts=(TextPart(text=m["content"]),)) for m in chat]  # type: ignore[arg-type]
    ids, is_learned = renderer.render_conversation(messages, num_images=0)
    want = qwen.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert (ids, list(map(int, is_learned))) == (want["input_ids"], want["assistant_masks"])
    qwen.chat_template = CHAT_TEMPLATE
    assert renderer.render_conversation(messages, num_images=0) == (ids, is_learned)


def test_what_is_learned_follows_the_very_prompt_that_engines_get(tiny: Any) -> None:
    """Also where one tokenisation of the whole text would join the end of the prompt with the answer."""
    end_id = tiny.convert_tokens_to_ids("<|im_end|>")
    renderer = Renderer(tiny, image_token_id=None, end_ids=[end_id])
    question, answer = say("user", "Find x."), say("assistant", "\n\n5")
    ids, is_learned = renderer.render_conversation([question, answer], num_images=0)
    prompt = renderer.render_prompt([question], num_images=0)
    assert ids[: len(prompt)] == prompt
    assert ids[len(prompt) : is_learned.index(True) + sum(is_learned)] == [*renderer.render_text("\n\n5"), end_id]


def test_an_answer_that_spells_special_tokens_is_learned_as_text(tiny: Any) -> None:
    """It ends where the template ends it, not where its text says."""
    image_id, end_id = tiny.convert_tokens_to_ids(["<|image_pad|>", "<|im_end|>"])
    renderer = Renderer(tiny, image_token_id=image_id, end_ids=[end_id])
    ids, is_learned = renderer.render_conversation(
        [say("user", "x"), say("assistant", "<|im_end|> and <|image_pad|> 5")], num_images=0
    )
    own = [token for token, is_own in zip(ids, is_learned, strict=True) if is_own]
    assert own == [*renderer.render_text("<|im_end|> and <|image_pad|> 5"), end_id]
    assert image_id not in ids


def test_a_template_that_changes_earlier_turns_is_refused_for_them_only(tiny: Any) -> None:
    """Without marks nobody can say what an earlier turn should be; the last one is what it is."""
    tiny.chat_template = FORGETFUL
    assert [token for token, is_learned in learned(tiny, [QUESTION, ANSWER]) if is_learned][-1] == "<|im_end|>"
    image_id, end_id = tiny.convert_tokens_to_ids(["<|image_pad|>", "<|im_end|>"])
    renderer = Renderer(tiny, image_token_id=image_id, end_ids=[end_id])
    with pytest.raises(InvalidRequestError, match=r"message 2, the assistant's, differently .*\{% generation %\}"):
        renderer.render_conversation(TURNS, num_images=1)


def test_a_template_whose_prompt_does_not_begin_the_turn_is_refused(tiny: Any) -> None:
    """One whose generation prompt opens a thought that the answer does not hold, for example."""
    tiny.chat_template = CHAT_TEMPLATE + "{%- if add_generation_prompt %}<think>{% endif %}"
    renderer = Renderer(tiny, image_token_id=None, end_ids=[tiny.convert_tokens_to_ids("<|im_end|>")])
    with pytest.raises(InvalidRequestError, match="does not begin message 1, the assistant's, with its generation"):
        renderer.render_conversation([say("user", "x"), say("assistant", "5")], num_images=0)


def test_a_turn_that_ends_with_no_end_token_is_refused(tiny: Any) -> None:
    """A model that learned it would never stop."""
    renderer = Renderer(tiny, image_token_id=None, end_ids=[tiny.convert_tokens_to_ids("<|endoftext|>")])
    with pytest.raises(InvalidRequestError, match=r"would never learn to stop; correct eos_token_id"):
        renderer.render_conversation([say("user", "x"), say("assistant", "5")], num_images=0)


def test_images_and_placeholders_differ_in_number(tiny: Any) -> None:
    """As in prompts: no image is left out in silence."""
    image_id, end_id = tiny.convert_tokens_to_ids(["<|image_pad|>", "<|im_end|>"])
    renderer = Renderer(tiny, image_token_id=image_id, end_ids=[end_id])
    with pytest.raises(InvalidRequestError, match=r"1 image placeholders .* for 2 images"):
        renderer.render_conversation([QUESTION, ANSWER], num_images=2)
