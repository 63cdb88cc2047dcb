"""What a row takes of a small model, for tests of `penstock plan`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.plan.model_shape import ModelShape
from services.plan.working_memory import RowShape, working_bytes

ROW = RowShape(num_tokens=300, num_prompt_tokens=80, num_image_tokens=64, num_responses=3)
LINEAR_9B = {
    **{"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4},
    **{"head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}
"""Qwen3.5-9B's, of which two layers. The vocabulary is small, so that the layers take most."""
SETTINGS: dict[str, Any] = {
    "learning_rates": (),
    "gradient_checkpointing": False,
    "float32_head": False,
    "dispatches_tokens": False,
}


def total_bytes(shape: ModelShape, row: RowShape, **settings: Any) -> int:
    """The most bytes that the row takes at a time."""
    return working_bytes(shape, row, **settings).total


def shape_of(make: Callable[[], Any], folder: Path, **text: Any) -> ModelShape:
    """Of a small model's config, with other settings of its text if given."""
    config = make().config
    for name, value in text.items():
        setattr(config.get_text_config(), name, value)
    config.save_pretrained(folder)
    return ModelShape.read(folder)
