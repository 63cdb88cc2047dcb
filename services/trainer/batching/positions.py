"""Positions of the tokens of one sample, as the Qwen-VL families count them.

Legend: X = tokens of a sample with placeholders expanded, R = the three axes of rotary positions.

A model has two notions of position. The *text position* is the token's place in its sample. The *rotary position* has
three axes, time, height and width (M-RoPE, Wang et al. 2024, "Qwen2-VL", section 2.1): all equal on text, and on an
image the place of the patch in its grid. Text after an image continues after the image's longer side, so an image of
many tokens uses few positions.

Invariant: equal to transformers' `get_rope_index` on the same sample. A position depends only on the tokens before it,
so a sample's positions stay right when its first tokens are computed once for a whole group.
"""

import math
from collections.abc import Sequence

import numpy as np

NUM_AXES = 4
"""Text position, then time, height and width of the rotary position."""


def sample_positions(
    image_mask_X: np.ndarray, grids: Sequence[tuple[int, int, int]], num_placeholders: Sequence[int]
) -> np.ndarray:
    """Return int64[4, X]: the text position, then the rotary position in time, height and width.

    Args:
        image_mask_X: bool[X]: placeholders. Two images never touch; the reader rejects samples where they do.
        grids: Patches of each image in time, height and width, in order of their placeholders. Neighbouring patches
            are merged into one placeholder, the same number along height and width.
        num_placeholders: Placeholder tokens of each image.

    Raises:
        ValueError: the mask's runs do not match the images' placeholders.
    """
    num_tokens = len(image_mask_X)
    edges = np.flatnonzero(np.diff(image_mask_X.astype(np.int8), prepend=0, append=0))
    starts, stops = edges[::2].tolist(), edges[1::2].tolist()
    if [stop - start for start, stop in zip(starts, stops, strict=True)] != list(num_placeholders):
        raise ValueError(f"runs of placeholders at {starts} to {stops} are not images of {list(num_placeholders)}")

    rotary_RX = np.empty((3, num_tokens), dtype=np.int64)
    token, position = 0, 0
    for start, stop, grid in zip(starts, stops, grids, strict=True):
        rotary_RX[:, token:start] = np.arange(position, position + start - token)
        position += start - token
        time, height, width = _merged(grid, stop - start)
        rotary_RX[:, start:stop] = position + np.indices((time, height, width)).reshape(3, -1)
        token, position = stop, position + max(height, width)
    rotary_RX[:, token:] = np.arange(position, position + num_tokens - token)
    return np.concatenate([np.arange(num_tokens)[None], rotary_RX])


def _merged(grid: tuple[int, int, int], num_placeholders: int) -> tuple[int, int, int]:
    """Return the grid of placeholders: patches are merged along height and width, never in time."""
    time, height, width = grid
    side = math.isqrt(time * height * width // num_placeholders)
    return time, height // side, width // side
