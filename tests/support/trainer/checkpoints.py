"""What a backend's checkpoint holds."""

from pathlib import Path

import torch
from safetensors.torch import load_file


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Those of all safetensors files in a folder of a checkpoint; no name is in two of them."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        held = load_file(file)
        assert not held.keys() & found.keys()
        found |= held
    return found


def averages_of(checkpoint: Path) -> dict[str, dict[str, torch.Tensor]]:
    """AdamW's, by weight and kind."""
    averages: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in tensors_of(checkpoint / "optimizer").items():
        weight, _, kind = name.rpartition(".")
        averages.setdefault(weight, {})[kind] = value
    return averages
