r"""Plain algebra, read from LaTeX: expressions, and relations between them. See `expression` for what is plain."""

import functools
import re
from dataclasses import dataclass
from fractions import Fraction

from services.reward.worker_tasks.expression import FUNCTIONS, Tree, difference, negative, number, quotient

_TOKEN = re.compile(
    r"(?P<number>\d+(?:\.\d+)?|\.\d+)"
    r"|(?P<symbol>[A-Za-z](?:_(?:\{[A-Za-z0-9]{1,8}\}|[A-Za-z0-9]))?)"
    r"|(?P<command>\\[A-Za-z]+(?:_(?=\{?[A-Za-z0-9]))?)"
    r"|(?P<operator>\*\*|<=|>=|[-+*/^()={}\[\]<>|,]|\\[{}])"
    r"|(?P<space>\s+|\\[ ,;:!]|~)"
)
_WORD = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|ln|lg|or|if|in|is|no|cm|mm|km|kg|ft)(?![A-Za-z])")
_CALL = re.compile(r"(?<![\\A-Za-z])[fghFGH]\s*(?:\\left\s*)?\(")
_LARGEST_NUMBER_CHARS = 400
_MAX_DEPTH = 48

_SILENT = {"\\left", "\\right", "\\displaystyle", "\\limits", "\\quad", "\\qquad"}
_ALIASES = {
    "\\cdot": "*", "\\times": "*", "**": "^", "\\div": "/", "\\dfrac": "\\frac", "\\tfrac": "\\frac",
    "\\cfrac": "\\frac", "\\lvert": "|", "\\rvert": "|", "\\vert": "|", "\\le": "<=", "\\leq": "<=",
    "\\leqslant": "<=", "\\ge": ">=", "\\geq": ">=", "\\geqslant": ">=", "\\lt": "<", "\\gt": ">", "\\neq": "!=",
    "\\ne": "!=", "\\lbrace": "\\{", "\\rbrace": "\\}",
}  # fmt: skip
_OPENING = {"(", "[", "{", "\\{"}
_CLOSING = {")", "]", "}", "\\}"}
_RELATIONS = {"=", "<", ">", "<=", ">=", "!="}
_GREEK = {
    "\\" + name
    for name in (
        "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "iota", "kappa",
        "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "phi", "varphi", "chi", "psi", "omega", "Delta", "Theta",
        "Phi", "Omega",
    )
}  # fmt: skip
_FUNCTIONS = {"\\" + name: name for name in FUNCTIONS if name != "abs"}
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_OF_ANGLES = {"sin", "cos", "tan", "cot", "sec", "csc"}


class NotPlainError(ValueError):
    """The text is not plain algebra."""


@dataclass(frozen=True, slots=True)
class Relation:
    """`left operator right`."""

    operator: str
    left: Tree
    right: Tree

    @property
    def difference(self) -> Tree:
        """The expression that the relation compares with zero."""
        return difference(self.left, self.right)


@dataclass(frozen=True, slots=True)
class Collection:
    """Several expressions or relations together."""

    brackets: str
    """`()` and other pairs if it is ordered, `{}` if it is not."""
    items: "tuple[Plain, ...]"


Plain = Tree | list[Relation] | Collection


@functools.lru_cache(maxsize=2048)
def read(latex: str) -> Plain | None:
    """Read `latex` as an expression, a chain of relations, or a collection of these; return None if it is not plain."""
    try:
        if _WORD.search(latex) or _CALL.search(latex):
            return None
        return _read_collection(_tokens(latex))
    except (NotPlainError, RecursionError):
        return None


def _read_collection(tokens: list[tuple[str, str]]) -> Plain:
    texts = [text for _, text in tokens[:-1]]
    brackets, inside = "{}", tokens[:-1]
    if len(texts) > 2 and texts[0] in _OPENING and texts[-1] in _CLOSING and _closes_at_end(texts):
        brackets, inside = (texts[0] + texts[-1]).replace("\\", ""), tokens[1:-2]
    parts = _split(inside)
    if len(parts) < 2 and texts[0] != "\\{":
        return _Reader(tokens).text()
    return Collection(brackets, tuple(_Reader([*part, ("end", "")]).text() for part in parts))


def _closes_at_end(texts: list[str]) -> bool:
    """Return whether the last bracket closes the first."""
    depth = 0
    for position, text in enumerate(texts):
        depth += (text in _OPENING) - (text in _CLOSING)
        if depth == 0:
            return position == len(texts) - 1
    return False


def _split(tokens: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Split at the commas outside brackets."""
    parts: list[list[tuple[str, str]]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token[1] in _OPENING) - (token[1] in _CLOSING)
        if token[1] == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _tokens(latex: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    position = 0
    while position < len(latex):
        match = _TOKEN.match(latex, position)
        if match is None or match.end() - position > _LARGEST_NUMBER_CHARS:
            raise NotPlainError
        position = match.end()
        kind, text = match.lastgroup, match.group()
        if kind != "space" and text not in _SILENT:
            assert kind is not None
            text = _ALIASES.get(text, text)
            tokens.append(("operator" if kind == "command" and not text.startswith("\\") else kind, text))
    return [*tokens, ("end", "")]


class _Reader:
    """Reads the tokens once, by recursive descent."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._position = 0
        self._num_bars = 0
        self._num_angles = 0
        self._depth = 0

    def text(self) -> Tree | list[Relation]:
        left = self._sum()
        relations = []
        while self._peek() in _RELATIONS:
            operator = self._next()
            right = self._sum()
            relations.append(Relation(operator, left, right))
            left = right
        if self._kind() != "end":
            raise NotPlainError
        return relations or left

    def _kind(self) -> str:
        return self._tokens[self._position][0]

    def _peek(self) -> str:
        return self._tokens[self._position][1]

    def _next(self) -> str:
        self._position += 1
        return self._tokens[self._position - 1][1]

    def _expect(self, text: str) -> None:
        if self._next() != text:
            raise NotPlainError

    def _sum(self) -> Tree:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NotPlainError
        terms = [self._product()]
        while self._peek() in ("+", "-"):
            sign = self._next()
            term = self._product()
            terms.append(term if sign == "+" else negative(term))
        self._depth -= 1
        return terms[0] if len(terms) == 1 else ("add", *terms)

    def _product(self) -> Tree:
        left = self._signed()
        was_divided = False
        while True:
            if self._peek() == "*":
                self._next()
                left, was_divided = ("multiply", left, self._signed()), False
            elif self._peek() == "/":
                self._next()
                left, was_divided = quotient(left, self._signed()), True
            elif self._starts_atom():
                if was_divided or self._kind() == "number":
                    raise NotPlainError  # 1/2x, and 2 3
                left = ("multiply", left, self._power())
            else:
                return left

    def _signed(self) -> Tree:
        if self._peek() in ("+", "-"):
            return negative(self._signed()) if self._next() == "-" else self._signed()
        return self._power()

    def _starts_atom(self) -> bool:
        kind, text = self._tokens[self._position]
        if kind in ("number", "symbol", "command"):
            return True
        return text in ("(", "{") or (text == "|" and self._num_bars == 0)

    def _power(self) -> Tree:
        base = self._atom()
        if self._peek() != "^":
            return base
        self._next()
        if self._is_degree():
            if self._num_angles == 0:
                return base
            return ("multiply", base, quotient(("constant", "pi"), number(180)))
        return self._closed(("power", base, self._exponent()))

    def _closed(self, tree: Tree) -> Tree:
        if self._peek() == "^":
            raise NotPlainError
        return tree

    def _is_degree(self) -> bool:
        braces = self._peek() == "{"
        if self._tokens[self._position + braces][1] != "\\circ":
            return False
        self._position += 1 + braces
        if braces:
            self._expect("}")
        return True

    def _exponent(self) -> Tree:
        if self._peek() in ("+", "-"):
            return negative(self._exponent()) if self._next() == "-" else self._exponent()
        return self._atom()

    def _atom(self) -> Tree:
        kind, text = self._tokens[self._position]
        self._position += 1
        if kind == "number":
            return self._mixed(number(Fraction(text))) if text.isdigit() else number(Fraction(text))
        if kind == "symbol":
            return ("constant", text) if text in ("e", "i") else ("symbol", text.replace("{", "").replace("}", ""))
        if text in ("(", "{"):
            tree = self._sum()
            self._expect(")" if text == "(" else "}")
            return tree
        if text == "|":
            return self._absolute()
        if kind == "command":
            return self._command(text)
        raise NotPlainError

    def _mixed(self, whole: Tree) -> Tree:
        r"""Read `2\frac{1}{2}` as two and a half."""
        if [token for _, token in self._tokens[self._position : self._position + 2]] != ["\\frac", "{"]:
            return whole
        here = self._position
        self._next()
        above, below = self._group(), self._group()
        if above[0] == below[0] == "number" and self._position == here + 7:
            return ("add", whole, quotient(above, below))
        self._position = here
        return whole

    def _absolute(self) -> Tree:
        outer, self._num_bars = self._num_bars, self._num_bars + 1
        tree = self._sum()
        self._expect("|")
        self._num_bars = outer
        return ("abs", tree)

    def _command(self, text: str) -> Tree:
        if text == "\\pi":
            return ("constant", "pi")
        if text in _GREEK:
            return ("symbol", text)
        if text == "\\frac":
            return quotient(self._group(), self._group())
        if text == "\\sqrt":
            index = number(2)
            if self._peek() == "[":
                self._next()
                index = self._sum()
                self._expect("]")
            return ("root", self._group(), index)
        if text == "\\exp":
            return ("power", ("constant", "e"), self._argument())
        if text in ("\\log", "\\log_"):
            base = self._group() if text == "\\log_" else number(10)
            return ("log", self._argument(), base)
        if text in _FUNCTIONS:
            return self._function(_FUNCTIONS[text])
        raise NotPlainError

    def _group(self) -> Tree:
        """Read a command's argument: braces, or one digit or letter."""
        kind, text = self._tokens[self._position]
        if text == "{":
            return self._atom()
        if kind == "number" and len(text) > 1 and text.isdigit():  # the first digit only
            self._tokens[self._position] = (kind, text[1:])
            return number(int(text[0]))
        if kind in ("number", "symbol") or text in _GREEK or text == "\\pi":
            if kind == "number" and not text.isdigit():
                raise NotPlainError
            self._position += 1
            return number(int(text)) if kind == "number" else self._letter(text)
        raise NotPlainError

    def _letter(self, text: str) -> Tree:
        if text == "\\pi":
            return ("constant", "pi")
        return ("constant", text) if text in ("e", "i") else ("symbol", text)

    def _function(self, name: str) -> Tree:
        exponent = None
        if self._peek() == "^":
            self._next()
            exponent = self._exponent()
        if exponent == negative(number(1)):
            if name not in _INVERSE:
                raise NotPlainError
            return (_INVERSE[name], self._argument())
        self._num_angles += name in _OF_ANGLES
        tree: Tree = (name, self._argument())
        self._num_angles -= name in _OF_ANGLES
        return tree if exponent is None else ("power", tree, exponent)

    def _argument(self) -> Tree:
        r"""Read an argument in brackets, or factors up to the next operation or function: `\sin 2x \cos x`."""
        if self._peek() in ("(", "{", "|"):
            return self._closed(self._atom())
        if self._peek() == "-" or self._peek() in _FUNCTIONS:
            raise NotPlainError
        tree = self._power()
        while self._starts_atom() and self._peek() not in _FUNCTIONS and self._peek() not in ("\\log", "\\log_"):
            if self._peek() in ("(", "|") or self._kind() == "number":
                raise NotPlainError
            tree = ("multiply", tree, self._power())
        if self._peek() in ("*", "/"):
            raise NotPlainError
        return tree
