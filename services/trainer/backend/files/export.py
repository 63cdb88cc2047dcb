"""Exports the model's weights: under the names that engines load, as a model folder, and as one digest."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import xxhash

from penstock.model.families.experts import published_experts
from penstock.model.families.qwen_vl import published_name
from services.trainer.backend.files.cast_model import with_dtype
from services.trainer.backend.files.file_plan import PlannedFile
from services.trainer.backend.files.tensor_files import write_share
from services.trainer.backend.policy.model import PolicyModel

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})


def named_weights(policy: PolicyModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight that the policy computes with, tied ones once, in a fixed order."""
    for name, parameter in policy.model.named_parameters():
        yield name, parameter.detach()


def combined_digest(digests: Mapping[str, int], *, base: str = "") -> str:
    """Return one digest of digests by name; equal digests mean equal names and bits.

    Args:
        digests: Digests of tensors, by name.
        base: The combined digest of further tensors.
    """
    text = base + "".join(f"{name}={digest:016x}\n" for name, digest in sorted(digests.items()))
    digest: str = xxhash.xxh3_64_hexdigest(text.encode())
    return digest


def published(name: str, weight: torch.Tensor, model_type: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model folder that hold the weight with this own name, as views."""
    for part, tensor in published_experts(name, weight, model_type):
        yield published_name(part, model_type), tensor


def write_model(
    files: Sequence[PlannedFile],
    weights: Mapping[str, torch.Tensor],
    folder: Path,
    *,
    rank: int,
    model_type: str,
) -> list[Path]:
    """Write one rank's weight files of a model folder that transformers and SGLang load, and return them.

    Args:
        files: Those of all ranks; tensors have their own names.
        weights: Those that the rank owns.
        folder: The model folder; its parent must exist.
        rank: The rank.
        model_type: The model's type.

    Raises:
        OSError: a file cannot be written.
    """
    return write_share(
        files, weights, folder, rank=rank, stored=lambda name, weight: published(name, weight, model_type)
    )


def write_model_settings(
    files: Sequence[PlannedFile],
    shapes: Mapping[str, tuple[int, ...]],
    base_path: Path,
    folder: Path,
    *,
    model_type: str,
) -> list[Path]:
    """Write all files of a model folder except weights, and return them.

    Args:
        files: The weight files of all ranks, in float32.
        shapes: Shape of each weight, by its own name.
        base_path: Folder that the run began with, for configuration, tokenizer, processor and chat template.
        folder: The model folder; its parent must exist.
        model_type: The model's type.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(exist_ok=True)
    written = []
    for path in sorted(base_path.iterdir()):
        is_weights = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if not path.is_file() or is_weights or path.name.startswith("."):
            continue
        if path.name == "config.json":
            config = with_dtype(json.loads(path.read_text()), "float32")
            (folder / path.name).write_text(json.dumps(config, indent=2) + "\n")
        else:
            shutil.copyfile(path, folder / path.name)
        written.append(folder / path.name)
    if len(files) > 1:
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps(_index(files, shapes, model_type), indent=2) + "\n")
        written.append(index)
    return written


def _index(files: Sequence[PlannedFile], shapes: Mapping[str, tuple[int, ...]], model_type: str) -> dict[str, object]:
    """Return the index of weight files as transformers reads it."""
    weight_map, total_size = {}, 0
    for file in files:
        for name in file.tensors:
            for part, tensor in published(name, torch.empty(shapes[name], device="meta"), model_type):
                weight_map[part] = file.name
                total_size += tensor.nbytes
    return {"metadata": {"total_size": total_size}, "weight_map": weight_map}
