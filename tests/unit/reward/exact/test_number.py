"""Plain numbers as exact rationals."""

import contextlib
import decimal
import math
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.exact.numbers.algebra import NoValueError, TooLargeError, add, are_equal, constant, to_decimal
from services.reward.exact.numbers.number import Number, parse_rational, read_number
from tests.support.calls import num_calls


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", Fraction(5)),
        ("-5", Fraction(-5)),
        ("+ 5", Fraction(5)),
        (".5", Fraction(1, 2)),
        ("270.", Fraction(270)),
        ("62.50", Fraction(125, 2)),
        ("125/2", Fraction(125, 2)),
        (r"\frac { 40 } { 3 }", Fraction(40, 3)),
        (r"\frac12", Fraction(1, 2)),
        (r"\frac{-2}{3}", Fraction(-2, 3)),
        (r"\frac{2}{-3}", Fraction(-2, 3)),
        (r"-\frac{2}{3}", Fraction(-2, 3)),
        (r"7\frac{3}{4}", Fraction(31, 4)),
        (r"-7 \frac{3}{4}", Fraction(-31, 4)),
        (r"4 \frac { 4 } { 11 }", Fraction(48, 11)),
        (r"1.5 \times 10^{3}", Fraction(1500)),
        ("1.5e3", Fraction(1500)),
        ("10^{-3}", Fraction(1, 1000)),
        ("2^{10}", Fraction(1024)),
        ("2^10", Fraction(1024)),
        ("-2^2", Fraction(-4)),
        ("(-2)^2", Fraction(4)),
        ("12345678901234567891", Fraction(12345678901234567891)),
        (r"\frac{1}{\frac{1}{2}}", Fraction(2)),
    ],
)
def test_values(text: str, value: Fraction) -> None:
    """The grammar's forms have the values that people give them."""
    assert parse_rational(text) == value


@pytest.mark.parametrize(
    "text",
    ["", " ", "x", "5x", "5 6", r"\frac{1}{0}", "1/0", "0^{-1}", "(5", "5)", "{5", r"\frac{1}", "--",
     "^", "1,2", r"\sqrt{2}", "nan", "inf", "1_000", "٣", "⑤", r"7\frac{5}{4}", "__import__('os')", "5//2"],
)  # fmt: skip
def test_what_is_no_plain_number(text: str) -> None:
    """Everything else is left to others, without a guess."""
    assert parse_rational(text) is None


@pytest.mark.parametrize(
    "text",
    ["9^{9^9}", "10^{1000000}", "10^{10^{10}}", "1e999999999", "2^{-100000}", "1" * 401, "(" * 30 + "5" + ")" * 30,
     "((9^64)^64)^64", "{" * 100],
)  # fmt: skip
def test_what_is_too_large_to_compute(text: str) -> None:
    """Huge numbers are refused before they are computed."""
    with pytest.raises(TooLargeError):
        parse_rational(text)


def test_how_a_number_is_written() -> None:
    """Places and figures are those of plain integers and decimals only; a sum is plain if its parts are rational."""

    def form(text: str) -> tuple[int | None, int, bool]:
        number = read_number(text)
        assert number is not None
        return number.places, number.figures, number.is_unfinished

    assert form("8.50") == (2, 3, False)
    assert form("-0.0440") == (4, 3, False)
    assert form("270") == (0, 3, False)
    assert (
        form("17/2") == form("1.5e3") == form(r"\sqrt{4}") == form("-(2)(3)") == form(r"1+\sqrt{2}") == (None, 0, False)
    )
    assert form("2+3") == form("((2-3))") == form(r"\frac{1}{2}+1+\sqrt{4}") == form(r"\sqrt{9+16}") == (None, 0, True)


@given(st.fractions())
def test_every_way_to_write_a_fraction_has_its_value(value: Fraction) -> None:
    """a/b, frac and frac with spaces are the same number."""
    p, q = value.numerator, value.denominator
    assert parse_rational(f"{p}/{q}") == parse_rational(rf"\frac{{{p}}}{{{q}}}") == value
    assert parse_rational(rf"\frac {{ {p} }} {{ {q} }}") == value


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**20), max_value=10**20))
def test_decimals_are_exact(value: object) -> None:
    """No digit is lost to floats."""
    assert parse_rational(f"{value:f}") == Fraction(str(value))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (r"\sqrt{18}", r"3\sqrt{2}"), (r"\sqrt2", r"\sqrt{2}"), (r"\sqrt 9", "3"),
        (r"\frac{8}{\sqrt3}", r"\frac{8\sqrt{3}}{3}"),
        (r"\frac{1}{1+\sqrt{2}}", r"\sqrt{2}-1"), (r"\frac{6}{\sqrt{5}-\sqrt{2}}", r"2\sqrt{5}+2\sqrt{2}"),
        (r"(1+\sqrt{3})^2", r"4+2\sqrt{3}"), (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}"), (r"\sqrt[3]{16}", r"2\sqrt[3]{2}"),
        (r"2^{1/2}", r"\sqrt{2}"), (r"8^{\frac{2}{3}}", "4"), (r"\sqrt{\frac{3}{4}}", r"\frac{\sqrt{3}}{2}"),
        (r"2\pi", r"\pi\times 2"),
        (r"\sqrt{3}/2", r"\frac{1}{2}\sqrt{3}"), (r"2(3+\sqrt5)", r"6+2\sqrt{5}"), (r"\frac{\pi^2}{\pi}", r"\pi"),
        (r"0.\overline{3}", r"\frac{1}{3}"), (r"1.2\overline{34}", r"\frac{611}{495}"), ("8 1/2", "8.5"),
        (r"62\frac12", "62.5"),
        (r"\sin 30^\circ", "0.5"), (r"\cos\frac{\pi}{6}", r"\frac{\sqrt{3}}{2}"), (r"\tan 15^\circ", r"2-\sqrt{3}"),
        (r"\log_2 8", "3"), (r"\ln e^2", "2"), (r"\log 1000", "3"), ("5!", "120"), (r"\binom{5}{2}", "10"),
        ("|-5|", "5"),
        ("3+4i", "4i+3"), ("i^2", "-1"), (r"\sqrt{-4}", "2i"), ("(x+1)(x-1)", "x^2-1"), ("2xy^2", "2y^2x"),
        (r"\frac{x}{2y}", r"\frac{1}{2}xy^{-1}"), ("x_1+x_{2}", "x_2+x_{1}"),
    ],
)  # fmt: skip
def test_exact_forms(one: str, other: str) -> None:
    """Roots, powers of pi, functions of well-known angles, complex numbers and polynomials are equal by value."""
    left, right = read_number(one), read_number(other)
    assert left is not None
    assert right is not None
    assert are_equal(left.value, right.value)
    assert not are_equal(left.value, add(right.value, constant(1)))


_TERMS = st.lists(st.tuples(st.fractions(-1000, 1000, max_denominator=50), st.integers(1, 300)), min_size=1, max_size=4)


@given(_TERMS)
def test_sums_of_roots_have_the_value_that_decimals_give(terms: list[tuple[Fraction, int]]) -> None:
    """The exact form agrees with 60-digit arithmetic that knows nothing of it."""
    text = "+".join(rf"\frac{{{c.numerator}}}{{{c.denominator}}}\sqrt{{{r}}}" for c, r in terms)
    number = read_number(text)
    assert number is not None
    with decimal.localcontext(prec=60):
        total = sum((Decimal(c.numerator) / c.denominator * Decimal(r).sqrt() for c, r in terms), Decimal(0))
        assert abs(to_decimal(number.value) - total) < Decimal("1e-40")


@given(st.integers(-720, 720))
def test_sines_agree_with_floats(degrees: int) -> None:
    """Exact or computed, the functions of angles are right."""
    number = read_number(rf"\sin {{{degrees}}}^\circ")
    other = read_number(rf"\cos {{{degrees}}}^\circ")
    assert number is not None
    assert other is not None
    assert float(to_decimal(number.value)) == pytest.approx(math.sin(math.radians(degrees)), abs=1e-12)
    assert float(to_decimal(other.value)) == pytest.approx(math.cos(math.radians(degrees)), abs=1e-12)


_PIECES = [
    *"0123456789.-+*/^(){}[]|!_exyi ",
    r"\frac",
    r"\times ",
    r"\sqrt",
    r"\pi ",
    r"\sin ",
    r"\log_",
    r"^\circ",
    r"\binom",
]


@given(st.lists(st.sampled_from(_PIECES), max_size=100).map("".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Every text gives a value, None or TooLargeError."""
    try:
        number = read_number(text)
    except TooLargeError:
        return
    assert number is None or isinstance(number, Number)
    if number is not None:
        with contextlib.suppress(NoValueError, TooLargeError):
            to_decimal(number.value)


_COSTLY = pytest.mark.parametrize(
    "unit",
    [
        "(a+b+c+d+e)(f+g+h)",
        r"\ln 2+",
        r"\sqrt[3]{2}+",
        "(a+b)^{31}",
        "2^{64}",
        "7/",
        r"\sin 1+",
        "64!",
        r"\frac{1}{1+",
        "x_1",
        "-",
    ],
)


def _read_or_refuse(text: str) -> None:
    with contextlib.suppress(TooLargeError):
        read_number(text)


@_COSTLY
def test_the_longest_texts_take_little_work(unit: str) -> None:
    """An answer of nothing but costly pieces, as long as answers may be, is read or refused within milliseconds."""
    text = (unit * 512)[:512]
    assert num_calls(lambda: _read_or_refuse(text)) < 50_000


@pytest.mark.timeout(60)
@_COSTLY
def test_texts_are_split_in_linear_time(unit: str) -> None:
    """A text 512 times as long as an answer is refused at once; a pattern that backtracks would take minutes."""
    _read_or_refuse((unit * 2**18)[: 2**18])
