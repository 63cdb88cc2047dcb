"""One spelling for answers that mean the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.answers.normalisation import normalise


@pytest.mark.parametrize(
    ("text", "body", "unit"),
    [
        ("−5", "-5", ""),
        ("５", "5", ""),
        ("½", r"\frac{1}{2}", ""),
        ("3√2", r"3\sqrt{2}", ""),
        ("2π", r"2\pi", ""),
        ("x²", "x^2", ""),
        (r"\dfrac{1}{2}", r"\frac{1}{2}", ""),
        (r"$\left(3,-2\right)$", "(3,-2)", ""),
        (r"\text{Evelyn}", "Evelyn", ""),
        (r"\boxed{5}", "5", ""),
        ("1,000", "1000", ""),
        ("1{,}000", "1000", ""),
        (r"1\,000", "1000", ""),
        ("1,000,000.5", "1000000.5", ""),
        ("1, 000", "1, 000", ""),
        ("1,0000", "1,0000", ""),
        ("270.", "270", ""),
        ("62.5°", "62.5", "degree"),
        (r"62.5^\circ", "62.5", "degree"),
        (r"62.5^{\circ}", "62.5", "degree"),
        (r"270 \text{ degrees}", "270", "degree"),
        (r"\sin 30^\circ", r"\sin 30^\circ", ""),
        ("12 cm", "12", "cm"),
        ("12cm", "12", "cm"),
        (r"12\ \mathrm{cm}", "12", "cm"),
        (r"270\,\text{cm}^2", "270", "cm2"),
        ("40 square inches", "40", "in2"),
        ("12 meters", "12", "m"),
        ("3m", "3m", ""),
        (r"50\%", "50", "%"),
        ("5\x00", "5", ""),
        ("\u202e5\u200b", "5", ""),
        ("5\ud800", "5\ufffd", ""),
    ],
)
def test_signs_layout_and_units(text: str, body: str, unit: str) -> None:
    """Unicode signs, LaTeX layout, thousands separators, degrees and units are written one way."""
    answer = normalise(text)
    assert (answer.body.replace(" ", ""), answer.unit) == (body.replace(" ", ""), unit)


@pytest.mark.parametrize(
    ("text", "name", "body"),
    [
        ("x = 5", "x", "5"),
        (r"m\angle ABC = 45^\circ", r"m\angleABC", "45"),
        ("AB=12", "AB", "12"),
        ("y=2x+1", "y", "2x+1"),
        ("2x-y+1=0", "", "2x-y+1=0"),
        ("x = 5 or x = 7", "", "x = 5 or x = 7"),
        ("x <= 5", "", "x <= 5"),
        ("x =", "", "x ="),
        (r"x_{1} = 3", "x_{1}", "3"),
        (r"\overline{AB} = 3", r"\overline{AB}", "3"),
        (r"\sum_{k=1}^{100} k", "", r"\sum_{k=1}^{100} k"),
    ],
)
def test_names(text: str, name: str, body: str) -> None:
    """`x =` is taken off where one name is given to one value."""
    answer = normalise(text)
    assert (answer.name, answer.body) == (name, body)


@given(st.text(max_size=512))
def test_any_text_becomes_text_that_can_travel(text: str) -> None:
    """Whatever is in the text, surrogates and controls do not come out."""
    answer = normalise(text)
    answer.text.encode()
    assert "\x00" not in answer.text


@given(st.integers(-(10**12), 10**12))
def test_thousands_separators_do_not_change_a_number(number: int) -> None:
    """1,234,567 is 1234567."""
    assert normalise(f"{number:,}").body == str(number)
