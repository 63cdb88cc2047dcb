"""What many layers and steps take is predicted from a few."""

from pathlib import Path
from typing import Any

import pytest

from services.plan import working_memory
from services.plan.linear_attention import few_steps
from services.plan.model_shape import ModelShape
from services.plan.working_memory import RowShape
from services.trainer.config import LoraConfig
from tests.support.plan.counting import LINEAR_9B, ROW, SETTINGS, shape_of, total_bytes
from tests.support.trainer.families import FAMILIES, random_qwen3_vl

LINEAR_ROW = RowShape(num_tokens=600, num_prompt_tokens=100, num_image_tokens=0, num_responses=2)
ONE_SAMPLE = RowShape(num_tokens=2048, num_prompt_tokens=1, num_image_tokens=0, num_responses=1, shares_prompt=False)
"""Of 32 chunks."""
A_GROUP = RowShape(num_tokens=3000, num_prompt_tokens=1400, num_image_tokens=0, num_responses=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True},
        pytest.param({}, marks=pytest.mark.variant),
    ],
)
def test_few_layers_say_what_many_take(
    settings: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A model of six layers and seven blocks, computed whole, takes what the small ones predict."""
    config = random_qwen3_vl().config
    config.text_config.num_hidden_layers, config.vision_config.depth = 6, 7
    config.text_config.layer_types = ["full_attention"] * 6
    config.save_pretrained(tmp_path)
    shape = ModelShape.read(tmp_path)
    predicted = total_bytes(shape, ROW, **SETTINGS | settings)
    request.getfixturevalue("computed_whole")
    assert total_bytes(shape, ROW, **SETTINGS | settings) == pytest.approx(predicted, rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_last", "recomputes"),
    [
        pytest.param(0, False, id="as published, kept"),
        pytest.param(2, True, id="linear layers at the end, computed again"),
    ],
)
def test_a_few_layers_of_each_kind_say_what_many_take(
    num_last: int, recomputes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of two kinds, computed whole and predicted."""
    linear, full = "linear_attention", "full_attention"
    layer_types = [linear, linear, linear, full] * 2 + [linear] * num_last
    sizes = {"layer_types": layer_types, "num_hidden_layers": len(layer_types)}
    shape = shape_of(FAMILIES["qwen3_5_text"], tmp_path, **sizes)
    settings = SETTINGS | {"gradient_checkpointing": recomputes}
    predicted = total_bytes(shape, LINEAR_ROW, **settings)
    monkeypatch.setattr(working_memory, "NUM_LAYERS", 10)
    assert total_bytes(shape, LINEAR_ROW, **settings) == pytest.approx(predicted, rel=1e-2)


@pytest.mark.slow
def test_one_trained_layer_costs_what_all_cost(tmp_path: Path) -> None:
    """What lies above keeps its activations for it; a number of a layer that the small models lack is no mistake."""
    config = random_qwen3_vl().config
    config.text_config.num_hidden_layers = 6
    config.text_config.layer_types = ["full_attention"] * 6
    config.save_pretrained(tmp_path)
    shape = ModelShape.read(tmp_path)
    row = RowShape(num_tokens=1200, num_prompt_tokens=200, num_image_tokens=0, num_responses=3)
    one = total_bytes(shape, row, **SETTINGS | {"learning_rates": (("*", 0.0), ("layers.5.*", 1.0))})
    all_text = total_bytes(shape, row, **SETTINGS | {"learning_rates": (("*", 0.0), ("layers.*", 1.0))})
    assert one == all_text > 0


@pytest.mark.slow
def test_one_layer_with_adapters_costs_what_all_cost(tmp_path: Path) -> None:
    """As one that is trained; the small models may lack it."""
    config = random_qwen3_vl().config
    config.text_config.num_hidden_layers = 6
    config.text_config.layer_types = ["full_attention"] * 6
    config.save_pretrained(tmp_path)
    row = RowShape(num_tokens=1200, num_prompt_tokens=200, num_image_tokens=0, num_responses=3)
    one, all_text = (
        total_bytes(ModelShape.read(tmp_path, LoraConfig(rank=4, targets=(targets,))), row, **SETTINGS)
        for targets in ("*.layers.5.*", "text")
    )
    assert one == all_text > 0


@pytest.mark.slow
@pytest.mark.usefixtures("computed_whole")
@pytest.mark.parametrize(
    ("row", "recomputes"),
    [
        pytest.param(ONE_SAMPLE, True, id="one sample, computed again"),
        pytest.param(A_GROUP, False, id="a group, kept"),
    ],
)
def test_few_steps_take_what_a_step_for_each_chunk_takes(
    row: RowShape, recomputes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Qwen3.5-9B's widths: exactly if parts are equal, and at most 4% more if they are filled up."""
    shape = shape_of(FAMILIES["qwen3_5_text"], tmp_path, **LINEAR_9B)
    settings = SETTINGS | {"gradient_checkpointing": recomputes}
    counted = total_bytes(shape, row, **settings)
    monkeypatch.setattr(few_steps, "MAX_STEPS", 1000)
    exact = total_bytes(shape, row, **settings)
    assert exact <= counted <= (1.001 if row.num_responses == 1 else 1.04) * exact
