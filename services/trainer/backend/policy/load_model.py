"""Loads the policy from a model folder in the layout of transformers."""

from pathlib import Path
from typing import Any

import torch

from penstock.errors import ConfigError
from penstock.model.families.experts import is_ambiguous, published_experts
from penstock.model.families.qwen_vl import published_name
from services.trainer.backend.export import named_weights
from services.trainer.backend.policy.model import PolicyModel


def load_policy(
    path: Path,
    *,
    temperature: float,
    forbidden_ids: tuple[int, ...],
    float32_head: bool = False,
    gradient_checkpointing: bool = False,
) -> PolicyModel:
    """Load a checkpoint in the layout of transformers, in float32, on the CPU, without dropout.

    Args:
        path: Folder of the checkpoint.
        temperature: The temperature that the policy is sampled with.
        forbidden_ids: From penstock.model.tokens.
        float32_head: Multiply with the output head in float32, whatever the precision of the rest.
        gradient_checkpointing: Recompute activations in the backward pass.

    Raises:
        ConfigError: the folder has no model that can be loaded, or the model's parameters have other names than its
            checkpoint's, so that an engine could not load them.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path)
        parts: list[Any] = [config, config.get_text_config(), getattr(config, "vision_config", None)]
        for part in parts:
            if getattr(part, "attention_dropout", 0.0):
                part.attention_dropout = 0.0
        auto_class = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        model = auto_class.from_pretrained(path, config=config, dtype=torch.float32)
    except SafetensorError as error:
        files = ", ".join(str(file) for file in sorted(path.glob("*.safetensors")) if not _is_whole(file))
        raise ConfigError(
            f"model.path: {files or path} is not a complete safetensors file ({error}); copy it again"
        ) from None
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path {str(path)!r} cannot be loaded: {error}") from None
    policy = PolicyModel(
        model,
        temperature=temperature,
        forbidden_ids=forbidden_ids,
        float32_head=float32_head,
        gradient_checkpointing=gradient_checkpointing,
    )
    _check_names(path, policy)
    return policy


def _is_whole(file: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            return True
    except SafetensorError:
        return False


def _check_names(path: Path, policy: PolicyModel) -> None:
    """Compare the names to be pushed with those of the checkpoint; either may lack a tied copy."""
    from safetensors import safe_open

    in_checkpoint: set[str] = set()
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            in_checkpoint.update(tensors.keys())
    model_type = policy.model.config.model_type
    ours: set[str] = set()
    for name, weight in named_weights(policy):
        if is_ambiguous(name, tuple(weight.shape), model_type):
            raise ConfigError(
                f"model.path {str(path)!r}: {name} has the shape {list(weight.shape)}, of which nobody can tell "
                "whether it is transposed; choose a model whose hidden size differs from its experts' sizes"
            )
        ours.update(published_name(part, model_type) for part, _ in published_experts(name, weight, model_type))
    missing = sorted(ours - in_checkpoint)
    extra = sorted(name for name in in_checkpoint - ours if not name.endswith("lm_head.weight"))
    if in_checkpoint and (missing or extra):
        raise ConfigError(
            f"model.path {str(path)!r}: {len(missing)} parameters are not in the checkpoint (such as {missing[:1]}), "
            f"{len(extra)} of the checkpoint are not in the model (such as {extra[:1]}); choose another model"
        )
