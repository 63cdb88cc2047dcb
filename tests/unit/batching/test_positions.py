"""Positions: transformers' own for every arrangement of images, and independent of what comes later."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2_5_VLConfig, Qwen3VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from services.trainer.batching.positions import sample_positions
from tests.support.trainer.families import random_qwen2_vl, random_qwen3_5

MERGE = 2
grids = st.tuples(st.just(1), st.integers(1, 12), st.integers(1, 12)).map(lambda g: (g[0], g[1] * MERGE, g[2] * MERGE))
samples = st.tuples(
    st.integers(1, 9),  # text before the first image
    st.lists(st.tuples(grids, st.integers(1, 9)), max_size=4),  # each image, and the text after it
)


def tiny(config_class: Any) -> Any:
    """The smallest configuration; no weight of the model is used."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    vision = {"depth": 1, "hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    return config_class(text_config={**sizes, "num_hidden_layers": 1, "vocab_size": 8}, vision_config=vision)


MODELS = {
    "qwen3_vl": Qwen3VLModel(tiny(Qwen3VLConfig)),
    "qwen2_5_vl": Qwen2_5_VLModel(tiny(Qwen2_5_VLConfig)),
    "qwen2_vl": random_qwen2_vl().model,
    "qwen3_5": random_qwen3_5().model,
}


def arranged(sample: tuple[int, list[Any]]) -> tuple[np.ndarray, list[tuple[int, int, int]], list[int]]:
    """The placeholder mask, the grids and the placeholders of each image."""
    before, images = sample
    parts = [np.zeros(before, dtype=bool)]
    for (_, height, width), after in images:
        parts += [np.ones(height * width // MERGE**2, dtype=bool), np.zeros(after, dtype=bool)]
    return np.concatenate(parts), [grid for grid, _ in images], [int(part.sum()) for part in parts[1::2]]


@pytest.mark.parametrize("family", MODELS)
@given(samples)
def test_equal_those_of_transformers(family: str, sample: tuple[int, list[Any]]) -> None:
    """Over random grids, with and without text between; images of any shape, none at all too."""
    mask_X, shown, placeholders = arranged(sample)
    expected, _ = MODELS[family].get_rope_index(
        torch.zeros(1, len(mask_X), dtype=torch.int64),
        mm_token_type_ids=torch.from_numpy(mask_X)[None].int(),
        image_grid_thw=torch.tensor(shown) if shown else None,
    )
    positions_AX = sample_positions(mask_X, shown, placeholders)
    assert positions_AX[0].tolist() == list(range(len(mask_X)))
    assert positions_AX[1:].tolist() == expected[:, 0].tolist()


def test_an_image_counts_by_its_longer_side() -> None:
    """By hand: two tokens, an image of 2 x 3 placeholders, two tokens."""
    mask = np.array([0, 0, 1, 1, 1, 1, 1, 1, 0, 0], dtype=bool)
    _, time, height, width = sample_positions(mask, [(1, 4, 6)], [6]).tolist()
    assert time == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]
    assert height == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6]
    assert width == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]


@given(samples, st.data())
def test_later_tokens_change_nothing(sample: tuple[int, list[Any]], data: st.DataObject) -> None:
    """A sample cut after any text token has the positions that it has uncut: what lets a group share its prompt."""
    mask_X, shown, placeholders = arranged(sample)
    cut = data.draw(st.sampled_from((np.flatnonzero(~mask_X) + 1).tolist()))
    num_images = int((np.diff(mask_X[:cut].astype(int), prepend=0) == 1).sum())
    positions = sample_positions(mask_X[:cut], shown[:num_images], placeholders[:num_images])
    assert np.array_equal(positions, sample_positions(mask_X, shown, placeholders)[:, :cut])


def test_refuses_a_mask_of_other_images() -> None:
    """Else positions would be wrong in silence."""
    with pytest.raises(ValueError, match=r"at \[1\] to \[4\] are not images of \[4\]"):
        sample_positions(np.array([0, 1, 1, 1], dtype=bool), [(1, 4, 4)], [4])
