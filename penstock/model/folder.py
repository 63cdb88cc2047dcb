"""Reading the JSON files of a model folder in the layout of transformers; needs neither torch nor transformers."""

import json
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """The object that the file holds; empty where there is no file, or something else than an object in it.

    Raises:
        ConfigError: the file is no JSON.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {path} cannot be read as JSON: {error}; repair the model folder") from None
    return content if isinstance(content, dict) else {}
