"""The Qwen families, with and without vision: special tokens, how images become tokens, and names of parameters.

Here is what engine, worker and trainer must agree on, and which members of the families they take. Needs neither torch
nor transformers. What only one of the three computes is elsewhere: rotary positions
(services/trainer/batching/positions.py), layers that take adapters (services/trainer/checks/parameter_patterns.py),
calls of the vision tower (services/trainer/backend/policy), its memory (services/plan/working_memory.py), and in
services/rollout/engine/sglang_plugin the sizes of SGLang's MLPs (parameters.py) and its image processor
(image_processors.py).

A parameter's name has three spellings. *Own*: transformers' `named_parameters`, used by the trainer and every push.
*Published*: the checkpoint's, which older members of the family keep from before transformers 5, and which lays out the
experts of a mixture differently (`experts`). *SGLang's*: fused projections, and the vision tower at the top.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from penstock.errors import ConfigError, InvalidRequestError
from penstock.model.families.experts import loaded_expert_name, own_expert_name
from penstock.model.families.linear_attention import LINEAR_MODEL_TYPES
from penstock.model.folder import read_json

TRAINED_MODEL_TYPES: Final = (
    *("qwen2", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    *LINEAR_MODEL_TYPES,
)
"""Model types that are trained: packed rows are known to give transformers' own log-probabilities and gradients. Others
may scale or cap their logits, count positions in another way, or route tokens to experts."""

VISION_TOKENS: Final = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Tokens that a policy may never sample: each announces or stands for an image or a video."""
VISION_TOKEN_KEYS: Final = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
"""Keys of config.json that hold their ids."""

_OWN_TO_PUBLISHED: Final = (("model.visual.", "visual."), ("model.language_model.", "model."))
_WITH_PUBLISHED_NAMES: Final = frozenset(
    {"qwen2_vl", "qwen2_5_vl", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"}
)
"""Model types and architectures whose checkpoints transformers 5 renames."""

_SGLANG_FUSED: Final = (
    (".qkv_proj.", ("q_proj", "k_proj", "v_proj")),
    (".gate_up_proj.", ("gate_proj", "up_proj")),
    (".in_proj_qkvz.", ("in_proj_qkv", "in_proj_z")),
    (".in_proj_ba.", ("in_proj_b", "in_proj_a")),
)
"""Projections that SGLang stores as one parameter, in its order."""

_OF_ATTENTION: Final = re.compile(r"(?P<layer>\.layers\.\d+)(?=\.(qkv_proj|o_proj|q_norm|k_norm)\.)")
"""SGLang has the attention of Qwen3.5 in the layer itself."""

DRAFT_HEAD: Final = "mtp."
"""Begins the names of the layers that guess tokens for speculative decoding, in checkpoints of Qwen3.5. They are no
part of the model in transformers."""

PARTS: Final = ("tower", "merger", "text", "head")
"""Parts of a model that may have their own learning rate: the vision tower, the merger that maps its features into the
language model, the language model with its embedding, and the output head, which many members of the family tie to the
embedding."""
IMAGE_PARTS: Final = ("tower", "merger")
"""Parts that only images go through."""

MAX_ASPECT_RATIO: Final = 200
"""The image processor rejects images with one side more than this many times the other."""


def published_name(name: str, model: str) -> str:
    """Return the checkpoint's name of the parameter that transformers calls `name`; SGLang's loader uses the same.

    Args:
        name: The own name.
        model: The model's type, or its architecture.
    """
    if model in _WITH_PUBLISHED_NAMES:
        for own, published in _OWN_TO_PUBLISHED:
            if name.startswith(own):
                return published + name.removeprefix(own)
    return name


def loaded_name(name: str, model_type: str) -> str:
    """Return what transformers calls the parameter that a checkpoint's tensor `name` is, or is a part of."""
    is_own = any(name.startswith(own) for own, _ in _OWN_TO_PUBLISHED)
    if model_type in _WITH_PUBLISHED_NAMES and not is_own:
        for own, published in _OWN_TO_PUBLISHED:
            if name.startswith(published):
                return own + name.removeprefix(published)
    return loaded_expert_name(name, model_type)


def part_of(name: str) -> str:
    """Return the part of the model, one of `PARTS`, that holds the parameter with this own name."""
    if name.startswith("lm_head."):
        return "head"
    if not name.startswith("model.visual."):
        return "text"
    # merger, and Qwen3-VL's deepstack_merger_list: the same map for features of inner layers
    return "merger" if "merger" in name.split(".")[2] else "tower"


def own_names(name: str, *, is_multimodal: bool) -> tuple[str, ...]:
    """Return the own names of the parameters in SGLang's `name`; several if SGLang fuses them, in its order.

    Args:
        name: SGLang's name.
        is_multimodal: Whether the model has a vision tower.
    """
    is_vision = name.startswith("visual.")
    if is_vision:
        name = f"model.{name}"
    elif is_multimodal and name.startswith("model."):
        name = f"model.language_model.{name.removeprefix('model.')}"
    if is_vision and ".attn.qkv_proj." in name:  # transformers fuses it too
        return (name.replace(".attn.qkv_proj.", ".attn.qkv."),)
    name = _OF_ATTENTION.sub(r"\g<layer>.self_attn", own_expert_name(name))
    for fused, parts in _SGLANG_FUSED:
        if fused in name:
            return tuple(name.replace(fused, f".{part}.") for part in parts)
    return (name,)


def require_published_tower(model: Mapping[str, Any]) -> None:
    """Refuse towers for which SGLang has numbers of the published models instead of reading them.

    Args:
        model: The content of config.json.

    Raises:
        ConfigError: SGLang would compute the tower differently from transformers.
    """
    vision, text = model.get("vision_config") or {}, model.get("text_config") or model
    patch = (vision.get("temporal_patch_size", 2), vision.get("patch_size", 14))
    if model.get("model_type") == "qwen2_5_vl" and patch != (2, 14):
        raise ConfigError(
            f"model.path: the tower takes patches of {patch[0]} x {patch[1]} x {patch[1]}; SGLang takes those of "
            "Qwen2.5-VL in 2 x 14 x 14 only, as published, and would end at the first image; use such a model"
        )
    epsilon = text.get("rms_norm_eps", 1e-5)  # transformers' default
    if model.get("model_type") == "qwen2_vl" and epsilon != 1e-6:
        raise ConfigError(
            f"model.path: the language model's rms_norm_eps is {epsilon}; SGLang takes it for the norms of Qwen2-VL's "
            "tower too, where the trainer has 1e-06; use a model with 1e-06, as published"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageGrid:
    """The grid into which the family's image processor cuts an image, one token per cell."""

    factor: int
    """Pixels along the side of a token: patch size times merge size."""
    min_pixels: int
    max_pixels: int

    @classmethod
    def of(cls, model_path: Path) -> "ImageGrid":
        """Read from the model's preprocessor_config.json, or else processor_config.json."""
        config = read_json(model_path / "preprocessor_config.json")
        config = config or read_json(model_path / "processor_config.json").get("image_processor", {})
        size = config.get("size", {})
        return cls(
            factor=config.get("patch_size", 14) * config.get("merge_size", 2),
            min_pixels=config.get("min_pixels") or size.get("shortest_edge") or 56 * 56,
            max_pixels=config.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280,
        )

    def num_tokens(self, width: int, height: int, *, field: str) -> int:
        """Return the tokens of an image (`smart_resize` of transformers' Qwen2-VL image processor).

        Raises:
            InvalidRequestError: one side is more than 200 times the other.
        """
        if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
            raise InvalidRequestError(
                f"{field} is {width} x {height} pixels; one side may be at most {MAX_ASPECT_RATIO} times the other"
            )
        rows = round(height / self.factor)
        columns = round(width / self.factor)
        if rows * columns * self.factor**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrink / self.factor))
            columns = max(1, math.floor(width / shrink / self.factor))
        elif rows * columns * self.factor**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * grow / self.factor)
            columns = math.ceil(width * grow / self.factor)
        return rows * columns

    def num_added_tokens(self, sizes: Sequence[tuple[int, int]], *, field: str = "images") -> int:
        """Return the tokens that images of these (width, height) add to a prompt with one placeholder for each."""
        return sum(
            self.num_tokens(width, height, field=f"{field}[{index}]") - 1 for index, (width, height) in enumerate(sizes)
        )
