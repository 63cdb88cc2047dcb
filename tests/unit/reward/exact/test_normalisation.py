"""One spelling for answers that mean the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.exact.text.normalisation import normalise


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("−5", "-5"), ("５", "5"), ("½", r"\frac{1}{2}"), ("7¾", r"7\frac{3}{4}"), ("3√2", r"3\sqrt{2}"),
        ("√(3)", r"\sqrt(3)"), ("∛5", r"\sqrt[3]{5}"), ("2π", r"2\pi"), ("x²", "x^{2}"), ("10⁻³", "10^{-3}"),
        ("x₁", "x_{1}"), ("𝟓", "5"), ("30° 15′", r"30^\circ15'"), ("5…", "5..."), ("x ≤ 3", r"x\le3"),
        ("x <= 3", r"x\le3"), ("a ≠ b", r"a\neb"), ("∞", r"\infty"), ("A ∪ B", r"A\cupB"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"), (r"\tfrac12", r"\frac12"), (r"$\left(3,-2\right)$", "(3,-2)"),
        (r"\text{Evelyn}", "Evelyn"), (r"\textbf{(B)}", "(B)"), (r"\boxed{5}", "5"), (r"\mathrm{cm}", "cm"),
        (r"\displaystyle 5", "5"), (r"\color{red}{25}", "{25}"), (r"5\,\;\!\quad", "5"), (r"\(5\)", "5"),
        (r"\therefore 5", "5"),
        ("1,000", "1000"), ("1{,}000", "1000"), (r"1\,000", "1000"), ("1 000", "1000"), ("1\u2009000", "1000"),
        ("1,000,000.5", "1000000.5"), ("1, 000", "1,000"), ("1,0000", "1,0000"), ("(100,200)", "(100,200)"),
        (r"\{100,200\}", r"\{100,200\}"), ("1,2,3", "1,2,3"), ("270.", "270"), ("= 5", "5"), (r"\approx 5", "5"),
        ("62.5°", r"62.5^\circ"), (r"62.5^{\circ}", r"62.5^\circ"), (r"62.5\degree", r"62.5^\circ"),
        (r"62.5^\degree", r"62.5^\circ"), ("62.5 degrees", r"62.5^\circ"), ("sqrt(2)", r"\sqrt(2)"), ("2pi", r"2\pi"),
        (r"\$5", r"\dollar5"), ("5\x00", "5"), ("\u202e5\u200b", "5"), ("5\ud800", "5\ufffd"), (r"4{:}15", "4:15"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ],
)  # fmt: skip
def test_signs_layout_and_thousands(text: str, plain: str) -> None:
    """Unicode signs, LaTeX layout and synonyms, and thousands separators are written one way."""
    assert normalise(text).replace(" ", "") == plain


def test_commas_can_be_kept_apart() -> None:
    """What is a thousand may also be a list."""
    assert normalise("100,200", join_thousands=False) == "100,200"


@given(st.text(max_size=512))
def test_any_text_becomes_text_that_can_travel(text: str) -> None:
    """Whatever is in the text, surrogates and controls do not come out."""
    plain = normalise(text)
    plain.encode()
    assert "\x00" not in plain


@given(st.integers(-(10**12), 10**12))
def test_thousands_separators_do_not_change_a_number(number: int) -> None:
    """1,234,567 is 1234567."""
    assert normalise(f"{number:,}") == str(number)
    assert normalise(f"{number:,}".replace(",", "{,}")) == str(number)
    assert normalise(f"{number:,}".replace(",", "\\,")) == str(number)
