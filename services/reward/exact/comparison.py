r"""Compares two answers: exact values first, then structure; the rest is a question for a worker process.

Pure and bounded: nothing here takes more than milliseconds, whatever the answers hold. If the gold is a number, the
answer is always decided here, except for a few functions that this grammar lacks. Answers that could cost a worker
dearly and cannot be right (sums, integrals, limits that the gold answer does not have, towers of powers) are refused
here.
"""

import re
from dataclasses import dataclass

from services.reward.exact.answer_size import is_small
from services.reward.exact.large_powers import read_large
from services.reward.exact.matching import Outcome, match
from services.reward.exact.names import canonical_name, is_name
from services.reward.exact.nodes import Named, Node, Opaque, Scalar, Set, Tuple
from services.reward.exact.numbers.algebra import NoValueError
from services.reward.exact.numbers.scalars import Rules
from services.reward.exact.structure import check_bounds, read
from services.reward.exact.text.brackets import squeeze
from services.reward.exact.text.normalisation import normalise

__all__ = ["Outcome", "Rules", "Side", "compare", "is_structural"]

_COSTLY = re.compile(
    r"\\(sum|prod|i*int|oint|lim|det|bmod|pmod|mod|Gamma|gamma|zeta|max|min|sup|inf|argmax|argmin|coprod|big[a-z]+)(?![A-Za-z])"
    r"|(?<![\\A-Za-z])([A-Za-z]{2,}) ?\(|(__)|(\ufffd)|(\[\[)"
)
_TOWER = re.compile(r"(?:\^|\*\*) *(?:\{[^{}]*|-? *\w+ *)(?:\^|\*\*)")
_POWER = re.compile(r"(?:\^|\*\*) *[{(]? *-? *(\d+)")
_FACTORIAL = re.compile(r"\d{3,} *!|[)}] *!|! *!")
_CONTENT = re.compile(r"[^\W_]|\\\{")
_MAX_POWER = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A gold answer or a response's answer, after reading."""

    text: str
    """The normalised spelling, still LaTeX."""
    node: Node
    is_too_large: bool = False
    raw: str = ""
    """The text as given."""

    @property
    def is_blank(self) -> bool:
        """Whether only punctuation and marks are left."""
        return _CONTENT.search(self.text.replace("^\\circ", "")) is None

    @classmethod
    def of(cls, text: str) -> "Side":
        """Read `text`, or return what was read of it before."""
        side = _remembered.get(text)
        if side is None:
            side = _read_text(normalise(text), text)
            if is_small(text, side.node):
                if len(_remembered) == _MAX_REMEMBERED:
                    del _remembered[next(iter(_remembered))]
                _remembered[text] = side
        return side

    def separated(self) -> "Side":
        """Return the same answer, with every comma between digits as a separator, not part of a number."""
        return _read_text(normalise(self.raw, join_thousands=False), self.raw)


_MAX_REMEMBERED = 4096
_remembered: dict[str, Side] = {}
"""Small answers that were read, by text, oldest first: a gold answer comes with each response of its group."""


def _read_text(text: str, raw: str) -> Side:
    try:
        check_bounds(text)
        return Side(text=text, node=read(text), raw=raw)
    except NoValueError:
        return Side(text=text, node=Opaque(text=squeeze(text)), raw=raw)
    except ArithmeticError:  # TooLargeError, or beyond Decimal's range
        return Side(text=text, node=Opaque(text=text), is_too_large=True, raw=raw)


def compare(gold: Side, answer: Side, rules: Rules) -> Outcome:
    """Return whether the answer has the value of the gold answer."""
    if gold.is_too_large or answer.is_too_large:
        if "".join(gold.text.split()) == "".join(answer.text.split()):
            return Outcome.RIGHT
        return _compare_large(gold, answer)
    try:
        return _compare(gold, answer, rules)
    except (ArithmeticError, NoValueError):
        return Outcome.TOO_LARGE


def _compare_large(gold: Side, answer: Side) -> Outcome:
    """Compare powers that are too large to write out. A sum counts only if the gold answer is one."""
    (our_name, wanted), (name, found) = _read_large(gold.text), _read_large(answer.text)
    if wanted is not None and found is not None and (not our_name or not name or our_name == name):
        if wanted[0] == found[0] and (wanted[1] or not found[1]):
            return Outcome.RIGHT
        if gold.is_too_large:
            return Outcome.WRONG
    return Outcome.TOO_LARGE if answer.is_too_large else Outcome.WRONG


def _read_large(text: str) -> tuple[str, tuple[int, bool] | None]:
    """Return the number's name, if it has one, and the stand-in for its value."""
    name, equals, value = text.partition("=")
    is_named = equals != "" and is_name(name.strip())
    try:
        return (canonical_name(name.strip()), read_large(value)) if is_named else ("", read_large(text))
    except ArithmeticError:
        return "", None


def _compare(gold: Side, answer: Side, rules: Rules) -> Outcome:
    outcome = match(gold.node, answer.node, rules)
    if outcome not in {Outcome.RIGHT, Outcome.OPEN} and _is_list(gold.node) and re.search(r"\d,\d{3}", answer.raw):
        separated = answer.separated()
        if not separated.is_too_large and match(gold.node, separated.node, rules) is Outcome.RIGHT:
            return Outcome.RIGHT
    if outcome is Outcome.OPEN:
        return _refusal(gold.text, answer.text) or outcome
    return outcome


def is_structural(gold: Side) -> bool:
    """Return whether the gold answer is not a number."""
    node = gold.node.body if isinstance(gold.node, Named) else gold.node
    return not isinstance(node, Scalar)


def _refusal(gold: str, answer: str) -> Outcome | None:
    """Return the outcome if no worker should be asked, else None."""
    if not answer.isascii() and gold.isascii():  # digits of other scripts would be read as numbers
        return Outcome.UNREADABLE
    wanted = {found[0] for found in _COSTLY.finditer(gold)}
    if any(found[0] not in wanted for found in _COSTLY.finditer(answer)):
        return Outcome.UNREADABLE
    if (_TOWER.search(answer) and not _TOWER.search(gold)) or _FACTORIAL.search(answer):
        return Outcome.TOO_LARGE
    if any(len(found[1]) > 2 or int(found[1]) > _MAX_POWER for found in _POWER.finditer(answer)):
        return Outcome.TOO_LARGE
    return None


def _is_list(node: Node) -> bool:
    return isinstance(node.body if isinstance(node, Named) else node, Set | Tuple)
