"""SGLang's parameters under the names that the trainer knows them by: those of transformers' `named_parameters`.

SGLang fuses projections, ties and pads embeddings and drops prefixes; here that is undone, as views, without copying.
Runs inside SGLang's scheduler process.
"""

from collections.abc import Iterator
from typing import Any

import torch

from penstock.weights.digest import tensor_digests
from services.rollout.engine.sglang_plugin.variables import HeldParameter, describe_parameter


def described_parameters(model: Any) -> dict[str, str]:
    """Every parameter of an SGLang model, by checkpoint name, as `describe_parameter` writes it."""
    return {
        name: describe_parameter(
            HeldParameter(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        )
        for name, tensor in checkpoint_parameters(model)
    }


def digests_of(model: Any, kind: str) -> dict[str, str]:
    """The digest of every parameter, by checkpoint name, as text."""
    return {name: str(digest) for name, digest in tensor_digests(checkpoint_parameters(model), kind).items()}


def checkpoint_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter of a model of the Qwen families (neither MoE nor tensor-parallel), fused ones taken apart."""
    is_multimodal = hasattr(model, "visual")
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if name.startswith("lm_head.") and tied:
            continue
        rows = getattr(owner, "org_vocab_size", None)  # SGLang pads the rows of embeddings, vision positions included
        tensor = parameter.data if rows is None else parameter.data[:rows]
        if not name.startswith("visual."):
            yield from _pieces(_with_prefix(name, is_multimodal=is_multimodal), tensor, owner)
        elif ".attn.qkv_proj." in name:  # Qwen's vision towers are fused in the checkpoint too
            yield f"model.{name.replace('.attn.qkv_proj.', '.attn.qkv.')}", tensor
        else:
            yield from _pieces(f"model.{name}", tensor, owner)


def _with_prefix(name: str, *, is_multimodal: bool) -> str:
    if is_multimodal and name.startswith("model."):
        return f"model.language_model.{name.removeprefix('model.')}"
    return name


def _pieces(name: str, tensor: torch.Tensor, owner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Take apart what SGLang fuses along the output dimension."""
    if ".qkv_proj." in name:
        sizes = [owner.q_proj_shard_size, owner.kv_proj_shard_size, owner.v_proj_shard_size]
        parts = ["q_proj", "k_proj", "v_proj"]
        fused = ".qkv_proj."
    elif ".gate_up_proj." in name:
        sizes, parts, fused = list(owner.output_sizes), ["gate_proj", "up_proj"], ".gate_up_proj."
    else:
        yield name, tensor
        return
    for part, piece in zip(parts, tensor.split(sizes), strict=True):
        yield name.replace(fused, f".{part}."), piece
