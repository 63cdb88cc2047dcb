"""Which ids may never be sampled, from the files of a model folder alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config import NetworkConfig
from penstock.errors import ConfigError
from penstock.model.tokens import end_token_ids, forbidden_token_ids, image_token_id, vocab_size
from services.rollout.engine.config import RolloutConfig
from services.rollout.engine.sglang.settings import context_length, server_args


def _server_args(folder: Path) -> dict[str, Any]:
    return server_args(RolloutConfig(), NetworkConfig(), folder, float32_head=False, bootstrap_port=0, cuda=True)


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


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"])
def test_a_file_that_is_no_json_is_named(tmp_path: Path, name: str) -> None:
    """One line for a person instead of a JSONDecodeError, in engine and trainer alike."""
    folder = _model(tmp_path / "model", pad="<|endoftext|>", eos=4)
    (folder / name).write_text('{"vocab')
    with pytest.raises(ConfigError, match=rf"model\.path: {folder / name} cannot be read as JSON"):
        forbidden_token_ids(folder)
    if name == "config.json":
        with pytest.raises(ConfigError, match="cannot be read as JSON"):
            _server_args(folder)


def test_what_the_engine_must_know_of_a_model(tmp_path: Path) -> None:
    """A context length that nobody gives, and a checkpoint that is cut short, are named with their file."""
    folder = _model(tmp_path / "model", pad="<|endoftext|>", eos=4)
    assert context_length(RolloutConfig(context_length=7), folder) == 7
    with pytest.raises(
        ConfigError, match=r"config\.json has no max_position_embeddings; give --rollout\.context_length"
    ):
        context_length(RolloutConfig(), folder)
    for content in (b"", b"\xff" * 8, b"\x10" + bytes(7) + b'{"a": '):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match=r"model\.safetensors is truncated or not a safetensors file"):
            _server_args(folder)


def test_the_tiny_models_tokens(tiny_model_path: Path) -> None:
    """Agrees with what transformers says of the real files."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    names = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
    ends = GenerationConfig.from_pretrained(tiny_model_path).eos_token_id
    expected = {*tokenizer.convert_tokens_to_ids(names), *range(len(tokenizer), vocab_size(tiny_model_path))}
    assert set(forbidden_token_ids(tiny_model_path)) == expected - set(ends)
    assert set(end_token_ids(tiny_model_path)) == set(ends)
