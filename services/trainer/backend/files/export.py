"""Exports the model's weights: under the names that engines load, as a model folder, and as one digest."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from penstock.model.families.experts import has_experts, published_experts
from penstock.weights.digest import XXH3, tensor_digests
from services.trainer.backend.files.tensor_files import writing_safetensors
from services.trainer.backend.optimizer.master_weights import MasterWeights
from services.trainer.backend.policy.model import PolicyModel

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})


_SHARD_OF_MIXTURE = "4GB"


def named_weights(policy: PolicyModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight that the policy computes with, tied ones once, in a fixed order."""
    for name, parameter in policy.model.named_parameters():
        yield name, parameter.detach()


def weights_digest(weights: MasterWeights) -> str:
    """Return one digest over the names and values of all master weights; equal digests mean equal bits."""
    digests = tensor_digests(weights.named(), XXH3)
    text = "".join(f"{name}={digest:016x}\n" for name, digest in sorted(digests.items()))
    digest: str = xxhash.xxh3_64_hexdigest(text.encode())
    return digest


def save_model(policy: PolicyModel, state: dict[str, Any] | None, base_path: Path, folder: Path) -> None:
    """Write `folder/model`: the master weights, and all files of the base model's folder except weights.

    Args:
        policy: The policy.
        state: Its master weights (`MasterWeights.model_state`).
        base_path: Folder that the policy was loaded from, for tokenizer, processor and chat template.
        folder: Folder in which to create `model`.

    Raises:
        OSError: a file cannot be written.
    """
    target = folder / "model"
    target.mkdir()
    for path in sorted(base_path.iterdir()):
        is_weights = path.suffix in _WEIGHT_SUFFIXES or path.name.endswith(".index.json")
        if path.is_file() and not is_weights and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)
    model_type = policy.model.config.model_type
    if has_experts(model_type):
        own = dict(named_weights(policy)) if state is None else state
        published = dict(part for name, weight in own.items() for part in published_experts(name, weight, model_type))
        with writing_safetensors():  # transposed parameters are copied file by file, so files are small
            policy.model.save_pretrained(
                target, state_dict=published, save_original_format=False, max_shard_size=_SHARD_OF_MIXTURE
            )
    else:
        with writing_safetensors():
            policy.model.save_pretrained(target, state_dict=state)
    if state is not None:
        # config.json names the precision that the model computes in, not that of the written weights.
        config = target / "config.json"
        dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
        config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": dtype}, indent=2) + "\n")
