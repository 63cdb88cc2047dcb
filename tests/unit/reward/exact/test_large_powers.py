"""Numbers with powers that are too large to write out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.verdict_status import Status
from services.reward.exact.large_powers import read_large
from services.reward.verdict import Finding
from tests.support.reward.value_profiles import is_right, verify


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("2^{100}", "4^{50}"), ("2^{100}", "1267650600228229401496703205376"), ("2^{2024}", r"2^{2023} \cdot 2"),
        ("2^{2024}-1", r"(2^{1012}-1)(2^{1012}+1)"), (r"\frac{1}{2^{100}}", "2^{-100}"), ("2^{100}", "x = 2**100"),
        ("10^{100}", r"1.0 \times 10^{100}"), (r"6.02 \times 10^{200}", r"602 \cdot 10^{198}"), ("4", "2^{100}/2^{98}"),
        ("10^{10^{10}}", "100^{5000000000}"), ("3^{100}", "(-3)^{100}"), ("2^{1000}", "(2^{50})^{20}"),
        ("x = 2^{100}", "x = 4^{50}"), ("x^{100}", "x^{100}"), (r"\frac{3^{80}-1}{2}", r"\frac{9^{40}-1}{2}"),
    ],
)  # fmt: skip
def test_the_same_number_is_right(gold: str, answer: str) -> None:
    """However it is written."""
    assert is_right(gold, answer)
    assert is_right(gold, answer, "geo3k")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("2^{2024}", "2^{2025}"), ("2^{2024}", "2^{2024}-1"), ("2^{2024}-1", "2^{2024}+1"), ("3^{100}", "-3^{100}"),
        ("2^{101}", "2^{100}+2^{100}"), ("2^{100}", "2^{100}+0"), ("10^{100}", "10^{10}"), ("2^{100}", "2"),
        ("x = 2^{100}", "y = 4^{50}"), ("2^{100}", "x^{100}"), ("2^{100}", r"2^{100} \text{ or } 3^{100}"),
        ("2^{100}", "1.2676506 \\times 10^{30}"), ("5", "9^{9^{9^9}}"), ("7", "7 + 0^{100}"),
        ("2^{100}", r"\frac{1}{0^{100}}"),
    ],
)  # fmt: skip
def test_another_number_is_wrong(gold: str, answer: str) -> None:
    """So are sums that could have been carried out."""
    assert not is_right(gold, answer)


@given(base=st.integers(2, 99), power=st.integers(65, 10**12), parts=st.integers(1, 60), other=st.integers(1, 10**9))
def test_powers_are_split_and_joined(base: int, power: int, parts: int, other: int) -> None:
    """b^p = b^q b^(p-q), and not b^p times or plus something."""
    gold, split = f"{base}^{{{power}}}", rf"{base}^{{{power - parts}}} \cdot {base}^{{{parts}}}"
    assert is_right(gold, split)
    assert not is_right(gold, rf"{base}^{{{power + other}}}")
    assert not is_right(f"{gold} + {other}", f"{gold} + {other + 1}")
    assert is_right(f"{gold} + {other}", f"{other} + {gold}")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^9}}",
        "2^{" + "9" * 30 + "}",
        "((2^{99})^{99})^{99}",
        "2^{99}" * 20,
        "(" * 99 + "2^{99}" + ")" * 99,
        "9!^{99}",
    ],
)
def test_what_is_beyond_the_bounds_is_not_tried(text: str) -> None:
    """The status says so; most of these would never end."""
    finding = verify(["2^{100}"], rf"\boxed{{{text}}}")
    assert isinstance(finding, Finding)
    assert (finding.status, finding.credit) == (Status.TOO_LARGE, 0)


def test_remainders_stand_for_values() -> None:
    """Equal where numbers are, with what says whether a sum is in it; nothing else has one."""
    assert read_large("2^{100}") == read_large("4^{50}") != read_large("2^{101}")
    assert read_large("2^{99}+2^{99}") == ((read_large("2^{100}") or (0,))[0], True)
    assert read_large(r"\sqrt{2^{100}}") is read_large("x^{100}") is read_large("2^{1/2}") is read_large("") is None
