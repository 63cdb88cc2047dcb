"""Reads the JSON files of a model folder in the layout of transformers; needs neither torch nor transformers."""

import json
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError


def require_model(path: Path) -> None:
    """Check that `path` is a model folder; cheap enough to run before anything else starts.

    Raises:
        ConfigError: it has no config.json.
    """
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model.path = {str(path)!r}: this folder has no config.json; give the folder of a transformers checkpoint "
            "or a model on the Hugging Face Hub (owner/name)"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in the file; empty if there is no file, or if it holds something else.

    Raises:
        ConfigError: the file is not JSON.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path} cannot be read as JSON: {error}; repair the model folder") from None
    return content if isinstance(content, dict) else {}


def attention_heads(folder: Path) -> tuple[int, int]:
    """Return the attention heads of a model folder's text layers, and their heads of keys and values.

    Raises:
        ConfigError: its config.json is not JSON.
    """
    config = read_json(folder / "config.json")
    text = config.get("text_config", config)
    heads = int(text.get("num_attention_heads", 1))
    return heads, int(text.get("num_key_value_heads") or heads)
