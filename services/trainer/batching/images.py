"""Turns encoded images into the patches that the vision tower reads, exactly as the engine does.

Legend: P = patches of an image, D = values of a patch (channels * temporal patch * patch height * patch width).

Trainer and engine both decode with `penstock.model.images` and then call the model's own image processor. Any other
decoding would show up only as a difference in logprobs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.errors import ConfigError, InvalidRequestError
from penstock.model.images import decode_image


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
    """Cuts images into patches with a model's image processor."""

    def __init__(self, model_path: Path) -> None:
        """Load the image processor only.

        Raises:
            ConfigError: the folder has no image processor, or one that cannot be loaded.
        """
        from transformers import AutoImageProcessor

        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(model_path)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"model.path {str(model_path)!r}: its image processor cannot be loaded ({error}); the folder needs a "
                "preprocessor_config.json"
            ) from None
        self._merge_area = int(self._processor.merge_size) ** 2

    def __call__(self, data: bytes) -> ImagePatches:
        """Decode an image and cut it into patches.

        Raises:
            InvalidRequestError: the bytes are not an image, or the processor rejects it.
        """
        image = decode_image(data)
        try:
            out = self._processor(images=[image], return_tensors="pt")
        except ValueError as error:
            raise InvalidRequestError(f"image ({image.width} x {image.height} pixels) cannot be cut: {error}") from None
        time, height, width = (int(n) for n in out["image_grid_thw"][0])
        return ImagePatches(
            pixel_values_PD=out["pixel_values"].float(),
            grid_thw=(time, height, width),
            num_placeholders=time * height * width // self._merge_area,
        )
