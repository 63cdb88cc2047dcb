"""What rows with pictures take in models of published widths, against what torch's own tracker counts of them."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.plan import working_memory
from services.plan.model_shape import ModelShape
from services.plan.working_memory import RowShape, make_row, working_bytes
from tests.support.plan.torchs_tracker import beside_weights, tracking_beside
from tests.support.trainer.families import random_qwen3_vl

TEXT: dict[str, Any] = {
    **{"head_dim": 128, "vocab_size": 151936, "num_key_value_heads": 8},
    "rope_parameters": {
        **{"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    },
}
TOWER: dict[str, Any] = {"num_heads": 16, "num_position_embeddings": 2304}
SMALL_TOWER = TOWER | {"hidden_size": 1024, "intermediate_size": 4096}
LARGE_TOWER = TOWER | {"hidden_size": 1152, "intermediate_size": 4304}


@dataclass(frozen=True, kw_only=True)
class Widths:
    """A published model's numbers, without those of layers and blocks."""

    text: dict[str, Any]
    tower: dict[str, Any]
    is_tied: bool = False


QWEN3_VL_2B = Widths(
    text=TEXT | {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16},
    tower=SMALL_TOWER | {"out_hidden_size": 2048},
    is_tied=True,
)
QWEN3_VL_4B = Widths(
    text=TEXT | {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32},
    tower=SMALL_TOWER | {"out_hidden_size": 2560},
    is_tied=True,
)
QWEN3_VL_8B = Widths(
    text=TEXT | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
    tower=LARGE_TOWER | {"out_hidden_size": 4096},
)
TWO_PICTURES = RowShape(num_tokens=8192, num_prompt_tokens=2304, num_image_tokens=2048, num_responses=8)
"""Of 4,096 patches each."""
SETTINGS: dict[str, Any] = {
    "learning_rates": (),
    "gradient_checkpointing": False,
    "float32_head": False,
    "dispatches_tokens": False,
}


def shape_of(widths: Widths, depths: tuple[int, int], folder: Path) -> ModelShape:
    """Of a model with so many layers of the text and blocks of the tower."""
    config = random_qwen3_vl().config
    num_layers, num_blocks = depths
    text = widths.text | {
        **{"num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers},
        "tie_word_embeddings": widths.is_tied,
    }
    tower = widths.tower | {"depth": num_blocks, "deepstack_visual_indexes": [0, num_blocks // 2, num_blocks - 2]}
    for part, values in ((config.text_config, text), (config.vision_config, tower)):
        for name, value in values.items():
            setattr(part, name, value)
    config.tie_word_embeddings = widths.is_tied
    config.save_pretrained(folder)
    return ModelShape.read(folder)


@pytest.mark.parametrize(
    ("widths", "depths", "num_parameters"),
    [
        pytest.param(QWEN3_VL_2B, (28, 24), 2_127_532_032, id="2B"),
        pytest.param(QWEN3_VL_4B, (36, 24), 4_437_815_808, id="4B"),
        pytest.param(QWEN3_VL_8B, (36, 27), 8_767_123_696, id="8B"),
    ],
)
def test_widths_are_those_of_the_published_models(
    widths: Widths, depths: tuple[int, int], num_parameters: int, tmp_path: Path
) -> None:
    """With their depths they have as many parameters as the files on the Hub."""
    assert shape_of(widths, depths, tmp_path).num_parameters == num_parameters


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Expected a tensor or a traceable wrapper-subclass", "ignore:Module is None")
@pytest.mark.parametrize(
    ("widths", "depths"),
    [
        pytest.param(QWEN3_VL_2B, (4, 5), id="2B, 4 and 5"),
        pytest.param(QWEN3_VL_2B, (6, 7), id="2B, 6 and 7"),
        pytest.param(QWEN3_VL_4B, (6, 7), marks=pytest.mark.variant, id="4B, 6 and 7"),
        pytest.param(QWEN3_VL_8B, (6, 7), id="8B, 6 and 7"),
    ],
)
def test_torchs_tracker_counts_as_much_of_any_depth(
    widths: Widths, depths: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
