"""Build a Qwen3-VL of about a million parameters, with its tokenizer, processor and chat template.

Everything has the structure of the real model: DeepStack, interleaved M-RoPE, tied embeddings, Qwen's
byte-level BPE and special tokens, the shape of the chat template. What is written loads through the Auto
classes of transformers and in SGLang, offline.

    python -m models.tiny_qwen3_vl --out /tmp/tiny-random --seed 0
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from services.trainer.data.geometry import KINDS, GeometryDataset

if TYPE_CHECKING:
    from transformers import (
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        TokenizersBackend,
    )

log = structlog.get_logger()

SPECIAL_TOKENS: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Tokens Qwen marks special: a decoder that skips special tokens drops them. In the real order."""

MARKUP_TOKENS: Final = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Single tokens that are not special: they survive a decoder that skips special tokens."""

VOCAB_SIZE: Final = 384
"""Rows of the embedding: 256 bytes, the learned merges and the added tokens, a multiple of 64."""

QWEN_PRETOKENIZE_REGEX: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2 cuts text before the merges: a digit is always a token of its own."""

PATCH_SIZE: Final = 16
TEMPORAL_PATCH_SIZE: Final = 2
MERGE_SIZE: Final = 2
MIN_PIXELS: Final = 96 * 96
MAX_PIXELS: Final = 224 * 224
PIXEL_MEAN: Final = 0.5
PIXEL_STD: Final = 0.5
MAX_POSITIONS: Final = 4096

EMBEDDING_STD: Final = 0.05
WEIGHT_GAIN: Final = 0.7
"""Linear weights start at this over the root of their fan-in. The usual 0.02 is too quiet at this width: the
model then stays at chance for thousands of steps, where this leaves it after some 250."""
POSITION_STD: Final = 0.5
"""Vision positions must be as loud as the patches, or the model cannot tell where a point lies."""

CHAT_TEMPLATE: Final = r"""
{%- macro render(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if 'image' in part or 'image_url' in part or part.type == 'image' %}
                {%- set counter.images = counter.images + 1 %}
                {%- if add_vision_id %}Picture {{ counter.images }}: {% endif -%}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- elif 'video' in part or part.type == 'video' %}
                {%- set counter.videos = counter.videos + 1 %}
                {%- if add_vision_id %}Video {{ counter.videos }}: {% endif -%}
                <|vision_start|><|video_pad|><|vision_end|>
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- set counter = namespace(images=0, videos=0) %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- render(messages[0].content) + '\n\n' }}
    {%- endif %}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + render(messages[0].content) + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + render(message.content) + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + render(message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}{{ '\n' }}{% endif %}
            {%- set function = call.function or call %}
            {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + render(message.content) + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
""".lstrip()  # noqa: E501  # the tool preamble is one line in Qwen's own protocol
"""The structure of Qwen3-VL-Instruct's template: images become one placeholder each, tools become XML."""


def build_tokenizer() -> TokenizersBackend:
    """Learn a byte-level BPE from the geometry texts and give it Qwen3-VL's added tokens.

    Any text round-trips up to Unicode NFC, which Qwen2's tokenizer applies too.
    """
    from transformers import Qwen2Tokenizer

    learner = Tokenizer(BPE())
    learner.normalizer = normalizers.NFC()
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PRETOKENIZE_REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    learner.decoder = decoders.ByteLevel()
    added = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    added += [AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS]
    learner.train_from_iterator(
        _vocabulary_texts(),
        trainers.BpeTrainer(  # type: ignore[no-untyped-call]  # the wheel has no stub for it
            vocab_size=VOCAB_SIZE - len(added),
            min_frequency=1,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    model = json.loads(learner.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        errors="replace",
    )
    tokenizer.add_tokens(added)  # in order: their ids follow the merges, as in the real vocabulary
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS[1:])})
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def build_processor(tokenizer: TokenizersBackend) -> Qwen3VLProcessor:
    """Join the tokenizer with Qwen2-VL's image processor and Qwen3-VL's video processor."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    shared: dict[str, Any] = {
        "patch_size": PATCH_SIZE,
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
        "merge_size": MERGE_SIZE,
        "image_mean": [PIXEL_MEAN] * 3,
        "image_std": [PIXEL_STD] * 3,
        "size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS},
    }
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**shared),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**shared),
        chat_template=CHAT_TEMPLATE,
    )


def build_config(tokenizer: TokenizersBackend) -> Qwen3VLConfig:
    """Return the architecture: 1.1 million parameters, laid out like Qwen3-VL-2B."""
    from transformers import Qwen3VLConfig

    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    return Qwen3VLConfig(
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        dtype="float32",
        text_config={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 128,
            "intermediate_size": 320,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "dtype": "float32",
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": PATCH_SIZE,
            "temporal_patch_size": TEMPORAL_PATCH_SIZE,
            "spatial_merge_size": MERGE_SIZE,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0],
            "dtype": "float32",
        },
    )


def build_model(config: Qwen3VLConfig, *, seed: int) -> Qwen3VLForConditionalGeneration:
    """Initialise a float32 model, in a way from which it learns to see."""
    import torch
    from transformers import GenerationConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config).float()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=WEIGHT_GAIN * module.in_features**-0.5)
    torch.nn.init.normal_(model.model.language_model.embed_tokens.weight, std=EMBEDDING_STD)
    torch.nn.init.normal_(model.model.visual.pos_embed.weight, std=POSITION_STD)
    model.tie_weights()
    text = config.text_config
    model.generation_config = GenerationConfig(
        bos_token_id=text.bos_token_id,
        eos_token_id=[text.eos_token_id, text.pad_token_id],
        pad_token_id=text.pad_token_id,
        do_sample=True,
        temperature=1.0,
    )
    return model


def save_model(model: Qwen3VLForConditionalGeneration, processor: Qwen3VLProcessor, out: Path) -> None:
    """Write model, processor, tokenizer and template to ``out``, which appears complete or not at all.

    An ``out`` that exists already is replaced.
    """
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    processor.save_pretrained(partial)
    # Engines and older transformers read the two files that the real checkpoint has beside the joint one.
    processor.image_processor.save_pretrained(partial)
    (partial / "video_preprocessor_config.json").write_text(processor.video_processor.to_json_string())
    model.save_pretrained(partial)
    for path in partial.iterdir():
        path.chmod(0o644)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def count_parameters(model: Qwen3VLForConditionalGeneration) -> int:
    """Count the parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _vocabulary_texts() -> Iterable[str]:
    """Yield the texts whose words become single tokens: the questions, the template, plain feedback."""
    dataset = GeometryDataset(400, kinds=KINDS)
    for index in range(len(dataset)):
        problem = dataset.problem(index)
        yield f"user\n{problem.text.removeprefix('<image>')}\nassistant\n\\boxed{{{problem.answer}}}"
    yield from ["system\nYou are a helpful assistant.\n", "tool\n", "Your answer is wrong. Try again.\n"] * 20


def main() -> None:
    """Write a randomly initialised model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write, replaced if it exists")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = build_tokenizer()
    processor = build_processor(tokenizer)
    model = build_model(build_config(tokenizer), seed=args.seed)
    save_model(model, processor, args.out)
    log.info("model.written", path=str(args.out), num_parameters=count_parameters(model), seed=args.seed)


if __name__ == "__main__":
    main()
