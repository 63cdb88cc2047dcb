"""What engines can do with models that attend linearly. Pure, so that it is checked before anything heavy is loaded."""

import math
from collections.abc import Mapping
from typing import Any

from penstock.errors import ConfigError
from penstock.model.families.linear_attention import attends_linearly, linear_heads, settings_for_sglang
from services.rollout.engine.config import RolloutConfig

_WITH_LINEAR_ATTENTION = "does not go with linear attention (Qwen3.5) yet"


def require_servable(config: RolloutConfig, model: Mapping[str, Any]) -> None:
    """Check that engines serve a model as the trainer computes it; one without linear attention needs nothing.

    Args:
        config: The settings of the engines.
        model: The content of the model's config.json.

    Raises:
        ConfigError: they do not.
    """
    if not attends_linearly(str(model.get("model_type"))):
        return
    _require_divisible(linear_heads(model), config.tensor_parallel)
    pairs: dict[str, object] = {"rollout.prefill": config.prefill, "rollout.decode": config.decode}
    if config.role != "unified":
        pairs["rollout.role"] = repr(config.role)
    for name, value in pairs.items():
        if value:
            raise ConfigError(
                f"{name} = {value} {_WITH_LINEAR_ATTENTION}: pairs that hand over its states are not tested; leave it "
                "out, and start unified engines with rollout.replicas"
            )
    for name in config.sglang:
        if name.replace("-", "_").startswith("speculative_"):
            raise ConfigError(
                f"rollout.sglang.{name} {_WITH_LINEAR_ATTENTION}: pushes do not carry a draft model; leave it out"
            )
        if name.replace("-", "_") == "json_model_override_args":
            raise ConfigError(
                f"rollout.sglang.{name} {_WITH_LINEAR_ATTENTION}: Penstock passes what SGLang must read; change the "
                "model's config.json instead"
            )
    settings_for_sglang(model)


def _require_divisible(heads: Mapping[str, int], tensor_parallel: int) -> None:
    for key, number in heads.items():
        if number % tensor_parallel:
            raise ConfigError(
                f"rollout.tensor_parallel = {tensor_parallel} does not divide {key} = {number} of config.json; set it "
                f"to a divisor of {math.gcd(*heads.values())}"
            )
