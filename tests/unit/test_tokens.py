"""Which ids may never be sampled, from the files of a model folder alone."""

import json
from pathlib import Path

from penstock.tokens import end_token_ids, forbidden_token_ids, image_token_id, vocab_size


def _model(folder: Path, *, pad: str, eos: list[int] | int, rows: int = 12) -> Path:
    folder.mkdir()
    vocab = {f"t{number}": number for number in range(5)}
    added = ["<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    (folder / "config.json").write_text(json.dumps({"image_token_id": 8, "text_config": {"vocab_size": rows}}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": pad}))
    tokenizer = {
        "model": {"vocab": vocab},
        "added_tokens": [{"id": number, "content": token} for number, token in enumerate(added, 5)],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_vision_tokens_padding_and_rows_without_a_token(tmp_path: Path) -> None:
    """5 is padding, 6 to 9 are vision tokens, 10 and 11 have no text; 4 ends generation."""
    folder = _model(tmp_path / "model", pad="<|endoftext|>", eos=4)
    assert forbidden_token_ids(folder) == (5, 6, 7, 8, 9, 10, 11)
    assert end_token_ids(folder) == (4,)
    assert (image_token_id(folder), vocab_size(folder)) == (8, 12)


def test_padding_that_ends_generation_may_be_sampled(tmp_path: Path) -> None:
    """Qwen pads with <|endoftext|>, which is one of its ends: without it the policy could not stop."""
    folder = _model(tmp_path / "model", pad="<|endoftext|>", eos=[4, 5])
    assert forbidden_token_ids(folder) == (6, 7, 8, 9, 10, 11)


def test_the_tiny_models_tokens(tiny_model_path: Path) -> None:
    """Agrees with what transformers says of the real files."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    names = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    ends = GenerationConfig.from_pretrained(tiny_model_path).eos_token_id
    expected = {*tokenizer.convert_tokens_to_ids(names), *range(len(tokenizer), vocab_size(tiny_model_path))}
    assert set(forbidden_token_ids(tiny_model_path)) == expected - set(ends)
    assert set(end_token_ids(tiny_model_path)) == set(ends)
