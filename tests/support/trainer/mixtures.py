"""Small mixtures of experts with random weights, and their checkpoints as published.

No two sizes of an expert's matrices are equal: a transposed one would not be noticed.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.conftest import ROOT

CHECKPOINT = ROOT / "models" / "tiny-qwen3-vl"
"""For its tokenizer, image processor and shape."""
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "norm_topk_prob": True}
VOCABULARY = 384


def random_qwen3_vl_moe(**text: Any) -> Any:
    """Untied and with deepstack at three layers as published, for which SGLang is written.

    `text` are settings of the language model.
    """
    from transformers import AutoConfig, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    dense = AutoConfig.from_pretrained(CHECKPOINT).to_dict()
    parts = {name: dense[name] | {"model_type": None} for name in ("text_config", "vision_config")}
    for part in parts.values():
        del part["model_type"]
    parts["text_config"] |= {**EXPERTS, "mlp_only_layers": [], "tie_word_embeddings": False, **text}
    parts["vision_config"] |= {"depth": 3, "deepstack_visual_indexes": [0, 1, 2]}
    tokens = {name: value for name, value in dense.items() if name.endswith("token_id")}
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(**parts, **tokens, tie_word_embeddings=False))


def random_qwen3_moe() -> Any:
    """Text only. Each layer is a mixture, as in every published one; SGLang knows no other."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    rest = {"head_dim": 16, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **rest, **EXPERTS))


MIXTURES: dict[str, Callable[[], Any]] = {"qwen3_vl_moe": random_qwen3_vl_moe, "qwen3_moe": random_qwen3_moe}


def heard(model: Any, *, std_of_embedding: float = 1.0) -> Any:
    """Weights at a scale where every expert of every layer is heard."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            std = std_of_embedding if "embed_tokens" in name else parameter.shape[-1] ** -0.5
            parameter.data.normal_(std=std, generator=generator)
    return model


def published(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the checkpoint, as the files on the hub have them."""
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if ".experts." not in name:
            yield name, weight
        elif model.config.model_type == "qwen3_vl_moe":
            yield name, torch.stack([matrix.T for matrix in weight])
        else:
            for expert, matrix in enumerate(weight):
                prefix = f"{name.rpartition('.')[0]}.{expert}"
                if name.endswith("down_proj"):
                    yield f"{prefix}.down_proj.weight", matrix
                else:
                    inner = EXPERTS["moe_intermediate_size"]
                    yield f"{prefix}.gate_proj.weight", matrix[:inner]
                    yield f"{prefix}.up_proj.weight", matrix[inner:]


def write_mixture(model: Any, folder: Path) -> Path:
    """Make a model folder with the tokenizer and image processor of the tiny model."""
    folder.mkdir()
    for file in CHECKPOINT.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copyfile(file, folder / file.name)
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    tensors = {name: tensor.contiguous().clone() for name, tensor in published(model)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
