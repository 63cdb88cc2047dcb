"""Reads the answers of wrapped environments other than messages: rewards, metrics, ends."""

import numbers
from collections.abc import Mapping
from typing import Any

from penstock.errors import EnvironmentFailedError
from penstock.runtime.numbers import finite_float, shown


def read_reward(value: object, where: str) -> float | None:
    """Return a reward; None if there is none.

    Raises:
        EnvironmentFailedError: it is not a finite number.
    """
    if value is None:
        return None
    reward = finite_float(value) if isinstance(value, numbers.Real) else None
    if reward is None:
        raise EnvironmentFailedError(f"{where} = {shown(value)} must be a finite number, or None")
    return reward


def read_metrics(values: object, where: str) -> dict[str, float]:
    """Return the numbers among `values`, with truth values as 0 and 1; other values are not metrics.

    Raises:
        EnvironmentFailedError: it is not a mapping.
    """
    fields = read_mapping(values, where)
    numeric = {name: finite_float(value) for name, value in fields.items() if isinstance(value, numbers.Real)}
    return {str(name): value for name, value in numeric.items() if value is not None}


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

    from penstock.model.images import FORMATS

    return [Image.open(io.BytesIO(image), formats=FORMATS) for image in images]
