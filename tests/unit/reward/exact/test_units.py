"""Units: what is one, of what dimension, and how large."""

from fractions import Fraction

import pytest

from services.reward.exact.numbers.units import DEGREE, PERCENT, split_unit
from services.reward.exact.text.normalisation import normalise


@pytest.mark.parametrize(
    ("text", "value", "dimension", "size"),
    [
        ("12 cm", "12", {"length": 1}, "1/100"), ("12cm", "12", {"length": 1}, "1/100"),
        (r"12\ \mathrm{cm}", "12", {"length": 1}, "1/100"), (r"270\,\text{cm}^2", "270", {"length": 2}, "1/10000"),
        (r"270 cm^{2}", "270", {"length": 2}, "1/10000"), ("270 cm²", "270", {"length": 2}, "1/10000"),
        ("40 square meters", "40", {"length": 2}, "1"), ("40 sq. m", "40", {"length": 2}, "1"),
        ("40 cubic cm", "40", {"length": 3}, "1/1000000"), ("2 liters", "2", {"length": 3}, "1/1000"),
        ("5 m/s", "5", {"length": 1, "time": -1}, "1"), ("18 km per hour", "18", {"length": 1, "time": -1}, "5/18"),
        ("9.8 m/s^2", "9.8", {"length": 1, "time": -2}, "1"), ("5 dollars", "5", {"money": 1}, "1"),
        (r"\$5", "5", {"money": 1}, "1"), ("50 cents", "50", {"money": 1}, "1/100"),
        ("3 feet", "3", {"length": 1}, "381/1250"),
        (r"3\pi \text{ inches}", r"3\pi", {"length": 1}, "127/5000"), ("7 units", "7", {"units": 1}, "1"),
        (r"\sqrt{2} ft", r"\sqrt{2}", {"length": 1}, "381/1250"), ("x cm", "x", {"length": 1}, "1/100"),
    ],
)  # fmt: skip
def test_units_are_split_from_numbers(text: str, value: str, dimension: dict[str, int], size: str) -> None:
    """Names, prefixes, powers and quotients are read; the size is exact, in metres, grams, seconds and dollars."""
    number, unit = split_unit(normalise(text))
    assert unit is not None
    assert (number.replace(" ", ""), dict(unit.dimension), unit.size) == (value, dimension, Fraction(size))


@pytest.mark.parametrize(
    "text", ["3m", "x", "5", "5x", "Evelyn", "no solution", "A triangle", "5 million", "5 or 6 cm2x", "abc"]
)
def test_what_has_no_unit(text: str) -> None:
    """Variables, words and scale words are no units, nor is a letter without a space before it."""
    assert split_unit(normalise(text))[1] is None


@pytest.mark.parametrize("text", ["45°", r"45^\circ", r"45^{\circ}", "45 degrees", r"45\text{ deg}"])
def test_degrees(text: str) -> None:
    """Degrees are a unit, however they are written."""
    assert split_unit(normalise(text)) == ("45", DEGREE)


def test_angles_in_minutes_and_percentages() -> None:
    """30 degrees 15 minutes are 30.25 degrees; a sine's degrees are its own; per cent is a unit."""
    assert split_unit(normalise("30° 15'")) == (r"\frac{121}{4}", DEGREE)
    assert split_unit(r"\sin 30^\circ")[1] is None
    assert split_unit(normalise(r"50\%")) == ("50", PERCENT)
