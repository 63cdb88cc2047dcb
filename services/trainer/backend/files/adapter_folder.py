"""A folder with the adapters (LoRA) of a policy, as the PEFT library writes and loads it.

    adapter_model.safetensors    A and B of each layer, `base_model.model.<layer>.lora_A.weight`, in float32
    adapter_config.json          rank, alpha, layers, and the folder of the base

B is stored without the scale alpha / rank, as PEFT stores it.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from penstock.errors import ConfigError
from services.trainer.config import LoraConfig

ADAPTER: Final = "adapter"
"""Name of the folder in a checkpoint."""
CONFIG_FILE: Final = "adapter_config.json"
STEM: Final = "adapter_model"
PREFIX: Final = "base_model.model."
"""What PEFT puts before a model's own names."""


def adapter_config(
    config: LoraConfig, adapted: Sequence[str], all_modules: Iterable[str], base_path: Path
) -> dict[str, Any]:
    """Return the contents of adapter_config.json.

    Args:
        config: The adapters.
        adapted: Names of the layers that have one.
        all_modules: Names of all the model's modules.
        base_path: Folder of the base.
    """
    last = {name.rpartition(".")[2] for name in adapted}
    same_ending = [name for name in all_modules if name.rpartition(".")[2] in last]
    targets = sorted(last) if len(same_ending) == len(adapted) else list(adapted)  # PEFT compares names by their end
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_path.absolute()),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def stored_adapter(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return an adapter's tensor under PEFT's name."""
    return [(PREFIX + name, tensor)]


def write_adapter_config(contents: dict[str, Any], folder: Path) -> Path:
    """Write adapter_config.json into an existing folder, and return its path.

    Raises:
        OSError: it cannot be written.
    """
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(contents, indent=2) + "\n")
    return path


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json.

    Raises:
        ConfigError: it is missing or damaged.
        FileNotFoundError: the folder is gone.
    """
    try:
        contents: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
        return {"r": int(contents["r"]), "lora_alpha": float(contents["lora_alpha"])} | contents
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, FileNotFoundError) and not folder.exists():
            raise
        raise ConfigError(f"{folder / CONFIG_FILE} is no PEFT configuration of adapters ({error})") from None


def require_same_adapters(folder: Path, config: LoraConfig) -> None:
    """Check that the adapters of a checkpoint have the recipe's rank and scale.

    Raises:
        ConfigError: they do not.
    """
    saved = read_adapter_config(folder)
    if (saved["r"], saved["lora_alpha"]) != (config.rank, config.alpha):
        raise ConfigError(
            f"trainer.lora: {folder} has rank {saved['r']} and alpha {saved['lora_alpha']:g}, the recipe rank "
            f"{config.rank} and alpha {config.alpha:g}; a run keeps them: restore them, or begin a new run with the "
            "model that `penstock export` writes"
        )
