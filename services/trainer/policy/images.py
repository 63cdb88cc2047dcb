"""Encoded images to the patches that the vision tower reads, exactly as the engine makes them.

Legend: P = patches of an image, D = values of a patch (channels * temporal patch * patch height * patch width).

The engine decodes with Pillow and calls `.convert("RGB")` on whatever is not RGB: alpha is dropped, not blended, and
the EXIF rotation is ignored (SGLang 0.5.23, `BaseMultimodalProcessor._load_single_item`). Then it calls the model's
own image processor. We do the same; any other decoding shows as a difference of logprobs and nothing else.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from penstock.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImagePatches:
    """One image, ready for the vision tower."""

    pixel_values_PD: torch.Tensor
    """float32[P, D]."""
    grid_thw: tuple[int, int, int]
    """Patches in time, height and width; their product is P."""
    num_placeholders: int
    """Placeholder tokens that stand for the image in the expanded prompt."""


class ImagePatcher:
    """Makes patches with the image processor of a model folder."""

    def __init__(self, model_path: Path) -> None:
        """Load the processor; nothing else of the model is read."""
        from transformers import AutoImageProcessor

        self._processor: Any = AutoImageProcessor.from_pretrained(model_path)
        self._merge_area = int(self._processor.merge_size) ** 2

    def __call__(self, data: bytes) -> ImagePatches:
        """Decode and cut one image.

        Raises:
            InvalidRequestError: the bytes are no image, or one that the processor refuses.
        """
        try:
            out = self._processor(images=[decode_rgb(data)], return_tensors="pt")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise InvalidRequestError(f"an image of {len(data)} bytes cannot be used: {error}") from None
        time, height, width = (int(n) for n in out["image_grid_thw"][0])
        return ImagePatches(
            pixel_values_PD=out["pixel_values"].float(),
            grid_thw=(time, height, width),
            num_placeholders=time * height * width // self._merge_area,
        )


def decode_rgb(data: bytes) -> Image.Image:
    """Return the image as the engine sees it.

    Raises:
        OSError: no image, or a truncated one (SyntaxError and ValueError for some broken ones).
    """
    image = Image.open(io.BytesIO(data))
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")
