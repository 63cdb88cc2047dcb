r"""Mathematics beyond plain algebra, read by math-verify's LaTeX parser and compared by sympy: sets, intervals,
matrices, sums, and equations that must be solved.

math-verify is lenient in ways that a policy would learn to exploit: it takes a set of one for its element, an equation
for its right side, five equal digits for equality, and the first of several parsings. So kinds are compared first,
numbers by value to many digits, and only the rest is left to sympy.
"""

import functools
from collections.abc import Sequence
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.logic import And
from sympy.core.relational import Relational

from services.reward.worker_tasks.equality import are_equal, are_same_relations
from services.reward.worker_tasks.latex_algebra import Relation
from services.reward.worker_tasks.sympy_tree import NoTreeError, to_tree

_NORMALISATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_OPERATORS = {
    sympy.Eq: "=",
    sympy.Ne: "!=",
    sympy.StrictLessThan: "<",
    sympy.LessThan: "<=",
    sympy.StrictGreaterThan: ">",
    sympy.GreaterThan: ">=",
}
UNEVALUATED = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)
"""Operations that are still to be computed."""


class UnreadableError(ValueError):
    """The text cannot be read as mathematics."""


@functools.lru_cache(maxsize=512)
def read(latex: str, is_real: bool) -> Any:
    """Return sympy's reading of `latex`; variables are real numbers if `is_real`, else complex.

    Raises:
        UnreadableError: the text cannot be read.
    """
    try:
        found = latex2sympy(
            normalize_latex(latex, _NORMALISATION),
            is_real=is_real,
            convert_degrees=False,
            normalization_config=None,
            conversion_config=_CONVERSION,
        )
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - the parser raises anything at all
        raise UnreadableError(str(error)) from None
    if isinstance(found, sympy.MatrixBase):
        return found.as_immutable()
    if not isinstance(found, sympy.Basic) or found.has(sympy.nan, sympy.zoo):
        raise UnreadableError(f"it is {type(found).__name__}")
    return found


def are_same(gold: Any, given: Any) -> bool:
    """Return whether the two are of one kind and the same; may take any time."""
    kind = _kind_of(gold)
    if kind != _kind_of(given):
        return _is_interval_of(gold, given) or _is_interval_of(given, gold)
    if kind == "relation":
        return _are_same_relations(_links(gold), _links(given))
    if _names_of(gold) != _names_of(given):
        return False
    if kind == "matrix":
        return gold.shape == given.shape and all(map(are_same, gold.flat(), given.flat()))
    if kind == "tuple":
        return len(gold.args) == len(given.args) and all(map(are_same, gold.args, given.args))
    if kind == "set":
        return _are_same_sets(gold, given)
    return kind == "expression" and _are_same_expressions(gold, given)


def _kind_of(value: Any) -> str:
    if isinstance(value, Relational) or (isinstance(value, And) and not any(link is None for link in _links(value))):
        return "relation"
    if isinstance(value, sympy.MatrixBase):
        return "matrix"
    if isinstance(value, sympy.Tuple):
        return "tuple"
    if isinstance(value, sympy.Set):
        return "set"
    if isinstance(value, sympy.Expr):
        return "expression"
    return type(value).__name__


def _names_of(value: Any) -> frozenset[str]:
    return frozenset(symbol.name for symbol in value.free_symbols)


def _links(value: Any) -> list[Any]:
    """Return the relations of a chain, with None for each part that is not a relation."""
    parts = value._unsorted_args if isinstance(value, And) else [value]  # sympy's own order loses the chain's
    return [part if isinstance(part, Relational) else None for part in parts]


def _are_same_expressions(gold: Any, given: Any) -> bool:
    if gold == given:
        return True
    try:
        found = are_equal(to_tree(gold), to_tree(given))
    except NoTreeError:
        found = None
    if found is not None:
        return found
    if given.has(*UNEVALUATED) and not gold.has(*UNEVALUATED):
        return False
    if gold.has(sympy.oo, sympy.nan, sympy.zoo) or given.has(sympy.oo, sympy.nan, sympy.zoo):
        return False
    rest = sympy.simplify(_exact(gold) - _exact(given))
    return isinstance(rest, sympy.Expr) and rest.is_zero is True


def _exact(expr: Any) -> Any:
    """Replace decimals by fractions, because sympy would compare decimals to fifteen digits."""
    return expr.xreplace({number: sympy.Rational(str(number)) for number in expr.atoms(sympy.Float)})


def _are_same_sets(gold: Any, given: Any) -> bool:
    if gold == given:
        return True
    if isinstance(gold, sympy.FiniteSet) and isinstance(given, sympy.FiniteSet):
        return _match(list(gold.args), list(given.args))
    if isinstance(gold, sympy.Interval) and isinstance(given, sympy.Interval):
        openness = [(one.left_open, one.right_open) for one in (gold, given)]
        return openness[0] == openness[1] and all(
            map(_are_same_expressions, (gold.start, gold.end), (given.start, given.end))
        )
    if type(gold) is type(given) and isinstance(gold, sympy.Union | sympy.Intersection):
        return _match(list(gold.args), list(given.args))
    if gold.free_symbols or isinstance(gold, sympy.FiniteSet) or isinstance(given, sympy.FiniteSet):
        return False
    return gold.symmetric_difference(given) is sympy.S.EmptySet


def _match(gold: list[Any], given: list[Any]) -> bool:
    """Return whether the two lists match one to one."""
    if len(gold) != len(given):
        return False
    left = list(given)
    for wanted in gold:
        for position, offered in enumerate(left):
            if are_same(wanted, offered):
                del left[position]
                break
        else:
            return False
    return True


def _is_interval_of(found: Any, chain: Any) -> bool:
    """Return whether an inequality in one variable says the same as an interval, or a union of intervals."""
    if not isinstance(found, sympy.Interval | sympy.Union) or _kind_of(chain) != "relation":
        return False
    if len(chain.free_symbols) != 1 or found.free_symbols or any(isinstance(link, sympy.Eq) for link in _links(chain)):
        return False
    said = sympy.Intersection(*(link.as_set() for link in _links(chain)))
    return _are_same_sets(found, said)


def _are_same_relations(gold: Sequence[Any], given: Sequence[Any]) -> bool:
    """Compare by proportion; then equations and inequalities by their solutions."""
    if {name for link in gold for name in _names_of(link)} != {name for link in given for name in _names_of(link)}:
        return False
    try:
        found = are_same_relations(*([_relation(link) for link in links] for links in (gold, given)))
    except NoTreeError:
        found = None
    if found is not None:
        return found
    symbols = sorted(gold[0].free_symbols, key=lambda symbol: str(symbol.name))
    if len(gold) == len(given) == 1 and isinstance(gold[0], sympy.Eq) and isinstance(given[0], sympy.Eq):
        if _names_of(gold[0].lhs) and not isinstance(gold[0].lhs, sympy.Expr):
            return False
        return bool(symbols) and all(_have_same_solutions(gold[0], given[0], symbol) for symbol in symbols)
    if len(symbols) == 1 and not any(isinstance(link, sympy.Eq) for link in [*gold, *given]):
        said = [sympy.Intersection(*(link.as_set() for link in links)) for links in (gold, given)]
        return said[0] is not sympy.S.EmptySet and _are_same_sets(said[0], said[1])
    return False


def _relation(link: Any) -> Relation:
    if type(link) not in _OPERATORS:
        raise NoTreeError(type(link).__name__)
    return Relation(_OPERATORS[type(link)], to_tree(link.lhs), to_tree(link.rhs))


def _have_same_solutions(gold: Any, given: Any, symbol: Any) -> bool:
    ours, theirs = (sympy.solve(_exact(one.lhs - one.rhs), symbol) for one in (gold, given))
    return bool(ours) and _match(ours, theirs)
