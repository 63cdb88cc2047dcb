"""The calculator: values worked out by hand, and refusals in words."""

import ast
import math
import string
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.worker.environments.arithmetic import ArithmeticRefusal, evaluate
from services.rollout.worker.environments.calculator import Calculator
from tests.support.worker.tool_calls import texts, turn


async def answer(**arguments: Any) -> str:
    """What the tool says."""
    [text] = texts((await Calculator().step(turn(("calculator", arguments)))).observation)
    return text


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", Fraction(14)),
        ("0.1 + 0.2", Fraction(3, 10)),
        ("1/3 + 1/6", Fraction(1, 2)),
        ("-2 ^ 2", Fraction(-4)),
        ("2 * 3^2", Fraction(18)),
        ("2 ** -3", Fraction(1, 8)),
        ("7 // 2 + 7 % 2", Fraction(4)),
        ("-7 // 2", Fraction(-4)),
        ("sqrt(16/9)", Fraction(4, 3)),
        ("√(144) × 2 ÷ 3 − 1", Fraction(7)),
        ("(27/8) ** (2/3)", Fraction(9, 4)),
        ("cbrt(-27)", Fraction(-3)),
        ("0 ** 0", Fraction(1)),
        ("0 ** 0.5", Fraction(0)),
        ("abs(-5/2)", Fraction(5, 2)),
        ("round(2.675, 2)", Fraction(268, 100)),
        ("round(7/2)", Fraction(4)),
        ("floor(-0.5) + ceil(0.5)", Fraction(0)),
        ("min(3, 1/3, 2) + max(1, 2)", Fraction(7, 3)),
        ("1_000 * 1.5e-3", Fraction(3, 2)),
        ("2 ** 999", Fraction(2**999)),
        ("(-1) ** 2001 + (-1) ** -2002", Fraction(0)),
    ],
)
def test_rational_results_are_exact(expression: str, value: Fraction) -> None:
    """As worked out by hand; decimals are the numbers that they spell."""
    result = evaluate(expression)
    assert isinstance(result, Fraction)
    assert result == value


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("floor(log(243, 3))", 5),
        ("floor(tan(60)^2)", 3),
        ("floor(-sqrt(2)^2)", -2),
        ("ceil(sqrt(2)^2)", 2),
        ("ceil(-log(243, 3))", -5),
        ("ceil(sqrt(2)^2 - 2)", 0),
        ("exp(ln(5)) // 1", 5),
        ("sqrt(3)^2 % 3", 0),
        ("5 % sqrt(5)^2", 0),
        ("floor(sqrt(3)^2 * 10^12)", 3 * 10**12),
        ("floor(10^12*sqrt(3))", 1732050807568),
        ("ceil(10^12*sqrt(2))", 1414213562374),
        ("floor(4.999999999)", 4),
        ("floor(5 - 10^-15)", 4),
        ("ceil(ln(2))", 1),
        ("-sqrt(2) // 10^13", -1),
    ],
)
def test_an_integer_but_for_rounding_is_that_integer(expression: str, value: int) -> None:
    """What rounds down or up would be off by 1. Exact numbers and differences beyond rounding count as they are."""
    result = evaluate(expression, "degrees")
    assert isinstance(result, Fraction)
    assert result == value


def test_a_remainder_of_a_small_number_is_that_number() -> None:
    """However much larger the divisor is."""
    assert evaluate("sqrt(2) % 10^13", "degrees") == pytest.approx(2**0.5)


@pytest.mark.parametrize(
    ("expression", "unit", "value"),
    [
        ("sin(30)", "degrees", Fraction(1, 2)),
        ("cos(60) + cos(-240)", "degrees", Fraction(0)),
        ("cos(180)", "degrees", Fraction(-1)),
        ("tan(45) + tan(225)", "degrees", Fraction(2)),
        ("sin(750)", "degrees", Fraction(1, 2)),
        ("asin(1/2)", "degrees", Fraction(30)),
        ("acos(-1/2)", "degrees", Fraction(120)),
        ("atan(-1)", "degrees", Fraction(-45)),
        ("asin(1) + acos(1)", "degrees", Fraction(90)),
        ("atan(200)", "degrees", 89.71352348972293),
        ("atan(-115)", "degrees", -89.50178838738636),
        ("sin(60)", "degrees", 0.8660254037844386),
        ("tan(30)", "degrees", 0.5773502691896258),
        ("acos((3^2 + 4^2 - 6^2) / (2*3*4))", "degrees", 117.27961273597809),
        ("atan2(1, -1)", "degrees", 135.0),
        ("sin(pi/6)", "radians", 0.5),
        ("sin(π)", "radians", 0.0),
        ("cos(1)", "radians", 0.5403023058681398),
        ("4*atan(1)", "radians", math.pi),
    ],
)
def test_angles_are_in_the_unit_that_the_call_names(expression: str, unit: Any, value: Fraction | float) -> None:
    """Right angles and their parts are exact in degrees."""
    result = evaluate(expression, unit)
    assert isinstance(result, type(value))
    assert result == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("sqrt(2)", 1.4142135623730951),
        ("2 * pi * 3", 18.84955592153876),
        ("ln(e ** 2)", 2.0),
        ("log(1000)", 3.0),
        ("log(8, 2)", 3.0),
        ("2 ** 0.5 ** 2", 2**0.25),
        ("exp(1) - e", 0.0),
    ],
)
def test_irrational_results_are_rounded(expression: str, value: float) -> None:
    """As floats are."""
    result = evaluate(expression)
    assert isinstance(result, float)
    assert result == pytest.approx(value, abs=1e-12)


async def test_the_answer_shows_what_is_exact() -> None:
    """A fraction with its decimal, an integer alone, and "about" before what is rounded."""
    assert await answer(expression="8/3") == "8/3, about 2.66666666667"
    assert await answer(expression="6*7") == "42"
    assert await answer(expression="8*sqrt(3)/3") == "about 4.61880215352"
    assert await answer(expression="sin(30)", angle_unit="degrees") == "1/2 = 0.5"


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("1000*(1+0.05/12)**360", "about 4467.74431401"),
        ("1.005**360", "about 6.02257521226"),
        ("0.99**500", "about 0.00657048304241"),
        ("(-1.5)**701", "about -2.75405492976e+123"),
        ("1.0000001 ** 10000000", "about 2.71828169254"),
        ("(1 - 1e-300) ** (10**299)", "about 0.904837418036"),
        ("(1 + 1e-300) ** (10**300 + 1/2)", "about 2.71828182846"),
        ("(2/3)**600 * (3/7)**300", "about 8.95795709901e-217"),
        ("3**-600 + 7**-300", "about 2.95520760501e-254"),
        ("floor(3**640 / 10**30)", "about 2.27825861183e+275"),
        ("round(3**640 / 10**30)", "about 2.27825861183e+275"),
        ("3**640 // 10**30", "about 2.27825861183e+275"),
        ("round(0.99**500, 4)", "33/5000 = 0.0066"),
    ],
)
async def test_exact_results_that_are_too_long_are_rounded(expression: str, text: str) -> None:
    """Compound interest, for example; all figures that are shown are right."""
    assert await answer(expression=expression) == text


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("9**9**9", "a number in it is too large"),
        ("2 ** 2000 ** 0.99", "a number in it is too large"),
        ("(1/2) ** 2000", "a number in it is too small"),
        ("(1/2) ** 2000 ** 0.99", "a number in it is too small"),
        ("10 ** -300 / 10 ** 300", "a number in it is too small"),
        ("3 ** 640 % 7", "the remainder of a rounded number of more than 15 figures is not known"),
        ("1e-999", "a number in it is too small"),
        ("3 ** -675", "a number in it is too small"),
        ("1.5 ** (10 ** 299)", "a number in it is too large"),
        ("1.5 ** -(10 ** 299)", "a number in it is too small"),
        ("10 ** 300 * 10 ** 300", "a number in it is too large"),
        ("1e999", "a number in it is too large"),
        ("1e9999", "is no decimal number"),
        ("exp(1000)", "a number in it is too large"),
        ("1/0", "it divides by zero"),
        ("5 % 0", "it divides by zero"),
        ("0 ** -1", "it divides by zero"),
        ("sqrt(-4)", "root of a negative number"),
        ("ln(0)", "a logarithm needs"),
        ("round(1.5, 1e9)", "round takes from 0 to 100"),
        ("sqrt(1, 2)", "sqrt takes 1 numbers, not 2"),
        ("log()", "log takes 1 to 2 numbers, not 0"),
        ("sin(30)", 'add "angle_unit": "degrees" or "radians"'),
        ("().__class__.__bases__", "'().__class__.__bases__' cannot be computed"),
        ("__import__('os').system('ls')", "cannot be computed"),
        ("eval('1')", "'1'"),
        ("[1 for x in (1, 2)]", "cannot be computed"),
        ("lambda: 1", "cannot be computed"),
        ("x := 1", "it cannot be computed"),
        ("x", "'x' cannot be computed"),
        ("sqrt", "'sqrt' cannot be computed"),
        ("min(*[1, 2])", "cannot be computed"),
        ("round(1, ndigits=0)", "cannot be computed"),
        ("3(4)", "write a product with *"),
        ("2 +", "it cannot be computed: invalid syntax"),
        ("", "it cannot be computed"),
        ("'a' * 9", "is no decimal number"),
        ("0x10", "is no decimal number"),
        ("1j", "is no decimal number"),
        ("True", "is no decimal number"),
        ("1 < 2", "cannot be computed"),
        ("1 << 99", "cannot be computed"),
        ("1+" * 250 + "1", "it has 501 characters"),
        ("(" * 240 + "1" + ")" * 240, "it cannot be computed"),
        ("1\0", "it cannot be computed"),
    ],
)
async def test_what_has_no_value_is_answered_in_words(expression: str, words: str) -> None:
    """The words name the part."""
    text = await answer(expression=expression)
    assert text.startswith("Error in calculator: ")
    assert words in text


@pytest.mark.parametrize("expression", ["tan(90)", "tan(-90)", "asin(1.01)", "acos(-2)"])
def test_angles_without_a_value_are_refused(expression: str) -> None:
    """Instead of 1.6e16."""
    with pytest.raises(ArithmeticRefusal, match=r"no value|not between -1 and 1"):
        evaluate(expression, "degrees")


def test_the_sine_of_a_number_that_lacks_figures_is_refused() -> None:
    """It could be any; the arctangent is known."""
    with pytest.raises(ArithmeticRefusal, match="the sin of a rounded number of more than 15 figures is not known"):
        evaluate("sin(3 ** 640)", "degrees")
    assert evaluate("atan(3 ** 640)", "degrees") == 90


_LETTERS = string.digits + "+-*/%^().,e_" + " "


@given(st.one_of(st.text(_LETTERS, max_size=60), st.text(max_size=40)))
def test_any_text_has_a_bounded_value_or_is_refused(text: str) -> None:
    """Nothing else is raised, and nothing infinite comes back."""
    try:
        value = evaluate(text, "degrees")
    except ArithmeticRefusal:
        return
    assert -(2**1024) < value < 2**1024


_NUMBERS = st.integers(-50, 50).map(str)
_TREES = st.recursive(
    _NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner).map(
        lambda parts: f"({parts[0]}{parts[1]}{parts[2]})"
    ),
    max_leaves=12,
)


@given(_TREES)
def test_arithmetic_is_that_of_fractions(expression: str) -> None:
    """Against Python's own evaluation of the same tree over fractions."""

    class Exact(ast.NodeTransformer):
        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            return ast.Call(ast.Name("Fraction", ast.Load()), [node], [])

    tree = ast.fix_missing_locations(Exact().visit(ast.parse(expression, mode="eval")))
    try:
        expected = eval(compile(tree, "", "eval"), {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ArithmeticRefusal, match="divides by zero"):
            evaluate(expression)
        return
    assert evaluate(expression) == expected
