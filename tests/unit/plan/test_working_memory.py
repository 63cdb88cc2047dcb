"""What a row takes, counted on tensors without memory: as on real ones, and as torch's own tracker counts it."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from penstock.errors import ConfigError
from services.plan import working_memory
from services.plan.adapter_shape import AdapterShape
from services.plan.linear_attention import few_steps
from services.plan.live_bytes import LiveBytes
from services.plan.model_shape import ModelShape, make_model
from services.plan.shapes_only import ShapesOnly
from services.plan.working_memory import RowShape, make_row
from services.trainer.backend.policy.model import PolicyModel
from services.trainer.batching.rows import PackedRow
from services.trainer.config import LoraConfig
from tests.support.trainer.families import FAMILIES, LINEAR_FAMILIES, MIXTURES, random_qwen3_vl
from tests.support.trainer.torchs_tracker import beside_weights, tracking_beside

ROW = RowShape(num_tokens=300, num_prompt_tokens=80, num_image_tokens=64, num_responses=3)
LINEAR_ROW = RowShape(num_tokens=600, num_prompt_tokens=100, num_image_tokens=0, num_responses=2)
ONE_SAMPLE = RowShape(num_tokens=2048, num_prompt_tokens=1, num_image_tokens=0, num_responses=1, shares_prompt=False)
"""Of 32 chunks."""
A_GROUP = RowShape(num_tokens=3000, num_prompt_tokens=1400, num_image_tokens=0, num_responses=2)
COUNTED_BELOW = ("qwen3_vl", "qwen3", "qwen3_moe")
"""Families that other tests of this file count."""
ATTENTION: dict[str, Any] = {"hidden_size": 2048, "head_dim": 128, "vocab_size": 151936}
TEXT_2B = ATTENTION | {"intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8}
"""Qwen3-VL-2B's."""
TEXT_30B_A3B = ATTENTION | {
    "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
    "num_experts_per_tok": 8,
}  # fmt: skip
"""Qwen3-VL-30B-A3B's."""
TEXT_235B_A22B = TEXT_30B_A3B | {"hidden_size": 4096, "moe_intermediate_size": 1536, "num_attention_heads": 64}
"""Qwen3-VL-235B-A22B's."""
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
AGAIN = {"gradient_checkpointing": True}


def total_bytes(shape: ModelShape, row: RowShape, **settings: Any) -> int:
    """The most bytes that the row takes at a time."""
    return working_memory.working_bytes(shape, row, **settings).total


def shape_of(make: Callable[[], Any], folder: Path, **text: Any) -> ModelShape:
    """Of a small model's config, with other settings of its text if given."""
    config = make().config
    for name, value in text.items():
        setattr(config.get_text_config(), name, value)
    config.save_pretrained(folder)
    return ModelShape.read(folder)


@pytest.fixture
def computed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are computed with all of their layers, at once, instead of thrice with a few."""
    monkeypatch.setattr(working_memory, "NUM_LAYERS", 6)
    monkeypatch.setattr(working_memory, "NUM_BLOCKS", 7)


def backward_peak(policy: PolicyModel, row: PackedRow, mode: contextlib.AbstractContextManager[Any]) -> int:
    """Most bytes that exist at a time in a pass over `row`, without the policy's own weights and the row's pixels."""
    live = LiveBytes()
    pixels = () if row.pixel_values_PD is None else (row.pixel_values_PD,)
    for tensor in (*policy.parameters(), *policy.buffers(), *pixels):
        live.leave_out(tensor)
    with mode, live, torch.autocast("cpu", torch.bfloat16):
        policy(row).logprobs_N.sum().backward()
    return live.peak


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Module is None")
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3", "qwen3_5", "qwen3_5_text"])
def test_tensors_without_memory_take_what_real_ones_take(family: str) -> None:
    """At the same moment as many bytes, to a thousandth, which torch's tracker confirms."""
    config = FAMILIES[family]().config
    row = make_row(ROW, config)

    def peak(mode: contextlib.AbstractContextManager[Any], building: contextlib.AbstractContextManager[Any]) -> int:
        with building:
            policy = PolicyModel(make_model(config), temperature=1.0, forbidden_ids=())
        return backward_peak(policy, row, mode)

    shapes_only = ShapesOnly()
    imagined = peak(shapes_only, shapes_only.without_numbers())
    real = peak(contextlib.nullcontext(), contextlib.nullcontext())
    assert imagined == pytest.approx(real, rel=1e-3)
    policy = PolicyModel(make_model(config), temperature=1.0, forbidden_ids=())
    tracker = MemTracker()
    tracker.track_external(policy)
    with tracker, torch.autocast("cpu", torch.bfloat16):
        policy(row).logprobs_N.sum().backward()
    pixels = 0 if row.pixel_values_PD is None else row.pixel_values_PD.nbytes
    assert real + pixels == pytest.approx(beside_weights(tracker), rel=1e-2)


@pytest.mark.slow
@pytest.mark.usefixtures("computed_whole")
@pytest.mark.filterwarnings("ignore:Expected a tensor or a traceable wrapper-subclass", "ignore:Module is None")
@pytest.mark.parametrize(
    ("family", "text", "settings"),
    [
        pytest.param("qwen3", TEXT_2B, {}, id="2B"),
        pytest.param("qwen3_moe", TEXT_30B_A3B, AGAIN, id="30B-A3B, computed again"),
        pytest.param("qwen3_moe", TEXT_235B_A22B, AGAIN, marks=pytest.mark.variant, id="235B-A22B, computed again"),
        pytest.param(
            "qwen3_moe",
            TEXT_235B_A22B,
            AGAIN | {"dispatches_tokens": True},
            marks=pytest.mark.variant,
            id="235B-A22B, computed again, experts divided",
        ),
        pytest.param("qwen3_5_text", LINEAR_9B, {}, id="Qwen3.5-9B"),
        pytest.param("qwen3_5_text", LINEAR_9B, AGAIN, id="Qwen3.5-9B, computed again"),
    ],
)
def test_torchs_tracker_counts_as_much(
    family: str, text: dict[str, Any], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In rows of 8,192 tokens, with published widths and a few layers: on tensors without memory it counts the same."""
    tracker = tracking_beside(monkeypatch)
    row = RowShape(num_tokens=8192, num_prompt_tokens=2048, num_image_tokens=0, num_responses=8)
    shape = shape_of(FAMILIES[family], tmp_path, **text)
    counted = total_bytes(shape, row, **SETTINGS | settings)
    assert counted == pytest.approx(beside_weights(tracker), rel=1e-3)


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
        working_memory.working_bytes(shape_of(FAMILIES["qwen3"], tmp_path, **sizes), row, **SETTINGS)
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
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3"])
def test_adapters_without_memory_take_what_real_ones_take(family: str) -> None:
    """Over a base in bfloat16, of which no gradient is made; merged matrices are there for a moment only."""
    config = FAMILIES[family]().config
    row = make_row(ROW, config)

    def peak(mode: contextlib.AbstractContextManager[Any], building: contextlib.AbstractContextManager[Any]) -> int:
        with building:
            policy = PolicyModel(make_model(config, torch.bfloat16), temperature=1.0, forbidden_ids=())
            AdapterShape.add(policy.model, LoraConfig(rank=4))
        return backward_peak(policy, row, mode)

    shapes_only = ShapesOnly()
    imagined = peak(shapes_only, shapes_only.without_numbers())
    assert imagined == pytest.approx(peak(contextlib.nullcontext(), contextlib.nullcontext()), rel=1e-3)


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
