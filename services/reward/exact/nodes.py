"""The tree of an answer: numbers, collections, intervals, words."""

from dataclasses import dataclass

from services.reward.exact.numbers.algebra import Value
from services.reward.exact.numbers.number import Number
from services.reward.exact.numbers.units import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Any answer."""

    text: str
    """The normalised spelling, without needless spaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar(Node):
    """A number or a polynomial, with its unit."""

    number: Number
    unit: Unit | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Named(Node):
    """A value with a name: `x = 5`."""

    name: str
    body: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain(Node):
    """Values stated as equal, exactly or approximately: `3 sqrt(2) = 4.2426...`."""

    parts: tuple[Node, ...]
    is_approximate: tuple[bool, ...]
    """For each part after the first: whether it is only approximately equal."""
    is_named: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuple(Node):
    """Ordered: a point, a list in square brackets, an open or closed interval of two numbers."""

    items: tuple[Node, ...]
    opening: str
    closing: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Set(Node):
    """Unordered: a set, a list without brackets, alternatives."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio(Node):
    """a : b : c."""

    terms: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix(Node):
    """Rows of entries; a column is a matrix."""

    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """The numbers between two ends; None is infinity."""

    low: Value | None
    has_low: bool
    high: Value | None
    has_high: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals(Node):
    """A union of intervals in ascending order."""

    variable: str
    """The variable of an inequality; empty if none is written."""
    parts: tuple[Interval, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Node):
    """The letter of a multiple choice, and the text beside it."""

    letter: str
    rest: Node | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Equation(Node):
    """left = right, where neither side is only a name."""

    difference: Value | None
    """left - right, if both are in the grammar."""
    value: Node | None = None
    """The number on the right, if the left side compares lengths: `\\cos\\theta`, `\\frac{AB}{DE}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation(Node):
    """A statement about figures: `AB \\parallel CD`."""

    sign: str
    left: str
    right: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Words(Node):
    """Plain language."""

    words: str
    """Lower case, without articles and punctuation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque(Node):
    """An expression beyond this grammar."""
