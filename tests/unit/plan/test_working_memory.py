"""What a row takes, by what a recipe and the row ask for."""

from pathlib import Path
from typing import Any

import pytest

from services.plan.model_shape import ModelShape
from services.plan.working_memory import RowShape, working_bytes
from services.trainer.config import LoraConfig
from tests.support.plan.counting import SETTINGS, shape_of, total_bytes
from tests.support.trainer.families import FAMILIES, random_qwen3_vl

COUNTED_BELOW = ("qwen3_vl", "qwen3", "qwen3_moe")
"""Families that other tests of this file count."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=pytest.mark.variant if family in COUNTED_BELOW else ()) for family in FAMILIES],
)
def test_every_family_can_be_counted(family: str, tmp_path: Path) -> None:
    """What decides sizes in any of them is computed."""
    shape = shape_of(FAMILIES[family], tmp_path)
    row = RowShape(num_tokens=600, num_prompt_tokens=200, num_image_tokens=64, num_responses=3)
    assert total_bytes(shape, row, **SETTINGS) > 600 * 64 * 4


@pytest.mark.slow
@pytest.mark.usefixtures("computed_whole")
def test_logits_are_told_from_activations(tmp_path: Path) -> None:
    """Products of the head that are kept, the head's gradient and a few chunks; a small vocabulary's are gone when the
    layers take most."""
    row = RowShape(num_tokens=1200, num_prompt_tokens=200, num_image_tokens=0, num_responses=3)
    small, large = (
        working_bytes(shape_of(FAMILIES["qwen3"], tmp_path, **sizes), row, **SETTINGS)
        for sizes in ({"vocab_size": 384, "intermediate_size": 4096}, {"vocab_size": 60_000})
    )
    assert small.logits == 0
    kept, gradient, chunk = 1000 * 60_000 * 2, 60_000 * 64 * 4, 1000 * 16_384 * 4
    assert kept + gradient < large.logits < kept + 2 * gradient + 6 * chunk


@pytest.mark.slow
@pytest.mark.usefixtures("computed_whole")
def test_longer_rows_take_more_and_computing_again_less(tmp_path: Path) -> None:
    """As a person expects who turns these settings."""
    shape = shape_of(FAMILIES["qwen3"], tmp_path)
    row = RowShape(num_tokens=1200, num_prompt_tokens=200, num_image_tokens=0, num_responses=3)
    longer = RowShape(num_tokens=2400, num_prompt_tokens=200, num_image_tokens=0, num_responses=3)
    plain = total_bytes(shape, row, **SETTINGS)
    assert total_bytes(shape, longer, **SETTINGS) > plain
    assert total_bytes(shape, row, **SETTINGS | {"gradient_checkpointing": True}) < plain


@pytest.mark.usefixtures("computed_whole")
def test_tokens_that_travel_take_more(tmp_path: Path) -> None:
    """They have copies on both sides, of which each layer keeps one until its way back."""
    shape = shape_of(FAMILIES["qwen3_moe"], tmp_path)
    row = RowShape(num_tokens=1200, num_prompt_tokens=200, num_image_tokens=0, num_responses=3)
    copies = 2 * 1200 * 2 * 64  # bytes, tokens, experts of each, hidden size
    plain = total_bytes(shape, row, **SETTINGS)
    more = total_bytes(shape, row, **SETTINGS | {"dispatches_tokens": True}) - plain
    assert 0 < more < 4 * copies  # kept in all three layers, both would be six


@pytest.mark.usefixtures("computed_whole")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        pytest.param("qwen3", marks=pytest.mark.variant),
        pytest.param("qwen3_vl", marks=pytest.mark.variant),
    ],
)
@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.variant)], ids=str
)
def test_ranks_that_share_a_row_take_less(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Of text almost a half or a quarter each: the embeddings of the whole row are on every rank."""
    shape = shape_of(FAMILIES[family], tmp_path)
    row = RowShape(num_tokens=4800, num_prompt_tokens=800, num_image_tokens=0, num_responses=4)
    whole, half, quarter = (
        total_bytes(shape, row, **SETTINGS | settings, sequence_parallel=size) for size in (1, 2, 4)
    )
    assert 0.45 < half / whole < 0.7
    assert 0.2 < quarter / whole < 0.5


@pytest.mark.slow
@pytest.mark.usefixtures("computed_whole")
def test_every_rank_computes_the_tower_for_the_whole_row(tmp_path: Path) -> None:
    """So a rank's part of a row of pictures is larger than of one of text."""
    shape = shape_of(random_qwen3_vl, tmp_path)
    rows = [
        RowShape(num_tokens=4800, num_prompt_tokens=4000, num_image_tokens=images, num_responses=4)
        for images in (0, 2048)
    ]
    (text, text_shared), (images, images_shared) = (
        [total_bytes(shape, row, **SETTINGS, sequence_parallel=size) for size in (1, 2)] for row in rows
    )
    assert images_shared - text_shared == pytest.approx(images - text, rel=0.2)


@pytest.mark.slow
@pytest.mark.usefixtures("computed_whole")
def test_a_frozen_tower_keeps_no_activations(tmp_path: Path) -> None:
    """Nothing goes backward through it."""
    shape = shape_of(random_qwen3_vl, tmp_path)
    frozen = {"learning_rates": (("tower", 0.0), ("merger", 0.0))}
    row = RowShape(num_tokens=1500, num_prompt_tokens=1100, num_image_tokens=1024, num_responses=3)
    assert total_bytes(shape, row, **SETTINGS | frozen) < 0.8 * total_bytes(shape, row, **SETTINGS)


@pytest.mark.slow
@pytest.mark.usefixtures("computed_whole")
def test_a_row_without_gradient(tmp_path: Path) -> None:
    """Of text, where only the tower is trained."""
    shape = shape_of(random_qwen3_vl, tmp_path)
    rates = (("*", 0.0), ("tower", 1.0))
    row = RowShape(num_tokens=1200, num_prompt_tokens=200, num_image_tokens=0, num_responses=3)
    assert 0 < total_bytes(shape, row, **SETTINGS | {"learning_rates": rates}) < total_bytes(shape, row, **SETTINGS)


@pytest.mark.usefixtures("computed_whole")
def test_shared_prompts_are_kept_for_each_response(tmp_path: Path) -> None:
    """Keys and values of the prompt are gathered for every response that sees them."""
    shape = shape_of(FAMILIES["qwen3"], tmp_path)
    row = RowShape(num_tokens=1200, num_prompt_tokens=600, num_image_tokens=0, num_responses=8)
    apart = RowShape(num_tokens=1200, num_prompt_tokens=600, num_image_tokens=0, num_responses=8, shares_prompt=False)
    gathered = 3 * 8 * 600 * 2 * 2 * 16 * 2  # layers, responses, tokens, keys and values, heads, sizes, bytes
    more = total_bytes(shape, row, **SETTINGS) - total_bytes(shape, apart, **SETTINGS)
    assert more == pytest.approx(gathered, rel=0.3)


@pytest.mark.slow
@pytest.mark.usefixtures("computed_whole")
def test_a_frozen_tower_keeps_activations_where_ranks_have_its_input_pass_on_gradients(tmp_path: Path) -> None:
    """Ranks ask transformers for it, which does so in this tower and not in Qwen3-VL's."""
    shape = shape_of(FAMILIES["qwen2_5_vl"], tmp_path)
    frozen = SETTINGS | {"learning_rates": (("tower", 0.0), ("merger", 0.0))}
    row = RowShape(num_tokens=1500, num_prompt_tokens=1100, num_image_tokens=1024, num_responses=3)
    alone, ranks = (total_bytes(shape, row, **frozen, is_sharded=is_sharded) for is_sharded in (False, True))
    assert ranks > 1.2 * alone


@pytest.mark.slow
@pytest.mark.usefixtures("computed_whole")
def test_adapters_of_the_text_keep_nothing_of_the_tower(tmp_path: Path) -> None:
    """Those of the tower too keep its activations, as if it were trained."""
    config = random_qwen3_vl().config
    config.save_pretrained(tmp_path)
    row = RowShape(num_tokens=1500, num_prompt_tokens=1100, num_image_tokens=1024, num_responses=3)
    whole, of_text, of_both = (
        total_bytes(ModelShape.read(tmp_path, lora), row, **SETTINGS)
        for lora in (LoraConfig(), LoraConfig(rank=4), LoraConfig(rank=4, targets=("text", "tower")))
    )
    assert of_text < 0.8 * whole
    assert of_text < 0.8 * of_both
