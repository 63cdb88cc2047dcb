"""Resizes images to fit between bounds on their pixels."""

import io
import math

from PIL import Image

from penstock.model.images import MAX_PIXELS, decode_image, read_sizes


def fit_pixels(data: bytes, *, min_pixels: int = 0, max_pixels: int = 0) -> bytes:
    """Scale an image to fit between the bounds: the same bytes if it already does, else a PNG.

    Args:
        data: An encoded image.
        min_pixels: Images with fewer pixels are enlarged; 0: no bound.
        max_pixels: Images with more pixels are shrunk; 0: no bound.

    Raises:
        ValueError: the bounds contradict each other, or a request's limit.
        InvalidRequestError: the image cannot be decoded, or is too large.
    """
    if not (min_pixels or max_pixels):
        return data
    if min_pixels > min(max_pixels or MAX_PIXELS, MAX_PIXELS):
        raise ValueError(f"min_pixels = {min_pixels} is above max_pixels = {max_pixels}, or {MAX_PIXELS}; lower it")
    ((width, height),) = read_sizes([data], field="image")
    num_pixels = width * height
    if max_pixels and num_pixels > max_pixels:
        scale = math.sqrt(max_pixels / num_pixels)
        size = max(1, math.floor(width * scale)), max(1, math.floor(height * scale))
    elif num_pixels < min_pixels:
        scale = math.sqrt(min_pixels / num_pixels)
        size = math.ceil(width * scale), math.ceil(height * scale)
    else:
        return data
    out = io.BytesIO()
    decode_image(data).resize(size, Image.Resampling.BICUBIC).save(out, "PNG")
    return out.getvalue()
