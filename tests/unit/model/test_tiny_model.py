"""The tiny Qwen3-VL: its tokenizer and template, its fast pictures, and the checkpoint that ships."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from models.pretrain import MAX_NEW_TOKENS, BatchBuilder, answer_logprobs, format_answer, patchify
from models.tiny_qwen3_vl import MARKUP_TOKENS, SPECIAL_TOKENS, VOCAB_SIZE, build_processor, build_tokenizer
from services.trainer.data.geometry import GeometryDataset, GeometryProblem, draw_problem

CHECKPOINT = Path(__file__).resolve().parents[3] / "models" / "tiny-qwen3-vl"
TOKENIZER = build_tokenizer()
PROMPT_START = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"

ROTATE_TOOL = {"type": "function", "function": {"name": "rotate", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def processor() -> Any:
    """The processor that ships with the checkpoint."""
    return transformers.AutoProcessor.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def model() -> Any:
    """The checkpoint that ships, on one thread."""
    torch.set_num_threads(1)
    return transformers.Qwen3VLForConditionalGeneration.from_pretrained(CHECKPOINT)


def to_message(problem: GeometryProblem) -> dict[str, Any]:
    """A user's message as the rollout makes it: the picture, then the text."""
    text = problem.text.removeprefix("<image>")
    return {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}


@given(st.text())
def test_any_text_round_trips_up_to_nfc(text: str) -> None:
    """Decoding gives the text back in the normal form that Qwen2's tokenizer applies."""
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize(
    "text",
    [
        r"Find $\frac{\sqrt{2}}{2} \angle ABC$ , then answer in \boxed{ 1 . 5 }",
        "line\r\nnext \r\n\r\n\ttab   three spaces ",
        "中文字符,。日本語 한국어 עברית 😀🏽‍🔬",
        "\x00\x7f� control",
    ],
)
def test_hard_texts_round_trip(text: str) -> None:
    """LaTeX, line ends, spaces before punctuation, CJK and control characters come back unchanged."""
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@pytest.mark.parametrize("token", SPECIAL_TOKENS + MARKUP_TOKENS)
def test_added_tokens_are_single_ids(token: str) -> None:
    """Each of Qwen3-VL's tokens is one id, and only the special ones vanish from skipped decodes."""
    (token_id,) = TOKENIZER.encode(token)
    assert token_id < VOCAB_SIZE
    assert TOKENIZER.decode([token_id]) == token
    assert TOKENIZER.decode([token_id], skip_special_tokens=True) == ("" if token in SPECIAL_TOKENS else token)


def test_the_named_tokens_are_qwens() -> None:
    """Padding and end are as in the real model, and added ids follow the merges in the real order."""
    assert (TOKENIZER.pad_token, TOKENIZER.eos_token) == ("<|endoftext|>", "<|im_end|>")
    ids = TOKENIZER.convert_tokens_to_ids([*SPECIAL_TOKENS, *MARKUP_TOKENS])
    assert ids == list(range(ids[0], ids[0] + len(ids)))
    assert len(TOKENIZER) == ids[-1] + 1 <= VOCAB_SIZE


def test_the_shipped_tokenizer_is_the_built_one(processor: Any) -> None:
    """What the checkpoint carries is what the builder builds today."""
    assert processor.tokenizer.get_vocab() == TOKENIZER.get_vocab()
    assert processor.chat_template == build_processor(TOKENIZER).chat_template
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    assert tokenizer.chat_template == processor.chat_template


@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_the_template_places_one_pad_per_image(processor: Any, num_images: int) -> None:
    """Each picture becomes one placeholder between its marks, wherever it stands."""
    parts = [{"type": "image"}] * num_images + [{"type": "text", "text": "Why?"}]
    prompt = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    assert prompt.count("<|vision_start|><|image_pad|><|vision_end|>") == num_images
    assert prompt.count("<|image_pad|>") == num_images
    assert prompt.endswith("Why?<|im_end|>\n<|im_start|>assistant\n")


def test_the_template_renders_a_conversation_with_tools(processor: Any) -> None:
    """System, tools, calls and results take the form that Qwen3-VL was taught."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Turn it."}]},
        {
            "role": "assistant",
            "content": "Yes.",
            "tool_calls": [{"type": "function", "function": {"name": "rotate", "arguments": {"angle": 90}}}],
        },
        {"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": "done"}]},
        {"role": "tool", "content": "twice"},
        {"role": "assistant", "content": r"\boxed{1}"},
    ]
    prompt = processor.apply_chat_template(messages, tools=[ROTATE_TOOL])
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
    assert '<tools>\n{"type": "function", "function": {"name": "rotate"' in prompt
    assert prompt.endswith(
        f"{PROMPT_START}Turn it.<|im_end|>\n"
        '<|im_start|>assistant\nYes.\n<tool_call>\n{"name": "rotate", "arguments": {"angle": 90}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n<|vision_start|><|image_pad|><|vision_end|>done\n"
        "</tool_response>\n<tool_response>\ntwice\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n\\boxed{1}<|im_end|>\n"
    )


def test_a_turn_renders_the_same_alone_and_in_a_longer_conversation(processor: Any) -> None:
    """The prompt of turn one is a prefix of the prompt of turn two, so caches and token spans hold."""
    first = [to_message(GeometryDataset(1).problem(0))]
    second = [*first, {"role": "assistant", "content": r"\boxed{4}"}, {"role": "user", "content": "Try again."}]
    start = processor.apply_chat_template(first, add_generation_prompt=True)
    whole = processor.apply_chat_template(second, add_generation_prompt=True)
    assert whole.startswith(start + r"\boxed{4}<|im_end|>")


def test_fast_pictures_equal_the_processors(processor: Any) -> None:
    """The pixel values made in numpy are the processor's, bit for bit."""
    dataset = GeometryDataset(8, seed=5)
    pictures = [draw_problem(dataset.problem(index)) for index in range(len(dataset))]
    expected = processor.image_processor(images=pictures, return_tensors="pt")["pixel_values"]
    assert np.array_equal(np.concatenate([patchify(picture) for picture in pictures]), expected.numpy())


def test_a_large_picture_is_shrunk_to_what_the_model_affords(processor: Any) -> None:
    """A picture of a thousand pixels becomes at most 49 image tokens, a small one 9."""
    picture = draw_problem(GeometryDataset(1).problem(0))
    for size, most in ((picture.size, 9), ((1600, 900), 49), ((150, 700), 49)):
        grid = processor.image_processor(images=[picture.resize(size)], return_tensors="pt")["image_grid_thw"][0]
        assert 9 <= int(grid.prod()) // 4 <= most


def test_batched_logprobs_equal_the_plain_forward(model: Any, processor: Any) -> None:
    """Padding, shared positions and pictures made in numpy leave every answer's logprobs as they are."""
    dataset = GeometryDataset(6, seed=6)
    problems = [dataset.problem(index) for index in range(len(dataset))]
    with torch.no_grad():
        logprobs_BT, mask_BT = answer_logprobs(model, BatchBuilder(processor, model).build(problems))
        for index, problem in enumerate(problems):
            prompt = processor.apply_chat_template([to_message(problem)], add_generation_prompt=True)
            text = prompt + format_answer(problem.answer)
            inputs = processor(text=[text], images=[draw_problem(problem)], return_tensors="pt")
            plain_TV = model(**inputs).logits[0, :-1].log_softmax(-1)
            plain_T = plain_TV.gather(1, inputs["input_ids"][0, 1:, None])[:, 0]
            got_T = logprobs_BT[index][mask_BT[index]]
            torch.testing.assert_close(got_T, plain_T[-len(got_T) :], atol=1e-5, rtol=0)


def test_the_checkpoint_answers_in_a_box(model: Any, processor: Any) -> None:
    """Greedy answers to held-out rows are one box and an end token, nearly always."""
    dataset = GeometryDataset(16, seed=987_654)
    num_boxed = 0
    for index in range(len(dataset)):
        problem = dataset.problem(index)
        prompt = processor.apply_chat_template([to_message(problem)], add_generation_prompt=True)
        inputs = processor(text=[prompt], images=[draw_problem(problem)], return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        said = processor.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
        num_boxed += re.fullmatch(r"\\boxed\{\d+\}<\|im_end\|>", said) is not None
    assert num_boxed >= 14


def test_the_checkpoint_is_small_and_complete(model: Any) -> None:
    """About a million parameters in float32, tied embeddings, all files under 8 MB, and a README."""
    assert sum(path.stat().st_size for path in CHECKPOINT.rglob("*")) < 8_000_000
    assert (CHECKPOINT / "README.md").is_file()
    assert 800_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_500_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    assert model.generation_config.eos_token_id == TOKENIZER.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
