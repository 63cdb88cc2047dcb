"""Trigonometric functions, in degrees or radians; exact where angle and value are rational, such as sin 30°."""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import ClassVar, Final, Literal, TypeAlias

AngleUnit: TypeAlias = Literal["degrees", "radians"]

_HALF = Fraction(1, 2)
_SINES: Final[Mapping[Fraction | float, Fraction]] = {
    **{0: Fraction(0), 30: _HALF, 90: Fraction(1), 150: _HALF, 180: Fraction(0)},
    **{210: -_HALF, 270: Fraction(-1), 330: -_HALF},
}
"""By Niven's theorem, all rational sines of rational degrees."""
_TANGENTS: Final[Mapping[Fraction | float, Fraction]] = {0: Fraction(0), 45: Fraction(1), 135: Fraction(-1)}
_FUNCTIONS: Final[Mapping[str, Callable[[float], float]]] = {"sin": math.sin, "cos": math.cos, "tan": math.tan}
_INVERSES: Final[Mapping[str, Callable[[float], float]]] = {"asin": math.asin, "acos": math.acos, "atan": math.atan}
_NOTHING = 1e-15
"""A sine or cosine this small is zero: pi itself is rounded by a tenth of that."""


class Trigonometry:
    """The functions, with all angles in one unit."""

    NAMES: ClassVar[Mapping[str, int]] = {"sin": 1, "cos": 1, "tan": 1, "asin": 1, "acos": 1, "atan": 1, "atan2": 2}
    """Each function with its number of arguments."""

    def __init__(self, unit: AngleUnit) -> None:
        self._unit = unit

    def compute(self, name: str, arguments: Sequence[Fraction | float]) -> Fraction | float:
        """Return the function's value.

        Raises:
            ValueError: it has none.
        """
        if name == "atan2":
            return self._angle(math.atan2(*arguments))
        [value] = arguments
        if name in ("asin", "acos") and not -1 <= value <= 1:
            raise ValueError(f"{name} of a number that is not between -1 and 1")
        if name.startswith("a"):
            angle = self._angle(_INVERSES[name](float(value)))
            whole = Fraction(round(angle))
            if self._unit != "degrees" or not isinstance(value, Fraction) or (name == "atan" and abs(whole) == 90):
                return angle  # of an angle near 90 degrees, which has no tangent, or that nothing makes exact
            return whole if self._of_angle(name[1:], whole) == value else angle
        return self._of_angle(name, value)

    def _of_angle(self, name: str, angle: Fraction | float) -> Fraction | float:
        if self._unit == "degrees":
            angle = angle % 360
            if name == "tan" and angle in (90, 270):
                raise ValueError("tan of 90 degrees, which has no value")
            exact = {"sin": _SINES.get(angle), "cos": _SINES.get((angle + 90) % 360), "tan": _TANGENTS.get(angle % 180)}
            if isinstance(angle, Fraction) and (known := exact[name]) is not None:
                return known
            radians = math.radians(angle)
        else:
            radians = float(angle)
        if name == "tan" and abs(math.cos(radians)) < _NOTHING:
            raise ValueError("tan of a right angle, which has no value")
        value = _FUNCTIONS[name](radians)
        return 0.0 if abs(value) < _NOTHING else value

    def _angle(self, radians: float) -> float:
        return math.degrees(radians) if self._unit == "degrees" else radians
