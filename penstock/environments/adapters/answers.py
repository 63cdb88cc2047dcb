"""Reads the answers of wrapped environments other than messages: rewards, metrics, ends."""

import math
import numbers
from collections.abc import Mapping
from typing import Any

from penstock.errors import EnvironmentFailedError


def read_reward(value: object, where: str) -> float | None:
    """Return a reward; None if there is none.

    Raises:
        EnvironmentFailedError: it is not a finite number.
    """
    if value is None:
        return None
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise EnvironmentFailedError(f"{where} = {value!r} must be a finite number, or None")
    return float(value)


def read_metrics(values: object, where: str) -> dict[str, float]:
    """Return the numbers among `values`, with truth values as 0 and 1; other values are not metrics.

    Raises:
        EnvironmentFailedError: it is not a mapping.
    """
    fields = read_mapping(values, where)
    numeric = {name: float(value) for name, value in fields.items() if isinstance(value, numbers.Real)}
    return {str(name): value for name, value in numeric.items() if math.isfinite(value)}


def read_mapping(value: object, where: str) -> Mapping[Any, Any]:
    """Return a mapping; None for an empty one.

    Raises:
        EnvironmentFailedError: it is something else.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise EnvironmentFailedError(f"{where} = {value!r} must be a dict")
    return value


def open_images(images: tuple[bytes, ...]) -> list[Any]:
    """Return the task's images as PIL images, the form in which these libraries' data sets hold them."""
    import io

    from PIL import Image

    return [Image.open(io.BytesIO(image)) for image in images]
