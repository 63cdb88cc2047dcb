"""Qwen3.5. Most of its layers attend linearly: they carry a state from token to token. Every n-th layer attends to all
earlier tokens.

Needs neither torch nor transformers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from penstock.errors import ConfigError
from penstock.model.folder import read_json

LINEAR_MODEL_TYPES: Final = ("qwen3_5", "qwen3_5_text")
_FULL, _LINEAR = "full_attention", "linear_attention"
_DEFAULT_INTERVAL: Final = 4
"""transformers': every fourth layer attends in full."""
_DEFAULT_ROTARY_FACTOR: Final = 0.25
_DEFAULT_HEADS: Final = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_attention_heads": 16}
"""Transformers', by their keys in config.json."""


def attends_linearly(model_type: str) -> bool:
    """Return whether most layers of models of this type have a state in place of attention to all earlier tokens."""
    return model_type in LINEAR_MODEL_TYPES


def has_linear_attention(folder: Path) -> bool:
    """Return whether the model in this folder attends linearly; one without a config.json does not.

    Raises:
        ConfigError: config.json is not JSON.
    """
    return attends_linearly(str(read_json(folder / "config.json").get("model_type")))


def require_known_gates(model: Mapping[str, Any]) -> None:
    """Check that a model that attends linearly has the gates that transformers computes, which reads none of these.

    Args:
        model: The content of config.json.

    Raises:
        ConfigError: it has others.
    """
    text = model.get("text_config", model)
    gate = text.get("output_gate_type")
    if gate not in (None, "swish", "silu"):
        raise ConfigError(
            f"model.path: output_gate_type = {gate!r} of config.json: transformers computes these gates with SiLU; use "
            "a model that does, as published"
        )
    if text.get("attn_output_gate") is False:
        raise ConfigError(
            "model.path: attn_output_gate = false of config.json: transformers computes attention with a gate; use a "
            "model that has one, as published"
        )


def linear_heads(model: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers of heads in the language model's layers, by their keys in config.json: heads of keys and of
    values in linear attention, heads of queries in the other layers.

    Args:
        model: The content of config.json, of a type that attends linearly.
    """
    text = model.get("text_config", model)
    return {key: int(text.get(key, default)) for key, default in _DEFAULT_HEADS.items()}


def is_kept_in_float32(name: str, model_type: str) -> bool:
    """Return whether engines hold the parameter with this own name in float32, whatever their precision."""
    return attends_linearly(model_type) and name.endswith(".A_log")


def settings_for_sglang(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return what SGLang must read beside config.json, where transformers writes it in another way or not at all.

    Args:
        model: The content of config.json, of a type that attends linearly.

    Raises:
        ConfigError: SGLang would compute another model than transformers.
    """
    require_known_gates(model)
    text = model.get("text_config", model)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", _DEFAULT_ROTARY_FACTOR))
    settings = {
        "full_attention_interval": _interval_of(text),
        "partial_rotary_factor": factor,
    }
    if "text_config" not in model:
        return settings
    # The tower is Qwen3-VL's but for features of inner layers, of which SGLang would take Qwen3-VL's three.
    return {"text_config": settings, "vision_config": {"deepstack_visual_indexes": []}}


def _interval_of(text: Mapping[str, Any]) -> int:
    kinds, interval = text.get("layer_types"), text.get("full_attention_interval")
    if interval is None:
        interval = kinds.index(_FULL) + 1 if kinds and _FULL in kinds else _DEFAULT_INTERVAL
    expected = [_LINEAR if number % interval else _FULL for number in range(1, len(kinds or ()) + 1)]
    if kinds and (_FULL not in kinds or list(kinds) != expected):
        raise ConfigError(
            f"model.path: layer_types of config.json has full attention in layers "
            f"{[number for number, kind in enumerate(kinds) if kind == _FULL]}; SGLang takes every n-th layer for one "
            "that attends in full, as published; use such a model"
        )
    return int(interval)
