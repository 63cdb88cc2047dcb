"""Reads what wrapped environments answer beside messages: rewards, metrics, ends."""

import math
import numbers
from collections.abc import Mapping
from typing import Any

from penstock.errors import EnvironmentFailedError


def read_reward(value: object, where: str) -> float | None:
    """A reward; None for none.

    Raises:
        EnvironmentFailedError: it is no finite number.
    """
    if value is None:
        return None
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise EnvironmentFailedError(f"{where} = {value!r} must be a finite number, or None")
    return float(value)


def read_metrics(values: object, where: str) -> dict[str, float]:
    """The numbers among `values`, truth values as 0 and 1; texts and other things are no metrics.

    Raises:
        EnvironmentFailedError: it is no mapping.
    """
    fields = read_mapping(values, where)
    numeric = {name: float(value) for name, value in fields.items() if isinstance(value, numbers.Real)}
    return {str(name): value for name, value in numeric.items() if math.isfinite(value)}


def read_mapping(value: object, where: str) -> Mapping[Any, Any]:
    """A mapping; None for an empty one.

    Raises:
        EnvironmentFailedError: it is something else.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise EnvironmentFailedError(f"{where} = {value!r} must be a dict")
    return value


def open_images(images: tuple[bytes, ...]) -> list[Any]:
    """The task's images as PIL images, as the data sets of these libraries hold them."""
    import io

    from PIL import Image

    return [Image.open(io.BytesIO(image)) for image in images]
