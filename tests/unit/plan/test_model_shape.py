"""The parameters of a model, read from its config."""

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from services.plan.model_shape import ModelShape
from services.trainer.config import LoraConfig
from tests.support.plan.counting import shape_of
from tests.support.trainer.families import FAMILIES, LINEAR_FAMILIES, MIXTURES, random_qwen3_vl


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    """All, those of a layer, and those that compute a token."""
    model = FAMILIES[family]()
    shape = shape_of(FAMILIES[family], tmp_path)
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    layers = getattr(model.base_model, "language_model", model.base_model).layers
    in_layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    assert (shape.num_of_largest_layer, shape.num_of_text_layers) == (max(in_layers), sum(in_layers))
    unchosen = 0
    if family in MIXTURES:  # 6 experts, of which a token goes through 2
        experts = sum(parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name)
        unchosen = experts * 4 // 6
    assert shape.num_active == shape.num_parameters - unchosen


@pytest.mark.parametrize("family", LINEAR_FAMILIES)
def test_models_that_attend_linearly_take_no_adapters(family: str, tmp_path: Path) -> None:
    """In the trainer's words."""
    FAMILIES[family]().config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.lora\.rank = 4 does not go with linear attention"):
        ModelShape.read(tmp_path, LoraConfig(rank=4))


def test_frozen_parts_are_not_trained(tmp_path: Path) -> None:
    """As the recipe's rates say, by the trainer's own rules."""
    shape = shape_of(random_qwen3_vl, tmp_path)
    tower = sum(size for name, size in shape.sizes if "visual" in name and "merger" not in name)
    trained = shape.trained({"tower": 0.0})
    assert shape.share_bytes(trained, 1, ranks=1, expert_parallel=1) == shape.num_parameters - tower
    with pytest.raises(ConfigError, match="no parameter fits 'towr'"):
        shape.trained({"towr": 0.0})
