"""SGLang's parameters under the trainer's names, which are those of transformers' `named_parameters`.

SGLang fuses projections, ties and pads embeddings, pads MLPs, drops prefixes and divides layers; views undo this, and
nothing is copied. Runs inside SGLang's scheduler processes.
"""

from collections.abc import Iterator
from typing import Any

import torch

from penstock.model.families.qwen_vl import own_names
from services.rollout.engine.sglang_plugin.shards import Shard, shards_of
from services.rollout.engine.sglang_plugin.variables import HeldParameter, describe_parameter


def described_parameters(model: Any) -> dict[str, str]:
    """Describe every whole parameter of an SGLang model, as `describe_parameter` does, by the trainer's name."""
    return {
        name: describe_parameter(
            HeldParameter(dtype=str(shard.tensor.dtype).removeprefix("torch."), shape=tuple(shard.shape))
        )
        for name, shard in trainer_parameters(model)
    }


def trainer_parameters(model: Any) -> Iterator[tuple[str, Shard]]:
    """Yield this process's part of every parameter of a Qwen model, with fused parameters taken apart."""
    is_multimodal = hasattr(model, "visual")
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    for name, parameter in model.named_parameters():
        if name.startswith("lm_head.") and tied:
            continue
        layer, _, kind = name.rpartition(".")
        names = own_names(name, is_multimodal=is_multimodal)
        data: torch.Tensor = parameter.data
        shards = shards_of(
            model.get_submodule(layer),
            kind,
            data,
            len(names),
            inner_size=inner_size(layer, model.config),
            conv_channels=conv_channels(layer, model),
        )
        yield from zip(names, shards, strict=True)


def inner_size(layer: str, config: Any) -> int | None:
    """The size of the middle of the MLP that `layer` leads into or out of, by the model's config; None for others.

    SGLang rounds it up: in the tower of Qwen2.5-VL to a multiple of 8, so that 3,420 becomes 3,424. On a CPU it is
    rounded, in language models and towers, to a multiple of 32 for each process.
    """
    if not layer.endswith((".mlp.gate_up_proj", ".mlp.down_proj")):
        return None
    part = config.vision_config if layer.startswith("visual.") else getattr(config, "text_config", config)
    # On a CPU SGLang changes the config too, and keeps the model's size under the first name.
    size: int = getattr(part, "original_intermediate_size", part.intermediate_size)
    return size


def conv_channels(layer: str, model: Any) -> tuple[int, ...]:
    """The channels of queries, keys and values of a convolution of linear attention, each of which SGLang divides by
    itself; none for other layers."""
    if not layer.endswith(".linear_attn.conv1d"):
        return ()
    attention = model.get_submodule(layer.removesuffix(".conv1d"))
    return (attention.key_dim, attention.key_dim, attention.value_dim)
