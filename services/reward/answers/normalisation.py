r"""One spelling for what means the same: Unicode signs, LaTeX layout, units, degrees, thousands separators, `x =`.

Nothing here computes; the text stays LaTeX. Every rewrite takes time linear in the text.
"""

import re
import unicodedata
from dataclasses import dataclass

DEGREE = "degree"
"""The unit of angles, however it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer in one spelling, taken apart."""

    text: str
    """All of it, unit removed."""
    name: str
    """What it is said to be: `x` of `x = 5`; empty where that is not said."""
    body: str
    """What follows the `=` if it has a name, else `text`."""
    unit: str
    """The unit, in short form; empty where there is none."""


_SIGNS = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/",
    "π": r"\pi ", "𝜋": r"\pi ", "°": r"^\circ ", "º": r"^\circ ", "˚": r"^\circ ", "∞": r"\infty ", "±": r"\pm ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∠": r"\angle ", "≅": r"\cong ", "∪": r"\cup ",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "∶": ":",
    "\u00a0": " ", "\u202f": " ", "\u2009": r"\,",
}  # fmt: skip
_UNITS = {
    unit: words[0]
    for words in (
        (DEGREE, "degrees", "deg"), ("cm", "centimeter", "centimeters", "centimetre", "centimetres"),
        ("mm", "millimeter", "millimeters", "millimetres"), ("km", "kilometer", "kilometers", "kilometres"),
        ("m", "meter", "meters", "metre", "metres"), ("in", "inch", "inches"), ("ft", "foot", "feet"),
        ("yd", "yard", "yards"), ("mi", "mile", "miles"), ("unit", "units"), ("%", r"\%", "percent"),
        ("s", "sec", "second", "seconds"), ("min", "minute", "minutes"), ("h", "hour", "hours"),
        ("kg",), ("g", "gram", "grams"), ("rad", "radian", "radians"),
    )
    for unit in words
}  # fmt: skip
_UNIT = re.compile(
    r"(?P<value>.*[\d})\].]|.*\\pi|.*\\sqrt ?\w) *(?P<square>square|sq\.?|cubic)? *"
    rf"(?P<unit>{'|'.join(sorted(map(re.escape, _UNITS), key=len, reverse=True))})"
    r" *(?:\^ *(?:\{ *(?P<braced>[23]) *\}|(?P<power>[23])))?",
    re.DOTALL,
)
_CIRC = re.compile(r"\^ *(?:\{ *\\(?:circ|degree) *\}|\\(?:circ|degree)(?![A-Za-z]))|\\degree(?![A-Za-z])")
_TRIGONOMETRY = re.compile(r"sin|cos|tan|cot|sec|csc")
_LAYOUT = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|bigl?|bigr?|Bigl?|Bigr?|limits)(?![A-Za-z])|\$|\\[()\[\]]|\\!"
)
_SPACE = re.compile(r"\\(?:quad|qquad|thinspace)(?![A-Za-z])|\\[,;: ]|[~\s]+")
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_STYLE = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|operatorname|boxed|fbox) *\{([^{}]*)\}"
)
_THOUSANDS = re.compile(r"-?\d{1,3}(?:(?:,|\\, ?|\\;)\d{3})+(?:\.\d+)?(?![\d,])")
_SYMBOL = r"(?:[A-Za-z]{1,12}|\\(?!sum|prod|int|lim|frac|sqrt)[a-z]{2,7})\d?'?(?:_\w|_\{\w{1,8}\})?(?:\([a-z]\))?"
_NAME = re.compile(
    rf"(?:m *)?(?:\\(?:angle|overline|triangle|widehat|arc) *)?(?:\{{ *{_SYMBOL} *\}}|{_SYMBOL}) *=(?P<body>[^=<>]+)"
)


def normalise(text: str) -> Answer:
    """Return the answer `text` in one spelling."""
    text = _plain_signs(text)
    for _ in range(8):
        unwrapped = _STYLE.sub(r" \1 ", text)
        if unwrapped == text:
            break
        text = unwrapped
    text = _THOUSANDS.sub(lambda number: re.sub(r"[^\d.-]", "", number[0]), text.replace("{,}", ","))
    text = _LAYOUT.sub("", text)
    text = _SPACE.sub(" ", _FRACTION.sub(r"\\frac", text)).strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    text, unit = _without_unit(text)
    named = _NAME.fullmatch(text)
    if named is None:
        return Answer(text=text, name="", body=text, unit=unit)
    name = text[: named.start("body")].rstrip("= ").replace(" ", "")
    return Answer(text=text, name=name, body=named["body"].strip(), unit=unit)


def _plain_signs(text: str) -> str:
    """ASCII and LaTeX for the Unicode signs that people write; what is no text becomes U+FFFD or goes."""
    if text.isascii() and text.isprintable():
        return text
    out: list[str] = []
    for char in text:
        category = unicodedata.category(char)
        if char in _SIGNS:
            out.append(_SIGNS[char])
        elif "！" <= char <= "～":  # full-width forms of ASCII
            out.append(chr(ord(char) - 0xFEE0))
        elif category == "No" and (fraction := unicodedata.normalize("NFKC", char).split("\u2044"))[1:]:
            out.append(rf"\frac{{{fraction[0]}}}{{{fraction[1]}}}")
        elif unicodedata.decomposition(char).startswith("<super> 003"):
            out.append(f"^{unicodedata.digit(char)}")
        elif category == "Cs":
            out.append("\ufffd")
        elif category not in {"Cc", "Cf"} or char in "\t\n\r":
            out.append(char)
    return re.sub(r"√ *(\d+|[a-z])", r"\\sqrt{\1}", "".join(out)).replace("√(", r"\sqrt(")


def _without_unit(text: str) -> tuple[str, str]:
    if _CIRC.search(text) and not _TRIGONOMETRY.search(text):
        return _CIRC.sub("", text).strip(), DEGREE
    found = _UNIT.fullmatch(text)
    if found is None or (len(found["unit"]) == 1 and found["unit"].isalpha() and text[found.start("unit") - 1] != " "):
        return text, ""  # 3m may well be three times m
    power = found["braced"] or found["power"] or {"cubic": "3", None: ""}.get(found["square"], "2")
    return found["value"].strip(), _UNITS[found["unit"]] + power
