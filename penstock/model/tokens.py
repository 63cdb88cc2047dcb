"""Lists the token ids that a policy may never produce.

A sampled image placeholder would make the trainer look for a missing image, and an id beyond the tokenizer has no text.
Engine and trainer remove the same ids from the distribution, so both import this module. It reads only the model's
folder and needs neither torch nor transformers.
"""

import functools
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.model.families.qwen_vl import VISION_TOKEN_KEYS, VISION_TOKENS
from penstock.model.folder import read_json


@functools.cache
def forbidden_token_ids(model_path: Path | str) -> tuple[int, ...]:
    """Return the ids that are never sampled, ascending: vision tokens, padding, and rows without a token.

    An id that ends generation is never among them, even if it doubles as padding.

    Args:
        model_path: Folder of a transformers checkpoint.
    """
    folder = Path(model_path)
    config = read_json(folder / "config.json")
    tokens = _tokens(folder)
    forbidden = {tokens[name] for name in VISION_TOKENS if name in tokens}
    forbidden |= {config[key] for key in VISION_TOKEN_KEYS if isinstance(config.get(key), int)}
    forbidden |= _padding_ids(folder, config, tokens)
    if tokens:
        forbidden |= set(range(vocab_size(folder))) - set(tokens.values())
    return tuple(sorted(forbidden - set(end_token_ids(folder))))


@functools.cache
def end_token_ids(model_path: Path | str) -> tuple[int, ...]:
    """Return the ids that end generation, ascending: those of generation_config.json, or else of config.json."""
    folder = Path(model_path)
    config = read_json(folder / "config.json")
    for source in (read_json(folder / "generation_config.json"), config, config.get("text_config", {})):
        value = source.get("eos_token_id")
        if value is not None:
            return tuple(sorted(value if isinstance(value, list) else [value]))
    return ()


@functools.cache
def image_token_id(model_path: Path | str) -> int | None:
    """Return the placeholder that stands for an image in a prompt; None if the model takes no images."""
    value = read_json(Path(model_path) / "config.json").get("image_token_id")
    return value if isinstance(value, int) else None


@functools.cache
def context_length(model_path: Path | str) -> int | None:
    """Return the most tokens in a sequence that the model was made for; None if its config.json does not say."""
    config = read_json(Path(model_path) / "config.json")
    value = config.get("text_config", config).get("max_position_embeddings")
    return value if isinstance(value, int) else None


@functools.cache
def vocab_size(model_path: Path | str) -> int:
    """Return the number of rows of the embedding: ids are below it.

    Raises:
        ConfigError: config.json does not give it.
    """
    path = Path(model_path) / "config.json"
    config = read_json(path)
    value = config.get("text_config", config).get("vocab_size")
    if not isinstance(value, int):
        raise ConfigError(f"model.path: {path} has no vocab_size; give the folder of a language model")
    return value


def require_same_tokens(model_path: Path, other: Path) -> None:
    """Check that two models give each token the same id, as far as their tokenizers' files say.

    Raises:
        ConfigError: a token has another id in `other`, or one of them lacks it.
    """
    ours, theirs = _tokens(model_path), _tokens(other)
    differing = sorted(token for token, _ in ours.items() ^ theirs.items())
    if ours and theirs and differing:
        raise ConfigError(
            f"{str(other)!r} has other ids than {str(model_path)!r} for {len(set(differing))} tokens, such as "
            f"{differing[0]!r}; take a model with the same tokenizer"
        )


def _padding_ids(folder: Path, config: dict[str, Any], tokens: dict[str, int]) -> set[int]:
    ids = {
        source.get("pad_token_id")
        for source in (read_json(folder / "generation_config.json"), config, config.get("text_config", {}))
    }
    pad = read_json(folder / "tokenizer_config.json").get("pad_token")
    name = pad.get("content") if isinstance(pad, dict) else pad
    ids.add(tokens.get(name) if isinstance(name, str) else None)
    return {value for value in ids if isinstance(value, int)}


def _tokens(folder: Path) -> dict[str, int]:
    """Return the id of each token, including added tokens, from any of the tokenizer's file formats; else empty."""
    tokenizer = read_json(folder / "tokenizer.json")
    vocab = tokenizer.get("model", {}).get("vocab", {})
    tokens: dict[str, int] = dict(vocab) if isinstance(vocab, dict) else {}
    tokens |= {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])}
    tokens |= read_json(folder / "vocab.json")
    added = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
    return tokens | {entry["content"]: int(number) for number, entry in added.items()}
