"""What SGLang pads is not the trainer's: its parameters have the sizes of the model."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.rollout.engine.sglang_plugin.parameters import inner_size

TEXT, TOWER = "model.layers.3.mlp", "visual.blocks.3.mlp"
GPU: dict[str, Any] = {"vision_config": SimpleNamespace(intermediate_size=3420), "intermediate_size": 18944}
CPU: dict[str, Any] = {
    "vision_config": SimpleNamespace(intermediate_size=3424, original_intermediate_size=3420),
    "text_config": SimpleNamespace(intermediate_size=128, original_intermediate_size=100),
    "intermediate_size": 128,
}


@pytest.mark.parametrize(
    ("layer", "config", "expected"),
    [
        (f"{TOWER}.gate_up_proj", GPU, 3420),
        (f"{TOWER}.down_proj", GPU, 3420),
        (f"{TEXT}.gate_up_proj", GPU, 18944),
        (f"{TOWER}.down_proj", CPU, 3420),
        (f"{TEXT}.down_proj", CPU, 100),
        (f"{TEXT}.gate_up_proj", {"intermediate_size": 96}, 96),
        ("visual.merger.mlp.0", GPU, None),
        ("visual.blocks.3.mlp.linear_fc1", GPU, None),
        ("model.layers.3.self_attn.qkv_proj", GPU, None),
        ("model.layers.3.mlp.experts", GPU, None),
    ],
)
def test_the_middle_of_an_mlp_has_the_models_size(layer: str, config: dict[str, Any], expected: int | None) -> None:
    """In the published tower of Qwen2.5-VL 3,420, which SGLang pads to 3,424."""
    assert inner_size(layer, SimpleNamespace(**config)) == expected
