"""A rank's share of a checkpoint: what it owns of every set of tensors, in its host's memory, and as files.

    model/           the weights, as a model folder; or, where only adapters are trained:
    adapter/         the adapters, as a folder of the PEFT library
    optimizer/       AdamW's averages
    reference/       the reference policy, where there is one
    trainer.pt       all else: counters, random state, settings

Invariant: tensors are whole and have the same names whatever the number of ranks. Each rank owns about as many bytes of
them as any other, and writes them into files of its own; rank 0 writes the rest.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import torch

from penstock.runtime.disk_space import flush
from penstock.runtime.file_digest import file_digest
from services.trainer.backend.files.adapter_folder import ADAPTER, stored_adapter, write_adapter_config
from services.trainer.backend.files.export import write_model, write_model_settings
from services.trainer.backend.files.file_plan import MAX_FILE_BYTES, PlannedFile, owners_of, plan_files
from services.trainer.backend.files.tensor_files import save_state, write_share
from services.trainer.backend.optimizer.master_weights import MasterWeights
from services.trainer.backend.ranks.ranks import Ranks

MODEL: Final = "model"
STATE_FILE: Final = "trainer.pt"

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorShare:
    """What this rank writes of a set of tensors."""

    files: Sequence[PlannedFile]
    """Those of all ranks."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of all tensors, by name."""
    owned: Mapping[str, torch.Tensor]
    """The tensors in this rank's files, by name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collected:
    """What this rank writes of a checkpoint."""

    tensors: Mapping[str, TensorShare]
    """By the name of their folder."""
    state: dict[str, Any]
    """Contents of `trainer.pt`."""
    adapter_config: dict[str, Any] | None = None
    """Contents of `adapter/adapter_config.json`; None: the checkpoint has a model folder."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors that this rank writes."""
        return sum(tensor.nbytes for share in self.tensors.values() for tensor in share.owned.values())

    def copied(self) -> Self:
        """Return a copy in the host's memory, which no update changes."""
        tensors = {
            folder: replace(
                share, owned={name: tensor.detach().to("cpu", copy=True) for name, tensor in share.owned.items()}
            )
            for folder, share in self.tensors.items()
        }
        return replace(self, tensors=tensors)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Owning:
    """Which rank owns what is shaped like a weight."""

    weights: MasterWeights
    shapes: Mapping[str, tuple[int, ...]]
    """Of all weights, by name."""
    owners: Mapping[str, int]
    """By the weight's name."""

    @classmethod
    def of(cls, weights: MasterWeights, ranks: Ranks) -> Self:
        """Divide the weights among the ranks."""
        shapes = weights.shapes
        return cls(weights=weights, shapes=shapes, owners=owners_of(_sizes(shapes), ranks.size))

    @classmethod
    def of_one(cls, weights: MasterWeights, *, rank: int) -> Self:
        """Let one rank own all weights."""
        shapes = weights.shapes
        return cls(weights=weights, shapes=shapes, owners=dict.fromkeys(shapes, rank))

    def share(
        self, stem: str, shards: Mapping[str, Mapping[str, torch.Tensor]], *, is_one_file: bool = False
    ) -> TensorShare:
        """Return what this rank writes of float32 tensors that are shaped like weights. All ranks must call it.

        Args:
            stem: How the names of their files begin.
            shards: This rank's shard of each, by kind and weight. One is stored as `<weight>.<kind>`, or as `<weight>`
                if its kind is empty.
            is_one_file: Write all of one rank into one file, however large.
        """
        owned = {kind: self.weights.owned(each, self.owners) for kind, each in shards.items()}
        weight_of = {_stored(name, kind): name for name in self.owners for kind, each in shards.items() if name in each}
        shapes = {each: self.shapes[name] for each, name in weight_of.items()}
        return TensorShare(
            files=plan_files(
                stem,
                _sizes(shapes),
                {each: self.owners[name] for each, name in weight_of.items()},
                max_bytes=sys.maxsize if is_one_file else MAX_FILE_BYTES,
            ),
            shapes=shapes,
            owned={_stored(name, kind): tensor for kind, each in owned.items() for name, tensor in each.items()},
        )


def write_collected(
    collected: Collected, folder: Path, *, rank: int, base_path: Path, model_type: str
) -> dict[str, str]:
    """Write this rank's share into `folder`, which must exist; return the digests of its files, which are on the disk.

    Args:
        collected: The share.
        folder: Folder of the checkpoint.
        rank: The rank.
        base_path: Folder of the model that the run began with, for tokenizer and processor.
        model_type: The model's type.

    Raises:
        OSError: a file cannot be written.
    """
    written: list[Path] = []
    for name, share in collected.tensors.items():
        if name == MODEL:
            written += write_model(share.files, share.owned, folder / name, rank=rank, model_type=model_type)
        elif name == ADAPTER:
            written += write_share(share.files, share.owned, folder / name, rank=rank, stored=stored_adapter)
        else:
            written += write_share(share.files, share.owned, folder / name, rank=rank)
    if rank == 0:
        if collected.adapter_config is not None:
            written.append(write_adapter_config(collected.adapter_config, folder / ADAPTER))
        else:
            model = collected.tensors[MODEL]
            written += write_model_settings(model.files, model.shapes, base_path, folder / MODEL, model_type=model_type)
        save_state(collected.state, folder / STATE_FILE)
        written.append(folder / STATE_FILE)
    for path in (*written, *{path.parent for path in written}):
        flush(path)
    return {str(path.relative_to(folder)): file_digest(path) for path in written}


def _sizes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    return {name: _FLOAT32_BYTES * math.prod(shape) for name, shape in shapes.items()}


def _stored(name: str, kind: str) -> str:
    return f"{name}.{kind}" if kind else name
