"""Bytes counted on tensors without memory: those of real tensors, and those that torch's own tracker counts."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from services.plan.adapter_shape import AdapterShape
from services.plan.live_bytes import LiveBytes
from services.plan.model_shape import make_model
from services.plan.shapes_only import ShapesOnly
from services.plan.working_memory import RowShape, make_row
from services.trainer.backend.policy.model import PolicyModel
from services.trainer.batching.rows import PackedRow
from services.trainer.config import LoraConfig
from tests.support.plan.counting import LINEAR_9B, ROW, SETTINGS, shape_of, total_bytes
from tests.support.plan.torchs_tracker import beside_weights, tracking_beside
from tests.support.trainer.families import FAMILIES

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
AGAIN = {"gradient_checkpointing": True}


def backward_peak(policy: PolicyModel, row: PackedRow, mode: contextlib.AbstractContextManager[Any]) -> int:
    """Most bytes that exist at a time in a pass over `row`, without the policy's own weights and the row's pixels."""
    live = LiveBytes()
    pixels = () if row.pixel_values_PD is None else (row.pixel_values_PD,)
    for tensor in (*policy.parameters(), *policy.buffers(), *pixels):
        live.leave_out(tensor)
    with mode, live, torch.autocast("cpu", torch.bfloat16):
        policy(row).logprobs_N.sum().backward()
    return live.peak


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
