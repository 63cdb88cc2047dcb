r"""The names that answers give to values: `x`, `AB`, `m\\angle ABC`, `f(x)`, `Area of triangle ABC`."""

import re

GREEK = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|phi|chi|psi|omega|ell"
)
SYMBOL = (
    rf"(?:(?!not?\b)[A-Za-z]{{1,12}}|\\(?:{GREEK}))\d?'?(?: *_ *(?:\w|\{{ *\w{{1,8}} *\}}))?"
    r"(?: ?\( ?[A-Za-z] ?\))?"
)
_FIGURE = r"\\(?:angle|overline|triangle|widehat|arc|overarc|vec|hat|bar|odot|overrightarrow|overleftrightarrow)"
_QUANTITY = (
    "length|measure|area|volume|perimeter|circumference|radius|diameter|slope|angle|height|width|base|side|distance|value"
    "|number|probability|answer|ratio|median|mean|average|cost|price|speed|hypotenuse|diagonal|arc|chord|apothem|altitude"
    "|cent(?:er|re)|(?:mid)?point|vertex|solution|result"
)
_LENGTH = r"\| *(?:\\overline *)?\{? *[A-Z]{2} *\}? *\||\[ *[A-Z]{3,6} *\]"
_CALL = r"[fghdFGHP] *(?:\^ *\{ *-1 *\} *)?\( *(?:[fgh] *\( *)?[^()=,]{1,12}(?:, *[^()=,]{1,12})? *\)(?: *\))?"
_PHRASE = (
    rf"(?:the +)?(?:(?:total|surface|lateral|side|arc|central|slant) +)*(?:{_QUANTITY})(?: +(?:of|from|to|the|side|arc"
    r"|angle|an?|triangle|circle|square|rectangle|trapezoid|figure|segment|sector|polygon|shaded|region|parallelogram"
    rf"|rhombus))*(?: *{_FIGURE})? *(?:\{{ *)?[A-Za-z0-9]{{0,5}}(?: *\}})?"
)
_NAME = re.compile(
    rf"(?:m *)?(?:{_FIGURE} *)?(?:\{{ *{SYMBOL} *\}}|{SYMBOL})(?: *\^ *\\circ)?|(?:m *)?\\angle *(?:\d|\{{ *\d *\}})"
    rf"|m *\( *\\angle *[A-Z]{{1,3}} *\)"
    rf"|\\(?:sin|cos|tan) *\(? *(?:\\angle *)?[A-Z]{{1,3}} *\)?"
    rf"|(?-i:{_LENGTH}|{_CALL})"
    rf"|\( *[a-z] *, *[a-z] *(?:, *[a-z] *)?\)"
    rf"|{_PHRASE}",
    re.IGNORECASE,
)
_COMPARED = re.compile(
    rf"\\(?:sin|cos|tan) *\(? *\\(?:{GREEK}) *\)?|\\frac *\{{ *[A-Z]{{2}} *\}} *\{{ *[A-Z]{{2}} *\}}"
)
_NAMED_FIGURE = re.compile(
    r"(?:m *)?\\(?:angle|overline|widehat|arc|overarc) *(?:\{ *[A-Z\d]{1,3} *\}|[A-Z\d]{1,3})", re.ASCII
)
_QUANTITY_PHRASE = re.compile(_PHRASE, re.IGNORECASE)


def is_quantity(text: str) -> bool:
    """Return whether `text` names a quantity in plain language."""
    return _QUANTITY_PHRASE.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """Return whether `text` is only a name; an expression such as `2x` is not."""
    return _NAME.fullmatch(text) is not None


def is_comparison(text: str) -> bool:
    r"""Return whether `text` compares lengths, as `\cos\theta` and `\frac{AB}{DE}` do.

    It is no name, because an equation with it can be written otherwise: `\frac{AB}{DE} = 2` is `AB = 2DE`.
    """
    return _COMPARED.fullmatch(text) is not None


def canonical_name(text: str) -> str:
    """Return the name in one spelling: without `m`, marks and a degree sign."""
    bare = re.sub(r"^m *\(? *(?=\\angle)|\\(?:overline|vec|bar|hat)(?![A-Za-z])|\^ *\\circ *$", "", text)
    return re.sub(r"[ {}()]", "", bare)


def figures_as_variables(text: str) -> str:
    r"""Return `text` with each figure, such as `m\angle ABC` or `\overline{AB}`, as the variable x."""
    return _NAMED_FIGURE.sub("x", text)
