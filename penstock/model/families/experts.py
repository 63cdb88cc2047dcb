"""The experts of a mixture: two tensors per layer, and their layouts in checkpoints and in SGLang.

Legend: E = experts, I = an expert's inner size, H = hidden size.

*Own*, in transformers' memory: `mlp.experts.gate_up_proj` [E, 2I, H] and `mlp.experts.down_proj` [E, H, I]. SGLang has
the same under other names. *Published*: Qwen3-VL-MoE has both transposed, [E, H, 2I] and [E, I, H]; Qwen3-MoE has three
matrices for each expert, `mlp.experts.7.gate_proj.weight` and `up_proj` [I, H] and `down_proj` [H, I]. transformers
reads both forms, but writes the first as it lies in memory, so Penstock writes checkpoints of mixtures itself.

Sources: transformers 5.19 (conversion_mapping.py) and sglang 0.5.23 (models/qwen3_vl_moe.py).
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from penstock.model.folder import read_json

_GATE_UP: Final = ".mlp.experts.gate_up_proj"
_DOWN: Final = ".mlp.experts.down_proj"
_SGLANG_TO_OWN: Final = {".mlp.experts.w13_weight": _GATE_UP, ".mlp.experts.w2_weight": _DOWN}
_TRANSPOSED: Final = frozenset({"qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"})
_APART: Final = frozenset({"qwen3_moe", "Qwen3MoeForCausalLM"})
"""Model types and architectures whose checkpoints have a matrix for each expert and projection."""
_MATRIX_OF_EXPERT: Final = re.compile(
    r"(?P<layer>.+)\.mlp\.experts\.\d+\.(?P<projection>gate_proj|up_proj|down_proj)\.weight"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShape:
    """How many experts a token of a mixture has to choose from."""

    num_layers: int
    """Layers of the language model, those without experts included."""
    num_experts: int
    """Experts of a layer."""
    num_experts_per_token: int
    """Experts that a token chooses in a layer."""


def has_experts(model: str) -> bool:
    """Return whether models of this type or architecture are mixtures."""
    return model in _TRANSPOSED | _APART


def num_experts(folder: Path) -> int:
    """Return the experts of each layer of a model folder's mixture; 0 for a dense model.

    Raises:
        ConfigError: its config.json is not JSON.
    """
    text = _mixture(folder)
    return 0 if text is None else _num_experts(text)


def mixture_shape(folder: Path) -> MixtureShape | None:
    """Return the shape of a model folder's mixture; None for a dense model.

    Raises:
        ConfigError: its config.json is not JSON.
    """
    text = _mixture(folder)
    if text is None:
        return None
    return MixtureShape(
        num_layers=int(text["num_hidden_layers"]),
        num_experts=_num_experts(text),
        num_experts_per_token=int(text["num_experts_per_tok"]),
    )


def _mixture(folder: Path) -> dict[str, Any] | None:
    """Return the settings of a mixture's language model; None for a dense model."""
    config = read_json(folder / "config.json")
    if not has_experts(config.get("model_type", "")):
        return None
    text: dict[str, Any] = config.get("text_config", config)
    return text


def _num_experts(text: dict[str, Any]) -> int:
    return int(text.get("num_experts", text.get("num_local_experts", 0)))  # as published, as transformers writes it


def is_ambiguous(name: str, shape: tuple[int, ...], model: str) -> bool:
    """Return whether transformers cannot tell if a parameter is transposed, because its two sizes are equal."""
    return model in _TRANSPOSED and name.endswith((_GATE_UP, _DOWN)) and shape[1] == shape[2]


def own_expert_name(name: str) -> str:
    """Return the own name of SGLang's `name`; names that are not of experts stay unchanged."""
    for suffix, own in _SGLANG_TO_OWN.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix) + own
    return name


def loaded_expert_name(name: str, model: str) -> str:
    """Return the own name of the parameter that a checkpoint's tensor `name` is, or is a part of.

    Names that are not of experts stay unchanged.

    Args:
        name: The published name.
        model: The model's type, or its architecture.
    """
    if model in _APART and (apart := _MATRIX_OF_EXPERT.fullmatch(name)):
        return apart["layer"] + (_DOWN if apart["projection"] == "down_proj" else _GATE_UP)
    return name


def published_experts(name: str, weight: Any, model: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a checkpoint that hold the parameter with this own name, as views.

    Args:
        name: The own name; one that is not of experts is yielded unchanged.
        weight: Its tensor.
        model: The model's type, or its architecture.
    """
    if is_transposed(name, model):
        yield name, weight.transpose(1, 2)
    elif names_of_expert(name, 0, model):
        for expert, matrix in enumerate(weight):
            names = names_of_expert(name, expert, model)
            yield from zip(names, matrix.chunk(len(names)), strict=True)
    else:
        yield name, weight


def is_transposed(name: str, model: str) -> bool:
    """Return whether a checkpoint has the parameter with this own name transposed, expert by expert.

    Args:
        name: The own name.
        model: The model's type, or its architecture.
    """
    return model in _TRANSPOSED and name.endswith((_GATE_UP, _DOWN))


def names_of_expert(name: str, expert: int, model: str) -> tuple[str, ...]:
    """Return the names of the matrices in which a checkpoint has one expert of the parameter with this own name.

    They lie below each other in it. Empty: the checkpoint does not have the parameter expert by expert.

    Args:
        name: The own name.
        expert: Number of the expert.
        model: The model's type, or its architecture.
    """
    if model not in _APART or not name.endswith((_GATE_UP, _DOWN)):
        return ()
    layer, _, projection = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
    return tuple(f"{layer}.{expert}.{part}.weight" for part in parts)
