"""Converts sympy's expressions to trees of `expression`."""

from fractions import Fraction

import sympy
from sympy.core.function import AppliedUndef

from services.reward.worker_tasks.expression import Tree, number

_FUNCTIONS = {
    sympy.sin: "sin",
    sympy.cos: "cos",
    sympy.tan: "tan",
    sympy.cot: "cot",
    sympy.sec: "sec",
    sympy.csc: "csc",
    sympy.asin: "arcsin",
    sympy.acos: "arccos",
    sympy.atan: "arctan",
    sympy.sinh: "sinh",
    sympy.cosh: "cosh",
    sympy.tanh: "tanh",
    sympy.Abs: "abs",
}
_CONSTANTS = {sympy.pi: "pi", sympy.E: "e", sympy.I: "i"}


class NoTreeError(ValueError):
    """The expression holds more than plain algebra."""


def to_tree(expr: sympy.Basic) -> Tree:
    """Return the same expression as a tree; numbers as they were written, floats by their decimal digits.

    Raises:
        NoTreeError: it has no such form.
    """
    if isinstance(expr, sympy.Rational):
        return number(Fraction(int(expr.p), int(expr.q)))
    if isinstance(expr, sympy.Float):
        return number(Fraction(str(expr)))
    if expr in _CONSTANTS:
        return ("constant", _CONSTANTS[expr])
    if isinstance(expr, sympy.Symbol):
        return ("symbol", expr.name)
    if isinstance(expr, AppliedUndef):
        return ("symbol", str(expr))  # f(x) becomes a variable of its own
    parts = [to_tree(part) for part in expr.args] if isinstance(expr, sympy.Expr) else []
    match expr:
        case sympy.Add():
            return ("add", *parts)
        case sympy.Mul():
            return ("multiply", *parts)
        case sympy.Pow():
            return ("power", *parts)
        case sympy.exp():
            return ("power", ("constant", "e"), *parts)
        case sympy.log():
            return ("log", *parts) if len(parts) == 2 else ("ln", *parts)
        case sympy.UnevaluatedExpr():
            return parts[0]
    if expr.func in _FUNCTIONS and len(parts) == 1:
        return (_FUNCTIONS[expr.func], parts[0])
    raise NoTreeError(type(expr).__name__)
