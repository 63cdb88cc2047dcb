"""Writes the model of a run with adapters (LoRA): the base with the adapters merged into it."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from penstock.errors import ConfigError
from penstock.model.families.qwen_vl import published_name
from penstock.weights.adapter_names import LORA_A, LORA_B
from penstock.weights.adapters import change_of, merged
from services.trainer.backend.files.adapter_folder import PREFIX, STEM, read_adapter_config
from services.trainer.backend.files.cast_model import cast_model, deletion_reported


def merge_adapter(adapter: Path, target: Path, *, dtype: str, base: Path | None = None) -> int:
    """Write a model folder whose weights contain the adapters; return the weights' size in bytes.

    The sum is computed in float32 and rounded once to `dtype`.

    Args:
        adapter: A PEFT folder, such as `adapter/` of a checkpoint.
        target: The folder to create.
        dtype: A floating-point type of torch: "bfloat16".
        base: Folder of the base; None: the one that the adapters were trained on, by its recorded path.

    Raises:
        ConfigError: the base is not there, or the adapters are not of it; or `target` already exists.
        SetupError: there is no room for it, it cannot be made, or the adapters were deleted while they were read.
    """
    tensors: dict[str, torch.Tensor] = {}
    with deletion_reported(adapter):
        config = read_adapter_config(adapter)
        for file in sorted(adapter.iterdir()):
            if file.match(f"{STEM}*.safetensors"):  # earlier releases cut large ones
                tensors |= load_file(file)
    base = base or Path(config["base_model_name_or_path"])
    if not (base / "config.json").is_file():
        raise ConfigError(f"{base}, the base of {adapter}, is no model folder (config.json); name it with --base")
    scale = config["lora_alpha"] / config["r"]
    layers = [name.removeprefix(PREFIX).removesuffix(LORA_A) for name in tensors if name.endswith(LORA_A)]
    model_type = json.loads((base / "config.json").read_text())["model_type"]
    changes = {
        published_name(f"{layer}.weight", model_type): (
            tensors[PREFIX + layer + LORA_A],
            tensors[PREFIX + layer + LORA_B] * scale,
        )
        for layer in layers
    }
    shapes = dict(_shapes(base))
    wrong = sorted(name for name, (a, b) in changes.items() if shapes.get(name) != [b.shape[0], a.shape[1]])
    if wrong:
        found = shapes.get(wrong[0], "none")
        raise ConfigError(
            f"{base} is not the base of {adapter}: {len(wrong)} matrices do not fit, such as {wrong[0]} ({found}); "
            "name the folder that the run began with by --base"
        )

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return merged(tensor.float(), change_of(*changes[name])) if name in changes else tensor

    return cast_model(base, target, dtype=dtype, change=change)


def _shapes(folder: Path) -> Iterator[tuple[str, list[int]]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield from ((name, file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
