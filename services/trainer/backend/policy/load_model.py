"""Loads the policy from a model folder in the layout of transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
import torch

from penstock.errors import ConfigError, PenstockError
from penstock.model.families.experts import is_ambiguous, published_experts
from penstock.model.families.qwen_vl import DRAFT_HEAD, published_name
from services.trainer.backend.files.export import named_weights
from services.trainer.backend.policy.model import PolicyModel

log = structlog.get_logger()


def load_policy(
    path: Path,
    *,
    temperature: float,
    forbidden_ids: tuple[int, ...],
    float32_head: bool = False,
    gradient_checkpointing: bool = False,
    is_compiled: bool = False,
    with_weights: bool = True,
) -> PolicyModel:
    """Load a checkpoint in the layout of transformers, in float32, on the CPU, without dropout.

    Args:
        path: Folder of the checkpoint.
        temperature: The temperature that the policy is sampled with.
        forbidden_ids: From penstock.model.tokens.
        float32_head: Multiply by the output head in float32, whatever the precision of the rest.
        gradient_checkpointing: Recompute activations in the backward pass.
        is_compiled: Compile the layers.
        with_weights: Read the weights. Otherwise parameters are on the meta device, and only names and shapes are
            compared with the files.

    Raises:
        ConfigError: the folder has no loadable model, or the names of the model's parameters differ from its
            checkpoint's, so that an engine could not load them.
    """
    from accelerate import init_empty_weights
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path)
        if any(getattr(part, "quantization_config", None) for part in (config, config.get_text_config())):
            raise ConfigError(
                f"model.path {str(path)!r} has quantized weights, which cannot be trained; take the published model "
                "without quantization"
            )
        parts: list[Any] = [config, config.get_text_config(), getattr(config, "vision_config", None)]
        for part in parts:
            if getattr(part, "attention_dropout", 0.0):
                part.attention_dropout = 0.0
        auto_class = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        if with_weights:
            model = auto_class.from_pretrained(path, config=config, dtype=torch.float32)
        else:
            with init_empty_weights(include_buffers=False):
                model = auto_class.from_config(config, dtype=torch.float32)
            model.tie_weights()  # within the context each name got a parameter of its own
        shapes = _stored_shapes(path)
    except SafetensorError as error:
        files = ", ".join(str(file) for file in sorted(path.glob("*.safetensors")) if not _is_whole(file))
        raise ConfigError(
            f"model.path: {files or path} is not a complete safetensors file ({error}); copy it again"
        ) from None
    except (PenstockError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers checks little, so an odd config may fail anywhere
        if "allocate memory" in str(error):  # torch's own, of the host's
            raise
        log.warning("model.not_loaded", exc_info=error)
        said = " ".join(str(error).split())[:500] or type(error).__name__
        raise ConfigError(f"model.path {str(path)!r} cannot be loaded: {said}") from None
    policy = PolicyModel(
        model,
        temperature=temperature,
        forbidden_ids=forbidden_ids,
        float32_head=float32_head,
        gradient_checkpointing=gradient_checkpointing,
        is_compiled=is_compiled,
    )
    _check_names(path, policy, shapes)
    if not with_weights and not shapes:
        raise ConfigError(
            f"model.path {str(path)!r} has no *.safetensors, which is what ranks read; convert its weights"
        )
    return policy


def _stored_shapes(path: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors in the folder's safetensors files."""
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            shapes.update({name: tensors.get_slice(name).get_shape() for name in tensors.keys()})  # noqa: SIM118
    return shapes


def _is_whole(file: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt"):
            return True
    except SafetensorError:
        return False


def _check_names(path: Path, policy: PolicyModel, in_checkpoint: Mapping[str, list[int]]) -> None:
    """Compare the weights to push with the checkpoint, by names and shapes; either may lack a tied copy.

    A draft head of the checkpoint is not compared: it is neither trained nor written.
    """
    model_type = policy.model.config.model_type
    ours: dict[str, list[int]] = {}
    for name, weight in named_weights(policy):
        if is_ambiguous(name, tuple(weight.shape), model_type):
            raise ConfigError(
                f"model.path {str(path)!r}: {name} is square ({list(weight.shape)}), so transformers cannot tell "
                "whether the checkpoint has it transposed; choose one whose hidden and experts' sizes differ"
            )
        for part, tensor in published_experts(name, weight, model_type):
            ours[published_name(part, model_type)] = list(tensor.shape)
    missing = sorted(ours.keys() - in_checkpoint)
    extra = sorted(
        name
        for name in in_checkpoint.keys() - ours
        if not name.endswith("lm_head.weight") and not name.startswith(DRAFT_HEAD)
    )
    if in_checkpoint and (missing or extra):
        raise ConfigError(
            f"model.path {str(path)!r}: {len(missing)} parameters are not in the checkpoint (such as {missing[:1]}), "
            f"{len(extra)} of the checkpoint are not in the model (such as {extra[:1]}); choose another model"
        )
    for name in ours.keys() & in_checkpoint:
        if ours[name] != in_checkpoint[name]:
            raise ConfigError(
                f"model.path {str(path)!r}: {name} is {in_checkpoint[name]} in the checkpoint and {ours[name]} as "
                "published, which is what engines load; transformers writes mixtures as they lie in memory: take the "
                "published checkpoint, or one that Penstock has written"
            )
