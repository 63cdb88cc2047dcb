"""The arithmetic of rows is that of the products which torch computes for them."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers.vision_utils import get_vision_window_index

from penstock.weights.adapter_names import is_adapter
from services.trainer.backend.policy.adapters import add_adapters
from services.trainer.backend.policy.attention import RowLayout
from services.trainer.backend.policy.model import PolicyModel
from services.trainer.backend.policy.model_flops import ModelFlops, PassFlops, model_flops
from services.trainer.batching.packing import pack
from services.trainer.batching.product_counts import ProductCounts
from services.trainer.batching.rows import build_row
from services.trainer.batching.sequences import GroupReader, TrainSequence, open_reader
from services.trainer.checks.parameter_patterns import matches
from services.trainer.config import LoraConfig
from tests.support.trainer.families import (
    FULL_FAMILIES,
    random_qwen3,
    random_qwen3_5_text,
    random_qwen3_vl,
    write_model,
)
from tests.support.trainer.groups import IMAGES, make_group, num_placeholders, picture
from tests.support.trainer.ranks.ranked_groups import groups_of

NOTHING = PassFlops(token=0, pair=0, own_token=0, patch=0, patch_pair=0)
ALL = "*"


def of_grouped_products(one: Any, other: Any, *_: Any, **__: Any) -> int:
    """Operations of a product of each expert's tokens, which torch counts on GPUs alone."""
    return 2 * one[-2] * one[-1] * other[-1]


def counted() -> FlopCounterMode:
    """Counts every product, those of attention included."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: of_grouped_products})


def computed_pairs(sequences: Sequence[TrainSequence], row: Any) -> int:
    """Pairs of the row that are computed on a CPU: rectangles, half of which a mask hides."""
    buckets = RowLayout(build_row(sequences, row).segments, torch.device("cpu")).buckets
    return sum(bucket.query_tokens_SQ.numel() * bucket.key_tokens_SK.shape[1] for bucket in buckets)


@pytest.mark.parametrize(
    ("family", "trained"),
    [
        *((family, ALL) for family in FULL_FAMILIES),
        ("qwen3_vl", "tower"),
        ("qwen3_vl", "merger"),
        ("qwen3_vl", "text"),
        ("qwen2_5_vl", "head"),
    ],
)
def test_a_model_multiplies_what_torch_counts(family: str, trained: str, tmp_path: Path) -> None:
    """Forward and backward, to the last operation, but for the pixels' gradient, which torch leaves out."""
    model = FULL_FAMILIES[family]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(matches(name, trained))
    path = write_model(model, tmp_path / "model")
    sequences = groups_of(path)[0].sequences
    [row] = pack(sequences, [0] * 4, range(4), max_tokens=1000, share_prompts=True)
    counts = ProductCounts.of([row], sequences)
    as_computed = replace(counts, pairs=computed_pairs(sequences, row))
    flops = model_flops(model)
    policy = PolicyModel(model, temperature=1.0, forbidden_ids=())
    with sdpa_kernel(SDPBackend.MATH), counted() as forward:
        output = policy(build_row(sequences, row))
    assert forward.get_total_flops() == flops.of(as_computed, with_gradient=False)
    with sdpa_kernel(SDPBackend.MATH), counted() as backward:
        (output.logprobs_N.sum() + output.entropy_N.sum()).backward()
    of_pixels = 0
    if counts.grids and trained in (ALL, "tower"):
        [grid] = counts.grids
        of_pixels = 2 * grid[1] * grid[2] * model.base_model.visual.patch_embed.proj.weight.numel()
    assert backward.get_total_flops() + of_pixels == flops.of(as_computed, num_forward=0, with_gradient=True)


@pytest.mark.parametrize("trained", ["text", "head"])
def test_linear_attention_multiplies_states_and_no_pairs(trained: str) -> None:
    """By hand: three of four layers have 4 states of 16 x 16, and the fourth attends with 4 heads of 32."""
    model = random_qwen3_5_text()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(matches(name, trained))
    matrices = sum(each.numel() for each in model.model.layers.parameters() if each.ndim >= 2)
    flops, of_states, is_whole = model_flops(model), 3 * 4 * 6 * 16 * 16, trained == "text"
    assert flops.forward.token == 2 * matrices + of_states
    assert flops.forward.pair == 4 * 4 * 32
    assert flops.backward.token == (2 * flops.forward.token if is_whole else 0)
    assert flops.backward.pair == (2 * flops.forward.pair if is_whole else 0)


def test_adapters_multiply_what_torch_counts(tmp_path: Path) -> None:
    """But for what is merged, once in each direction, and the gradient of the first layer's inputs."""
    model = random_qwen3()
    path = write_model(model, tmp_path / "model")
    add_adapters(model, LoraConfig(rank=4, targets=("text",)))
    sequences = groups_of(path)[0].sequences
    [row] = pack(sequences, [0] * 4, range(4), max_tokens=1000, share_prompts=True)
    counts = ProductCounts.of([row], sequences)
    as_computed = replace(counts, pairs=computed_pairs(sequences, row))
    flops = model_flops(model)
    policy = PolicyModel(model, temperature=1.0, forbidden_ids=())
    with sdpa_kernel(SDPBackend.MATH), counted() as forward:
        output = policy(build_row(sequences, row))
    with sdpa_kernel(SDPBackend.MATH), counted() as backward:
        output.logprobs_N.sum().backward()
    weights = dict(model.named_parameters())
    adapted = [name.removesuffix(".lora_A.weight") for name in weights if name.endswith(".lora_A.weight")]
    merging = sum(2 * 4 * weights[f"{layer}.weight"].numel() for layer in adapted)
    first = [weights[f"model.layers.0.self_attn.{each}_proj.weight"].numel() for each in "qkv"]
    merging_backward = merging - 2 * 4 * sum(first)
    assert forward.get_total_flops() == flops.of(as_computed, with_gradient=False) + merging
    assert backward.get_total_flops() == (
        flops.of(as_computed, num_forward=0, with_gradient=True) + merging_backward - 2 * counts.tokens * sum(first)
    )
    assert not any(is_adapter(name) == (not weight.requires_grad) for name, weight in weights.items())


@pytest.fixture(scope="module")
def reader(tiny_model_path: Path) -> GroupReader:
    """Of the tiny model."""
    return open_reader(tiny_model_path)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.booleans(), st.integers(0, 2))
def test_rows_are_counted_as_they_are_built(
    tiny_model_path: Path, reader: GroupReader, lengths: list[int], shares: bool, num_images: int
) -> None:
    """Tokens, and pairs under the row's whole mask; an image once in a row; no padding."""
    images = [picture(number) for number in range(num_images)]
    shown = [*images, *images[:1]]
    rewards, placeholders = [0.0] * len(lengths), [num_placeholders((96, 96))] * len(shown)
    group = make_group(tiny_model_path, rewards=rewards, own_lengths=lengths, images=shown, placeholders=placeholders)
    sequences = reader.read(group, IMAGES).sequences
    plan = pack(sequences, [0] * len(lengths), range(len(lengths)), max_tokens=150, share_prompts=shares)
    rows = [build_row(sequences, row, length=256) for row in plan]
    pairs = 0
    for row in rows:
        sees_TT = torch.zeros(row.num_tokens, row.num_tokens, dtype=torch.bool)
        for each in (each for each in row.segments if each.start < row.num_tokens):
            sees_TT[each.start : each.stop, each.prefix_start : each.prefix_stop] = True
            sees_TT[each.start : each.stop, each.start : each.stop].fill_(True).tril_()
        pairs += int(sees_TT.sum())
    counts = ProductCounts.of(plan, sequences)
    assert counts.pairs == pairs
    assert counts.tokens == sum(row.num_tokens for row in rows)
    assert counts.own_tokens == sum(row.num_own_tokens for row in rows) == sum(lengths)
    grids = Counter(tuple(grid.tolist()) for row in rows if row.grid_thw_U3 is not None for grid in row.grid_thw_U3)
    assert counts.grids == grids
    assert grids.total() == num_images * len(rows)


@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 12))
def test_patches_attend_in_their_window_or_image(frames: int, height: int, width: int) -> None:
    """As transformers divides an image: in windows of 4 x 4 tokens of 2 x 2 patches in one layer of two."""
    grid = (frames, 2 * height, 2 * width)
    _, cu_windows = get_vision_window_index(torch.tensor([grid]), 2, 112, 14)
    in_windows = sum((stop - start) ** 2 for start, stop in itertools.pairwise(cu_windows.tolist()))
    in_image = frames * (4 * height * width) ** 2
    flops = ModelFlops(forward=replace(NOTHING, patch_pair=1), backward=NOTHING, tower_windows=(8, 0))
    counts = ProductCounts(tokens=0, pairs=0, own_tokens=0, grids={grid: 3})
    assert flops.of(counts, with_gradient=True) == 3 * (in_windows + in_image)


def test_adapters_that_are_frozen_have_no_backward_pass() -> None:
    """As those of the tower with a learning rate of 0."""
    model = random_qwen3_vl()
    add_adapters(model, LoraConfig(rank=4, targets=("text", "tower")))
    trained = model_flops(model)
    assert trained.backward.patch > 0
    model.model.visual.requires_grad_(False)
    assert model_flops(model) == replace(trained, backward=replace(trained.backward, patch=0, patch_pair=0))


def test_what_comes_before_the_first_trained_part_has_no_backward_pass() -> None:
    """A frozen tower is computed forwards alone; a frozen text layer passes gradients on, but has none of its own."""
    model = random_qwen3_vl()
    whole = model_flops(model)
    assert whole.backward == PassFlops(
        token=2 * whole.forward.token,
        pair=2 * whole.forward.pair,
        own_token=2 * whole.forward.own_token,
        patch=2 * whole.forward.patch,
        patch_pair=2 * whole.forward.patch_pair,
    )
    model.model.visual.requires_grad_(False)
    assert model_flops(model).backward == replace(whole.backward, patch=0, patch_pair=0)
    model.requires_grad_(False)
    model.model.visual.requires_grad_(True)
    assert model_flops(model).backward == replace(
        whole.backward, token=whole.forward.token, own_token=whole.forward.own_token
    )
