r"""Formulas before the values of a named answer: `c = \sqrt{a^2+b^2} = \sqrt{9+16} = 5`. Pure and bounded.

A formula has variables, so it states no value, and only the values behind it must agree.
"""

import re

from services.reward.exact.names import GREEK, figures_as_variables, is_name
from services.reward.exact.nodes import Node, Scalar
from services.reward.exact.numbers.algebra import has_variables
from services.reward.exact.numbers.number import read_number
from services.reward.exact.numbers.units import split_unit
from services.reward.exact.text.brackets import closes

_COMPOUND = re.compile(
    r"\\(?:sqrt *(?:\[ *\d+ *\] *)?(?:(?=\{)|(?P<letter>[A-Za-z]))"
    r"|(?P<fraction>frac) *(?=\{)"
    r"|(?:(?:arc)?(?:sin|cos|tan)|cot|sec|csc|ln|log *(?:_ *(?:\d|\{ *\d+ *\}))?) *(?:\^ *(?:\d|\{ *-?\d+ *\}) *)?"
    rf"(?:(?=[({{])|(?P<argument>\d* *(?:[A-Za-z]{{1,3}}|\\(?:{GREEK}))(?![A-Za-z]))))"
)
"""The beginning of a root, a fraction or a function, up to its bracket or with its argument."""
_VARIABLES = "xyzuvwpqrst"
"""Stand for compounds in turn, so that two of them do not cancel."""


def num_formulas(nodes: tuple[Node, ...]) -> int:
    r"""Return how many of `nodes` precede the values, if they end in one: 2 of `A = bh = S = 6(4) = 24`."""
    last = nodes[-1]
    if not isinstance(last, Scalar) or has_variables(last.number.value):
        return 0
    return next(number for number, node in enumerate(nodes) if not _is_formula(node))


def _is_formula(node: Node) -> bool:
    """Return whether it is an expression with variables or figures, or the name of a quantity."""
    number = node.number if isinstance(node, Scalar) else read_number(_simplified(figures_as_variables(node.text)))
    return is_name(node.text) if number is None else has_variables(number.value)


def _simplified(text: str) -> str:
    """Return `text` with a variable for each root, fraction or function of variables. Others have values."""
    parts: list[str] = []
    free = [letter for letter in _VARIABLES if letter not in text] or _VARIABLES
    copied = position = 0
    while (compound := _COMPOUND.search(text, position)) is not None:
        position = compound.end()
        bare = compound["letter"] or compound["argument"]
        arguments = [bare] if bare else []
        while len(arguments) < (2 if compound["fraction"] else 1):
            begin = len(text) - len(text[position:].lstrip())
            end = closes(text, begin) if text[begin : begin + 1] in ("{", "(") else -1
            if end < 0:
                return "".join(parts) + text[copied:]
            arguments.append(text[begin + 1 : end])
            position = end + 1
        if _has_variables(arguments):
            parts += [text[copied : compound.start()], f"({free[len(parts) // 2 % len(free)]})"]
            copied = position
    return "".join(parts) + text[copied:]


def _has_variables(arguments: list[str]) -> bool:
    """Return whether each is an expression, and one of them has variables."""
    numbers = [read_number(split_unit(_simplified(argument))[0]) for argument in arguments]
    values = [number.value for number in numbers if number is not None]
    return len(values) == len(numbers) and any(map(has_variables, values))
