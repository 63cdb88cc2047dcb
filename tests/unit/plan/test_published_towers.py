"""What rows with pictures take in models of published widths, against what torch's own tracker counts of them."""

import copy
from pathlib import Path
from typing import Any

import pytest

from services.plan import working_memory
from services.plan.model_shape import ModelShape
from services.plan.working_memory import RowShape, make_row, working_bytes
from tests.support.trainer.families import random_qwen3_vl
from tests.support.trainer.torchs_tracker import beside_weights, tracking_beside

TEXT_2B: dict[str, Any] = {
    **{"hidden_size": 2048, "head_dim": 128, "vocab_size": 151936, "intermediate_size": 6144},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    },
}
TOWER_2B: dict[str, Any] = {
    **{"hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048},
    "num_position_embeddings": 2304,
}
QWEN3_VL_2B = (TEXT_2B, TOWER_2B)
"""Qwen3-VL-2B's text and tower."""
TWO_PICTURES = RowShape(num_tokens=8192, num_prompt_tokens=2304, num_image_tokens=2048, num_responses=8)
"""Of 4,096 patches each."""
SETTINGS: dict[str, Any] = {
    "learning_rates": (),
    "gradient_checkpointing": False,
    "float32_head": False,
    "dispatches_tokens": False,
}


def shape_of(widths: tuple[dict[str, Any], dict[str, Any]], depths: tuple[int, int], folder: Path) -> ModelShape:
    """Of a model with these layers of the text and blocks of the tower."""
    config = random_qwen3_vl().config
    text = widths[0] | {"num_hidden_layers": depths[0], "layer_types": ["full_attention"] * depths[0]}
    tower = widths[1] | {"depth": depths[1], "deepstack_visual_indexes": [0, depths[1] // 2, depths[1] - 2]}
    for part, values in ((config.text_config, text), (config.vision_config, tower)):
        for name, value in values.items():
            setattr(part, name, value)
    config.tie_word_embeddings = text["tie_word_embeddings"]
    config.save_pretrained(folder)
    return ModelShape.read(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Expected a tensor or a traceable wrapper-subclass", "ignore:Module is None")
@pytest.mark.parametrize(
    ("widths", "depths"),
    [
        pytest.param(QWEN3_VL_2B, (4, 5), id="2B, 4 and 5"),
        pytest.param(QWEN3_VL_2B, (6, 7), id="2B, 6 and 7"),
    ],
)
def test_torchs_tracker_counts_as_much_of_any_depth(
    widths: tuple[dict[str, Any], dict[str, Any]],
    depths: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planned from three layers and four blocks and one more of each; tracked in the model with all of them."""
    shape = shape_of(widths, depths, tmp_path)
    planned = working_bytes(shape, TWO_PICTURES, **SETTINGS).total
    tracker = tracking_beside(monkeypatch)
    monkeypatch.setattr(working_memory, "NUM_LAYERS", shape.num_layers)
    monkeypatch.setattr(working_memory, "NUM_BLOCKS", shape.num_blocks)
    monkeypatch.setattr(ModelShape, "smaller", lambda *_, **__: copy.deepcopy(shape.config))
    working_bytes(shape, TWO_PICTURES, **SETTINGS)
    pixels = make_row(TWO_PICTURES, shape.config).pixel_values_PD
    assert pixels is not None
    assert planned == pytest.approx(beside_weights(tracker) + pixels.nbytes, rel=1e-3)
