"""Names and sizes of a model folder's parameters, from the headers of its safetensors files.

Needs neither torch nor transformers, and reads no weights.
"""

import json
import math
import struct
from pathlib import Path

from penstock.errors import ConfigError
from penstock.model.families.qwen_vl import DRAFT_HEAD, loaded_name
from penstock.model.folder import read_json

_HEAD = "lm_head.weight"
_INDEX = "model.safetensors.index.json"


def parameter_sizes(folder: Path) -> dict[str, int]:
    """Return the number of elements of each parameter in the checkpoint, by its name there; empty without files.

    Raises:
        ConfigError: a file is truncated, or not a safetensors file.
    """
    sizes: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(size))
        except (OSError, struct.error, ValueError, OverflowError, MemoryError) as error:
            raise ConfigError(f"model.path: {path} is truncated or not a safetensors file ({error})") from None
        sizes |= {name: math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    return sizes


def has_all_files(folder: Path) -> bool:
    """Return whether each safetensors file is there that the folder's index names; a download may have ended early.

    Raises:
        ConfigError: the index is not JSON.
    """
    return all((folder / name).is_file() for name in set(read_json(folder / _INDEX).get("weight_map", {}).values()))


def own_parameter_sizes(folder: Path) -> dict[str, int]:
    """Return the number of elements of each parameter of the loaded model, by its own name; empty without files.

    The experts of a layer are one parameter, and a head that is the embedding is none, though files may have a copy.

    Raises:
        ConfigError: as `parameter_sizes`, or config.json is not JSON.
    """
    config = read_json(folder / "config.json")
    sizes: dict[str, int] = {}
    for published, size in parameter_sizes(folder).items():
        if published.startswith(DRAFT_HEAD):
            continue
        name = loaded_name(published, config.get("model_type", ""))
        sizes[name] = sizes.get(name, 0) + size
    if config.get("tie_word_embeddings", False):
        sizes.pop(_HEAD, None)
    return sizes
