"""SGLang's parameters under the trainer's names, which are those of transformers' `named_parameters`.

SGLang fuses projections, ties and pads embeddings and drops prefixes; this is undone with views, without copying.
Runs inside SGLang's scheduler process.
"""

from collections.abc import Iterator
from typing import Any

import torch

from penstock.model.families.qwen_vl import own_names
from penstock.weights.digest import tensor_digests
from services.rollout.engine.sglang_plugin.variables import HeldParameter, describe_parameter


def described_parameters(model: Any) -> dict[str, str]:
    """Every parameter of an SGLang model by the trainer's name, as `describe_parameter` writes it."""
    return {
        name: describe_parameter(
            HeldParameter(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        )
        for name, tensor in trainer_parameters(model)
    }


def digests_of(model: Any, kind: str) -> dict[str, str]:
    """The digest of every parameter by the trainer's name, as text."""
    return {name: str(digest) for name, digest in tensor_digests(trainer_parameters(model), kind).items()}


def trainer_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of a Qwen model that is not tensor-parallel, with fused ones taken apart."""
    is_multimodal = hasattr(model, "visual")
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    for name, parameter in model.named_parameters():
        if name.startswith("lm_head.") and tied:
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        rows = getattr(owner, "org_vocab_size", None)  # SGLang pads the rows of embeddings, also of vision positions
        tensor = parameter.data if rows is None else parameter.data[:rows]
        names = own_names(name, is_multimodal=is_multimodal)
        if len(names) == 1:
            yield names[0], tensor
        else:
            yield from zip(names, tensor.split(_part_rows(owner)), strict=True)


def _part_rows(owner: Any) -> list[int]:
    """Rows of each part of a fused projection."""
    if hasattr(owner, "q_proj_shard_size"):
        return [owner.q_proj_shard_size, owner.kv_proj_shard_size, owner.v_proj_shard_size]
    return list(owner.output_sizes)
