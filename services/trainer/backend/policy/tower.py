"""The vision tower over the different images of a row.

Whatever transformers derives from the images' sizes (positions, offsets, windows) is derived on the host. On a GPU,
each block would have to wait until the GPU has done all that is queued, only to read how long the images are.

Legend: T = patches of a row's different images, H = attention heads, D = head dimension, J = placeholders, W = hidden
size of the text, U = different images.
"""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from services.trainer.backend.policy import varlen
from services.trainer.batching.rows import PackedRow
from services.trainer.batching.to_device import to_device

NAME = "penstock_flash_tower"
"""Name of `tower_attention` in transformers, which gives offsets of images to functions with "flash" in their name; to
others it gives one image after the other."""
NAME_IN_COMPILED = f"{NAME}_in_compiled"
"""The same function in blocks that are compiled."""


class ImageFeatures(NamedTuple):
    """What the language model sees of a row's images."""

    features_JW: torch.Tensor
    """In place of the placeholders' embeddings."""
    deepstack: tuple[torch.Tensor, ...]
    """[J, W] for each of the first layers, which add it to the placeholders' hidden states; empty without deepstack."""


def use_tower_attention(tower: Any, *, is_compiled: bool = False) -> None:
    """Make the vision model of a Qwen model of transformers attend with `tower_attention`.

    Args:
        tower: The vision model.
        is_compiled: Whether its blocks will be compiled.
    """
    from transformers import AttentionInterface

    chosen, function = NAME, tower_attention
    if is_compiled:  # the images' calls, of which each row has another number, would be compiled for each number
        chosen = NAME_IN_COMPILED
        function = partial(tower_attention, elsewhere=torch.compiler.disable(attend_one_by_one))
    AttentionInterface.register(chosen, function)
    # Chosen for the whole model, transformers would look for a package of this name.
    config = copy.copy(tower.config)
    config._attn_implementation = chosen
    for block in tower.blocks:
        block.attn.config = config


def image_features(tower: Any, row: PackedRow) -> ImageFeatures:
    """Run the tower once per different image, and repeat its features for each occurrence.

    Args:
        tower: The vision model of a Qwen model of transformers.
        row: A row with images.
    """
    pixels_TD, grid_thw_U3 = row.pixel_values_PD, row.grid_thw_U3
    assert pixels_TD is not None
    assert grid_thw_U3 is not None
    output = tower(
        pixels_TD.to(tower.dtype), grid_thw=grid_thw_U3, return_dict=True, **_inputs(tower, grid_thw_U3, pixels_TD)
    )
    sizes = (grid_thw_U3.prod(1) // tower.spatial_merge_size**2).tolist()
    deepstack = getattr(output, "deepstack_features", None) or ()
    features, *of_layers = (_repeated(each, sizes, row.image_numbers_I) for each in (output.pooler_output, *deepstack))
    return ImageFeatures(features, tuple(of_layers))


def _inputs(tower: Any, grid_thw_U3: torch.Tensor, pixels_TD: torch.Tensor) -> dict[str, Any]:
    """Return what transformers would derive from the sizes, under the keywords by which it takes them."""
    from transformers.vision_utils import (
        get_vision_cu_seqlens,
        get_vision_interpolation_indices_and_weights,
        get_vision_position_ids,
        get_vision_window_index,
    )

    cu_seqlens = get_vision_cu_seqlens(grid_thw_U3)
    tensors = {"position_ids": get_vision_position_ids(grid_thw_U3, tower.spatial_merge_size), "cu_seqlens": cu_seqlens}
    lengths = {"max_seqlen": _longest(cu_seqlens)}
    if hasattr(tower, "num_grid_per_side"):
        tensors["interp_indices"], tensors["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grid_thw_U3,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=tower.spatial_merge_size,
        )
    if hasattr(tower, "window_size"):
        tensors["window_index"], tensors["cu_window_seqlens"] = get_vision_window_index(
            grid_thw_U3, tower.spatial_merge_size, tower.window_size, tower.patch_size
        )
        lengths["max_window_seqlen"] = _longest(tensors["cu_window_seqlens"])
    return {name: to_device(tensor, pixels_TD.device) for name, tensor in tensors.items()} | lengths


def _longest(cu_seqlens: torch.Tensor) -> int:
    return int(cu_seqlens.diff().max())


def _repeated(features: torch.Tensor, sizes: list[int], numbers: tuple[int, ...]) -> torch.Tensor:
    """Return [J, W], given the features of the different images, their sizes and the images' occurrences."""
    if numbers == tuple(range(len(sizes))):
        return features
    parts = features.split(sizes)
    return torch.cat([parts[number] for number in numbers])


def tower_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    elsewhere: Callable[..., torch.Tensor] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return [1, T, H, D] and no weights: each image, or window of it, attends to itself.

    Args:
        module: The attention layer; not used.
        query: [1, H, T, D].
        key: [1, H, T, D].
        value: [1, H, T, D].
        attention_mask: None.
        scaling: Factor on the products of queries and keys.
        cu_seq_lens_q: int32[images or windows + 1]: offset of each, then the end.
        max_length_q: Patches of the longest.
        elsewhere: Computes it elsewhere than on a GPU in half precision; None: `attend_one_by_one`.
    """
    attend = attend_in_one_call if varlen.is_usable_for(value) else elsewhere or attend_one_by_one
    return attend(query, key, value, scaling, cu_seq_lens_q, max_length_q), None


def attend_in_one_call(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, cu_segments: torch.Tensor, longest: int
) -> torch.Tensor:
    """Return [1, T, H, D]; arguments as of `tower_attention`."""
    query, key, value = (each[0].transpose(0, 1).to(value.dtype) for each in (query, key, value))
    return varlen.attend_within(query, key, value, scaling, cu_segments, longest)[None]


def attend_one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    cu_segments: torch.Tensor,
    _longest: int,
) -> torch.Tensor:
    """Return [1, T, H, D], one call for each image or window; arguments as of `tower_attention`."""
    outputs = [
        scaled_dot_product_attention(
            query[:, :, start:stop], key[:, :, start:stop], value[:, :, start:stop], scale=scaling
        )
        for start, stop in itertools.pairwise(cu_segments.tolist())
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2)
