"""Geometry with a magnifier: the policy may enlarge parts of the picture before it answers.

Invariant: no tool knows the answer. Boxes always refer to the original picture, never to a crop, and the reward comes
from the final answer alone.
"""

import asyncio
import io
import math
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

from PIL import Image

from penstock.environments import Observation, Task, Tool, ToolEnvironment, ToolError, ToolResult
from penstock.environments.tools import shorten
from penstock.errors import InvalidRequestError
from penstock.model.images import decode_image
from services.rollout.worker.environments.built_in import BuiltIn
from services.rollout.worker.environments.named_tools import make_tools

Unit: TypeAlias = Literal["fraction", "thousandth"]
"""Unit of a box's coordinates: 0 to 1, or 0 to 1000 as Qwen3-VL writes them."""

_FULL: Final[dict[Unit, int]] = {"fraction": 1, "thousandth": 1000}
_MIN_EDGE: Final = 0.02
"""Minimum edge of a box, as a fraction of the picture's."""
_MAX_ASPECT: Final = 100
"""Maximum ratio of a crop's edges: image processors refuse strips beyond 200."""
_MIN_PIXELS: Final = 32 * 32
_MAX_SHOWN: Final = 120
_GREY: Final = (128, 128, 128)


class Geo3kZoom(BuiltIn, ToolEnvironment):
    """Shows the row and the tool `zoom`."""

    def __init__(
        self,
        *,
        unit: Unit = "fraction",
        max_pixels: int = 1_048_576,
        tools: Sequence[str] = (),
        max_calls_per_turn: int = 4,
        max_turns: int | None = None,
        show_tools: bool = True,
        blank: bool = False,
    ) -> None:
        """Play one episode.

        Args:
            unit: The unit of all boxes.
            max_pixels: Maximum pixels of an enlarged crop.
            tools: Further tools by name, see `named_tools`.
            max_calls_per_turn: As in `ToolEnvironment`.
            max_turns: As in `ToolEnvironment`.
            show_tools: As in `ToolEnvironment`.
            blank: Give grey pictures in place of the enlarged parts, to measure what the policy owes to them.

        Raises:
            ValueError: an argument is out of range.
        """
        if unit not in _FULL:
            raise ValueError(f"unit = {unit!r} must be one of {', '.join(get_args(Unit))}")
        if max_pixels < _MIN_PIXELS:
            raise ValueError(f"max_pixels = {max_pixels} must be at least {_MIN_PIXELS}")
        super().__init__(
            make_tools(tools), max_calls_per_turn=max_calls_per_turn, max_turns=max_turns, show_tools=show_tools
        )
        self._unit: Unit = unit
        self._max_pixels = max_pixels
        self._is_blank = blank
        self._images: tuple[bytes, ...] = ()

    async def reset(self, task: Task) -> Observation:
        """Return the row and its tools.

        Raises:
            InvalidRequestError: the row has no picture.
        """
        if not task.images:
            raise InvalidRequestError(
                "environment geo3k_zoom got a row without a picture; give it rows with one, or let text rows have "
                'another environment, such as "calculator"'
            )
        self._images = task.images
        schema = _schema(self._unit, len(task.images))
        self.add_tool(Tool(name="zoom", description=_DESCRIPTION, parameters=schema, function=self._zoom))
        return await super().reset(task)

    async def _zoom(self, bbox_2d: list[float], image: float = 1) -> ToolResult:
        box = _checked(bbox_2d, self._unit)
        png, size = await asyncio.to_thread(self._enlarge, self._images[int(image) - 1], box)
        which = f"picture {int(image)}" if len(self._images) > 1 else "the picture"
        shown = ", ".join(f"{value:g}" for value in bbox_2d)
        return ToolResult(text=f"Part [{shown}] of {which}, as {size[0]} x {size[1]} pixels:", images=(png,))

    def _enlarge(self, picture: bytes, box: tuple[float, float, float, float]) -> tuple[bytes, tuple[int, int]]:
        """Return the part as a PNG file, and its size."""
        part = _crop(picture, box, self._max_pixels)
        return _to_png(Image.new("RGB", part.size, _GREY) if self._is_blank else part), part.size


_DESCRIPTION = (
    "Enlarges a part of the original picture. Boxes always refer to the original picture, also after an earlier zoom."
)


def _schema(unit: Unit, num_images: int) -> dict[str, Any]:
    """Return the schema of the arguments; it asks which picture only if there are several."""
    full = _FULL[unit]
    box = {
        "type": "array",
        "items": {"type": "number"},
        "minItems": 4,
        "maxItems": 4,
        "description": f"Left, top, right and bottom, each from 0 to {full}: 0 is the picture's left or top edge, "
        f"{full} its right or bottom edge.",
    }
    which = {
        "type": "integer",
        "minimum": 1,
        "maximum": num_images,
        "description": f"Which picture, from 1 to {num_images}, in their order.",
    }
    several = num_images > 1
    return {
        "type": "object",
        "properties": {"bbox_2d": box, **({"image": which} if several else {})},
        "required": ["bbox_2d", *(["image"] if several else [])],
        "additionalProperties": False,
    }


def _checked(given: Sequence[float], unit: Unit) -> tuple[float, float, float, float]:
    """Return the box in fractions of the picture.

    Raises:
        ToolError: the box is not a part of a picture; the text says how to correct it.
    """
    full = _FULL[unit]
    shown = f"bbox_2d = {shorten(str(list(given)), _MAX_SHOWN)}"
    if min(given) < 0 or max(given) > full:
        raise ToolError(f"{shown} is outside: write left, top, right, bottom from 0 to {full}, not in any other unit")
    if unit == "thousandth" and 0 < max(given) <= 1:
        raise ToolError(f"{shown} looks like fractions: write left, top, right, bottom from 0 to {full}")
    left, top, right, bottom = (value / full for value in given)
    if left >= right or top >= bottom:
        raise ToolError(
            f"{shown} is reversed or empty: write left, top, right, bottom, with left < right, top < bottom"
        )
    if min(right - left, bottom - top) < _MIN_EDGE - 1e-9:  # 0.12 - 0.1 is a little less than 0.02
        raise ToolError(f"{shown} is too small: each edge must be at least {_MIN_EDGE * full:g}")
    return left, top, right, bottom


def _crop(data: bytes, box: tuple[float, float, float, float], max_pixels: int) -> Image.Image:
    """Crop the part and enlarge it to the picture's own long edge, or less if that has too many pixels.

    Raises:
        ToolError: the part is a strip that image processors refuse.
        InvalidRequestError: the file is damaged, or has too many pixels to be decoded.
    """
    picture = decode_image(data)
    left, top = math.floor(box[0] * picture.width), math.floor(box[1] * picture.height)
    right, bottom = math.ceil(box[2] * picture.width), math.ceil(box[3] * picture.height)
    width, height = right - left, bottom - top
    if max(width, height) > _MAX_ASPECT * min(width, height):
        raise ToolError(f"a part of {width} x {height} pixels is too narrow: make its short edge longer")
    scale = min(max(picture.size) / max(width, height), math.sqrt(max_pixels / (width * height)))
    size = (max(1, int(width * scale + 1e-6)), max(1, int(height * scale + 1e-6)))
    return picture.crop((left, top, right, bottom)).resize(size, Image.Resampling.BICUBIC)


def _to_png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()
