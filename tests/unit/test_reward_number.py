"""Plain numbers as exact rationals."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.answers.number import TooLargeError, is_written_decimal, parse_rational


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
    ["", " ", "x", "5x", "5 6", "1+1", r"\frac{1}{0}", "1/0", "0^{-1}", "2^{1/2}", "(5", "5)", "{5", r"\frac{1}", "--",
     "^", "1,2", r"\sqrt{2}", "5!", "nan", "inf", "1_000", "٣", r"7\frac{5}{4}", "__import__('os')", "5//2", "2**3"],
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


def test_written_decimals() -> None:
    """A decimal is what has a point and digits after it."""
    assert all(map(is_written_decimal, ["8.5", "10.0", "-0.44", ".5", " 357.0 "]))
    assert not any(map(is_written_decimal, ["8", "270.", "17/2", r"\frac{1}{2}", "8.5x", "1.5e3", "", "."]))


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


@given(st.lists(st.sampled_from([*"0123456789.-+*/^(){}e ", r"\frac", r"\times "]), max_size=64).map("".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Every text gives a value, None or TooLargeError."""
    try:
        value = parse_rational(text)
    except TooLargeError:
        return
    assert value is None or isinstance(value, Fraction)
