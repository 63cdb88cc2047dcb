r"""Formulas before the values of a named answer: `c = \sqrt{a^2+b^2} = \sqrt{9+16} = 5`. Pure and bounded.

A formula has variables, so it states no value, and only the values behind it must agree.
"""

import re

from services.reward.exact.names import figures_as_variables, is_name
from services.reward.exact.nodes import Node, Scalar
from services.reward.exact.numbers.algebra import has_variables
from services.reward.exact.numbers.number import read_number
from services.reward.exact.numbers.units import split_unit
from services.reward.exact.text.brackets import closes

_ROOT = re.compile(r"\\sqrt *(?:\[ *\d+ *\] *)?(?:(?=\{)|(?P<letter>[A-Za-z]))")


def num_formulas(nodes: tuple[Node, ...]) -> int:
    r"""Return how many of `nodes` precede the values, if they end in one: 2 of `A = bh = S = 6(4) = 24`."""
    last = nodes[-1]
    if not isinstance(last, Scalar) or has_variables(last.number.value):
        return 0
    return next(number for number, node in enumerate(nodes) if not _is_formula(node))


def _is_formula(node: Node) -> bool:
    """Return whether it is an expression with variables or figures, or the name of a quantity."""
    number = node.number if isinstance(node, Scalar) else read_number(_without_roots(figures_as_variables(node.text)))
    return is_name(node.text) if number is None else has_variables(number.value)


def _without_roots(text: str) -> str:
    """Return `text` with each root of an expression with variables as the variable x. Other roots have values."""
    parts: list[str] = []
    copied = position = 0
    while (root := _ROOT.search(text, position)) is not None:
        position = root.end()
        if not root["letter"]:
            end = closes(text, root.end())
            if end < 0:
                break
            position = end + 1
            body, _ = split_unit(_without_roots(text[root.end() + 1 : end]))
            radicand = read_number(body)
            if radicand is None or not has_variables(radicand.value):
                continue
        parts += [text[copied : root.start()], "(x)"]
        copied = position
    return "".join(parts) + text[copied:]
