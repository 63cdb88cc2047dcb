"""Units of measure: reads the unit after a number, its dimension and its size.

Two units of one dimension are converted exactly; a unit outside the table is not read as one.
"""

import functools
import re
from dataclasses import dataclass
from fractions import Fraction

Dimension = tuple[tuple[str, int], ...]
"""Base quantities with their nonzero powers, in alphabetical order."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of measure."""

    dimension: Dimension
    size: Fraction
    """Size in the dimension's base units."""
    has_pi: bool = False
    """Whether the size must be multiplied by pi: true for degrees, because radians are the base."""


PERCENT = Unit((("%", 1),), Fraction(1))
DEGREE = Unit((("angle", 1),), Fraction(1, 180), has_pi=True)

_TABLE = {
    "length": {
        "m meter meters metre metres": "1", "cm centimeter centimeters centimetre centimetres": "0.01",
        "mm millimeter millimeters millimetre millimetres": "0.001", "dm decimeter decimeters": "0.1",
        "km kilometer kilometers kilometre kilometres": "1000", "in inch inches": "0.0254", "ft foot feet": "0.3048",
        "yd yds yard yards": "0.9144", "mi mile miles": "1609.344", "nm nanometer nanometers": "0.000000001",
    },
    "mass": {
        "g gram grams": "1", "kg kilogram kilograms kilo kilos": "1000", "mg milligram milligrams": "0.001",
        "lb lbs pound pounds": "453.59237", "oz ounce ounces": "28.349523125", "ton tons": "907184.74",
        "tonne tonnes": "1000000",
    },
    "time": {
        "s sec secs second seconds": "1", "min mins minute minutes": "60", "h hr hrs hour hours": "3600",
        "ms millisecond milliseconds": "0.001", "day days": "86400", "week weeks": "604800",
    },
    "months": {"month months": "1", "year years yr yrs": "12"},
    "angle": {"rad radian radians": "1"},
    "money": {"dollar dollars \\dollar USD usd $": "1", "cent cents ¢": "0.01"},
    "pounds": {"£ GBP": "1"}, "euros": {"€ euro euros EUR": "1"},
    "current": {"A amp amps ampere amperes": "1"}, "volts": {"V volt volts": "1"}, "power": {"W watt watts": "1"},
    "energy": {"J joule joules": "1"}, "force": {"N newton newtons": "1"}, "celsius": {"\\celsius": "1"},
    "fahrenheit": {"\\fahrenheit": "1"}, "kelvin": {"kelvin kelvins": "1"},
    "resistance": {"ohm ohms": "1"}, "frequency": {"Hz hertz": "1"},
}  # fmt: skip
_VOLUMES = {
    "L l liter liters litre litres": "0.001", "mL ml milliliter milliliters": "0.000001",
    "gal gallon gallons": "0.003785411784",
}  # fmt: skip
_COUNTED = (
    "side", "people", "person", "student", "way", "coin", "apple", "orange", "book", "ball", "point", "page", "car",
    "game", "child", "children", "boy", "girl", "men", "man", "women", "woman", "ticket", "edge", "vertex", "vertices",
    "face", "triangle", "circle", "step", "tile", "marble", "card", "dog", "cat", "chair",
    "item", "solution", "integer", "number", "value", "pair", "rectangle", "term", "factor", "divisor", "digit",
    "root", "line", "angle", "row", "column", "arrangement", "outcome", "color", "piece", "player", "team", "member",
    "mark", "pencil", "box", "boxes", "word", "letter", "vote", "choice", "possibility", "possibilities", "diagonal",
)  # fmt: skip

_NAMES: dict[str, Unit] = {}
for _quantity, _rows in _TABLE.items():
    for _names, _size in _rows.items():
        for _name in _names.split():
            _NAMES[_name] = Unit(((_quantity, 1),), Fraction(_size))
for _names, _size in _VOLUMES.items():
    for _name in _names.split():
        _NAMES[_name] = Unit((("length", 3),), Fraction(_size))
for _name in ("unit", "units"):
    _NAMES[_name] = Unit((("units", 1),), Fraction(1))
for _name in ("%", "\\%", "percent"):
    _NAMES[_name] = PERCENT
_NAMES["mph"] = Unit((("length", 1), ("time", -1)), Fraction("1609.344") / 3600)
for _name in ("kph", "kmh"):
    _NAMES[_name] = Unit((("length", 1), ("time", -1)), Fraction(1000, 3600))
for _name in _COUNTED:
    for _form in (_name, _name + "s"):
        _NAMES.setdefault(_form, Unit(((_name, 1),), Fraction(1)))

_WORD = re.compile(
    r"(?P<joint>/|\*|\\cdot|-|per\b|an?\b)? *(?P<prefix>sq\b\.?|square\b|cubic\b|cu\b\.?)? *"
    r"(?P<name>\\%|%|\\dollar|\\celsius|\\fahrenheit|[$£€¢]|[A-Za-z]++)\.?(?P<suffix> squared| cubed)?"
    r"(?: *\^ *(?:\{ *(?P<braced>-?[1-4]) *\}|(?P<power>-?[1-4]))|(?P<digit>[23])(?!\d))? *"
)
_START = re.compile(r"(?:/ *)?(?<![A-Za-z\\_^{])(?:\\(?:%|dollar|celsius|fahrenheit)|[%$£€¢]|[A-Za-z]++)")
_LEAD = re.compile(r"(?P<sign>-? *)(?P<unit>\\dollar|[$£€]) *")
_CIRC = re.compile(r"\^ *\{? *\\circ *\}? *(?P<scale>[CF]\b)?")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)")
_SEXAGESIMAL = re.compile(r"(\d+) *\^ *\\circ *(\d+) *'(?: *(\d+(?:\.\d+)?) *'')?")
_VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
_FRACTION = re.compile(
    r"(?P<value>.*\d.*?) *\\frac ?\{ (?P<upper>[A-Za-z][^{}]*?) ?\} ?\{ (?P<lower>[A-Za-z][^{}]*?) ?\}"
)
_VALUE = re.compile(r"[\d\\]|^-?[b-z]$")
_MAX_NAMES = 4


def split_unit(text: str) -> tuple[str, Unit | None]:
    """Return the number in `text`, and the unit beside it if there is one."""
    if "\\circ" in text and not _TRIGONOMETRY.search(text):
        parts = _SEXAGESIMAL.fullmatch(text)
        if parts is not None:
            degrees = Fraction(parts[1]) + Fraction(parts[2]) / 60 + Fraction(parts[3] or 0) / 3600
            return f"\\frac{{{degrees.numerator}}}{{{degrees.denominator}}}", DEGREE
        scale = _CIRC.search(text)
        if scale is not None and scale["scale"]:
            name = "\\celsius" if scale["scale"] == "C" else "\\fahrenheit"
            return (text[: scale.start()] + text[scale.end() :]).strip(), _NAMES[name]
        return _CIRC.sub("", text).strip(), DEGREE
    if text.endswith("}") and (ratio := _FRACTION.fullmatch(text)) is not None:  # \frac{\text{km}}{\text{h}}
        unit = _read(f"{ratio['upper']}/{ratio['lower']}")
        if unit is not None:
            return ratio["value"], unit
    lead = _LEAD.match(text)
    if lead is not None:
        return lead["sign"] + text[lead.end() :], _NAMES[lead["unit"]]
    if text[-1:].isdigit() and "^" not in text[-5:] and text[-2:-1].isdigit():
        return text, None
    return _split_tail(text)


def find_unit(name: str) -> Unit | None:
    """Return the unit of that name; None if it is unknown."""
    return _NAMES.get(name)


def _split_tail(text: str) -> tuple[str, Unit | None]:
    starts = [word.start() for word in _START.finditer(text)]
    for start in starts[-2 * _MAX_NAMES :]:
        value = text[:start].rstrip(" -")
        unit = _read(text[start:]) if _VALUE.search(value) else None
        if unit is None:
            continue
        if text[start:].isalpha() and start == len(text) - 1 and (text[start - 1] != " " or _VARIABLE.search(value)):
            return text, None  # 3m may be three times m
        return value, unit
    return text, None


@functools.lru_cache(maxsize=2048)
def _read(text: str) -> Unit | None:
    """Return the unit that makes up all of `text`; None if it is not a unit."""
    powers: dict[str, int] = {}
    size = Fraction(1)
    position = count = 0
    while position < len(text):
        word = _WORD.match(text, position)
        count += 1
        if word is None or count > _MAX_NAMES or (word["joint"] and count == 1 and word["joint"] not in {"/", "per"}):
            return None
        unit = _NAMES.get(word["name"])
        if unit is None and len(word["name"]) > 1:
            unit = _NAMES.get(word["name"].casefold())
        if unit is None:
            return None
        power = int(word["braced"] or word["power"] or word["digit"] or 1)
        if word["prefix"] or word["suffix"]:
            power = 3 if (word["prefix"] or "").startswith("cu") or word["suffix"] == " cubed" else 2
        if word["joint"] in {"/", "per", "a", "an"}:
            power = -power
        for quantity, exponent in unit.dimension:
            powers[quantity] = powers.get(quantity, 0) + exponent * power
        size *= unit.size**power
        position = word.end()
    return Unit(tuple(sorted((quantity, power) for quantity, power in powers.items() if power)), size)
