"""Answers that are more than a number: lists, points, intervals, choices, equations, words."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.reward.value_profiles import is_right


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("B", r"\text{B}"), ("B", "(B)"), ("Evelyn", r"\text{evelyn}"),
        (r"\angle 1 \cong \angle 4", r"\angle 4 \cong \angle 1"), (r"3\sqrt2", r"x = 3\sqrt{2} \approx 4.24"),
        ("5, 7", "7, 5"), ("5, 7", r"x=5 \text{ or } x=7"), ("5, 7", r"\{5,7\}"), ("5,7", r"7\text{ and }5"),
        (r"\pm 3", "3, -3"), (r"2\pm\sqrt3", r"2+\sqrt{3}, 2-\sqrt{3}"), (r"\pm 3", r"x = \pm 3"),
        ("(3,-2)", r"\left(3, -2\right)"), ("(3,-2)", "(3, −2)"), ("(3,-2)", "x=3, y=-2"), ("[1,2)", r"1 \le x < 2"),
        ("[1,2)", r"1 \leq x < 2"), (r"(3,\infty)", "x>3"), ("x>3", "3<x"), (r"(-\infty,3)", "x<3"),
        (r"(-\infty,0)\cup(2,\infty)", r"x<0 \text{ or } x>2"), ("(1,2)", "1<x<2"), ("(B)", r"\textbf{(B)}"),
        ("B", "B."), ("B", "(B) 5"), ("B", "B. 12"), ("3:4", "3 : 4"), ("3:4", "6:8"), ("3:4", r"\frac{3}{4}"),
        ("yes", "Yes"), (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}"),
        ("x=1, y=2", "y = 2, x = 1"), ("x=1, y=2", "(1,2)"), ("y=2x+1", "2x-y+1=0"), ("100, 200", "100,200"),
        ("(100,200)", "(100,200)"), ("5", "5 or 5"), (r"\{1,2,3\}", r"\{3,2,1\}"), (r"\{x \mid x>3\}", "x > 3"),
        ("March 5", "march 5"), ("3:30", "3:30"), (r"x \in [1,2]", "[1,2]"), ("[1,2]", r"x\in[1,2]"),
        ("(1,2,3)", r"\langle 1,2,3\rangle"), ("x^2+y^2=4", "y^2+x^2-4=0"), (r"\text{no solution}", "No solution"),
        ("x=5 or x=7", "x=7, x=5"), ("x=5 or x=7", "5, 7"), ("2,3", "x = 2, 3"), (r"\triangle ABC", r"\triangle ABC"),
        (r"\overline{AB}", r"\overline{BA}"), ("P(2,3)", "(2, 3)"),
        ("4:15 p.m.", "4:15 PM"), (r"\frac{3}{4}", r"\frac{3}{4} = 0.75"), ("(1,2) and (3,4)", "(3,4), (1,2)"),
        (r"\{(1,2)\}", "(1,2)"), (r"x \ne 2", r"(-\infty,2)\cup(2,\infty)"), (r"\emptyset", r"\{\}"),
        (r"AB \parallel CD", r"CD \parallel AB"), ("(x-3)^2+(y+1)^2=4", "x^2-6x+y^2+2y+6=0"), ("SAS", "sas"),
        (r"\mathbb{R}", r"(-\infty, \infty)"), ("no solution", r"\emptyset"), ("101_2", "101_{2}"),
        ("all real numbers", "All real numbers."), ("3, 4, 5", "5, 3 and 4"),
        (r"(-\infty,3)\cup(3,\infty)", r"\mathbb{R}\setminus\{3\}"), ("-2<x<5", "x>-2 and x<5"),
        (r"(-\infty,2)\cup(3,\infty)", r"\{x : x<2 \text{ or } x>3\}"), (r"y=\frac{2}{x}", "xy=2"),
        ("x=3, y=4", r"\begin{cases} x=3 \\ y=4 \end{cases}"),
        (r"AB \parallel CD", r"\overline{AB} \parallel \overline{CD}"),
        (r"\begin{pmatrix}1&2\end{pmatrix}", r"\left[\begin{array}{cc}1&2\end{array}\right]"),
        ("isosceles", "It is isosceles"), ("5", "2+3=5"), ("5", r"5 = \frac{10}{2}"), ("70", r"\frac{180-40}{2} = 70"),
        ("13", r"\sqrt{5^2+12^2} = \sqrt{169} = 13"), ("70", r"180^\circ - 110^\circ = 70^\circ"),
        (r"\frac{3}{4}", r"\frac{1}{2}+\frac{1}{4} = \frac{3}{4}"), ("0", "5-5=0"),
        ("65", "x = 180 - 115 = 65"), ("65", r"m\angle A = 180^\circ - 115^\circ = 65^\circ"), ("65", "x=65=180-115"),
        ("65", r"x = \frac{180-50}{2} = 65"), ("5", r"AB = \sqrt{9+16} = \sqrt{25} = 5"), ("60", "x = 2(25)+10 = 60"),
        ("5", r"x=\sqrt{3^2+4^2}=5\approx5.0"), ("120", r"P = 30+40+50 = 120\text{ cm}"), ("8.5", "x=3+5.5=8.5"),
        (r"3\sqrt2", r"3\sqrt{2}\text{ (approximately 4.24)}"), (r"3\sqrt2", r"3\sqrt2 (or about 4.24)"),
        (r"3\sqrt2", r"3\sqrt{2} \text{ (approx. }4.24)"), (r"8\pi", r"8\pi \text{ (roughly } 25.1)"),
        (r"\sqrt{7}", r"\sqrt{7} roughly 2.65"), (r"8\pi", r"8\pi, or approximately 25.1"),
        ("24", r"A = \frac{1}{2}bh = \frac{1}{2}(6)(8) = 24"), (r"8\pi", r"C = 2\pi r = 8\pi"),
        ("5", "PR = PQ + QR = 5"),
        ("12", "AB = CD = 12"), ("65", r"m\angle 1 = m\angle 2 = 65^\circ"), ("12", "x = C = 12"), ("5", "x = y = 5"),
        (r"8\pi", r"C = 2\pi r \approx 25.13"), ("5", "PR = PQ + QR = 2+3 = 5"), (r"\pi", r"x = 2y = \pi"),
        (r"A = bh = 24", "24"), ("65", r"m\angle 1 = 180 - m\angle 2 = 65"), ("60", "V = lwh = 3(4)(5) = 60"),
        ("40", r"m\angle C = \frac{1}{2} m\widehat{AB} = \frac{80}{2} = 40"),
        ("65", r"x = 180 - \angle ABC = 65^\circ"),
        ("5", r"c = \sqrt{a^2+b^2} = 5"), ("5", r"c = \sqrt{a^{2}+b^{2}} = \sqrt{3^2+4^2} = 5"),
        ("5", r"s = \sqrt A = 5"), ("5", r"x = \sqrt{a\sqrt{b}} = 5"),
        ("5", r"d = \sqrt{(x_2-x_1)^2+(y_2-y_1)^2} = \sqrt{9+16} = 5"),
        ("5", r"AC = \sqrt{AB^2 + BC^2} = 5 \text{ cm}"), ("3", r"s = \sqrt[3]{V} = \sqrt[3]{27} = 3"),
        (r"3\sqrt{2}", r"r = \sqrt{\frac{A}{\pi}} = 3\sqrt2 \approx 4.24"),
        ("5", r"h = b\sin\theta = 5"), ("5", r"a = c\cos A = 10 \cos 60^\circ = 5"), ("5", r"x = \frac{a}{b+c} = 5"),
        ("5", r"x = \frac{AB \cdot CD}{AB + CD} = \frac{20}{4} = 5"), ("5", r"x = \frac{a\sin B}{\sin 2\beta} = 5"),
        ("5", r"c = \sqrt{a^2+b^2-2ab\cos C} = 5"), ("5", r"c = \frac{\sqrt{a}}{\sqrt{b}} = 5"),
        ("5", r"\theta = \arctan\left(\frac{a}{b}\right) = 5^\circ"), ("5", r"x = \sqrt{a} - \sqrt{b} = 5"),
        ("5", r"h = \sqrt{a} - x = 5"),
        ("5", r"x = \log_2 y = 5"), ("5", r"x = \sin^2\theta + \cos^2\theta = 5"),
        ("14.1", r"\text{approximately }14.1"), ("14.1", "Approx. 14.1"), (r"10\sqrt{2}", "approximately 14.14"),
    ],
)  # fmt: skip
def test_right_structures(gold: str, answer: str) -> None:
    """The same structure of the same values is right, however it is written."""
    assert is_right(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("B", "C"), ("Evelyn", "nylevE"), ("5", "5 or 6"), ("5", "5, 6"), ("5", r"\sum_{k=1}^{5} 1"),
        ("5", "5 hundred"), ("5", "five"), ("5", "2+3=6"), ("(3,-2)", "(-2,3)"), ("(3,-2)", r"\{3,-2\}"),
        ("3", r"\pm 3"), (r"\pm 3", "3"), ("x>3", r"x \ge 3"), ("x>3", "x<3"), ("[1,2]", "(1,2)"), ("3:4", "4:3"),
        ("x>3", "y>3"), ("5", "x>5"), ("3", "(3,3)"), ("5", r"\int_0^5 1 dx"), ("12", r"\det A = 12"),
        ("5", "5 million"), ("B", "B or C"), ("B", "(B) or (C)"), ("5", "x+5=10"), ("5", r"5 \neq 6"), ("1,2", "1"),
        (r"3\sqrt2", r"3\sqrt2 \approx 5"), ("5", r"4 \approx 5"), ("5, 7", "5, 8"), ("1000", "1,00"),
        ("5", "between 4 and 6"), ("5", "5=5"), ("5", "x=5=y"), ("8", "2x=16"), ("(2,3)", "[2,3]"),
        ("5", r"\frac{5}{0}"), ("5", r"5\%5"), ("7", r"\text{about }7"), ("7", "6<7<8"), ("7", r"7 \pm 0"),
        ("x=5", "x^2=25"), ("5", "10/2, 5.1"), ("Evelyn", "Evelyn or Bob"), ("x=4", "2x=8"), ("5", "not x = 5"),
        (r"\triangle ABC", r"\triangle ACB"), ("SAS", "SSA"), ("cat", "act"), ("4:15 p.m.", "4:15 AM"),
        ("(1,2) and (3,4)", "(2,1), (3,4)"), (r"\{1,2\}", r"\{1,2,3\}"), (r"\emptyset", r"\{0\}"),
        ("y=2x+1", "y=2x-1"), ("y=2x+1", "x=2y+1"), ("x^2+y^2=4", "x^2+y^2=5"),
        (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}2&1\end{pmatrix}"), ("3, 4, 5", "3, 4"), ("A, C", "A"),
        ("[1,2)", "(1,2]"), (r"x \ge 3", r"x \le 3"), ("1:2:3", "1:2"), ("0", "0 = 0"),
        ("5", r"x=4.6 \approx 5"), ("5", "x=4.6=5"), ("65", "x = 180 - 115 = 66"), ("65", "x = 180 - 116 = 65"),
        ("5", r"4.6 \approx 5"), ("5", r"\not=5"), ("5", r"x \text{ is not } 5"), ("5", "x is 5 or 6"),
        ("12:30", "2:5"), ("10:30", r"\frac{1}{3}"), ("y^x+5", "y^x+٥"), ("204_5", "204_6"), ("204_5", "204"),
        ("(B) 7", "(B) 8"), ("B", "B. A"), ("B", "B) not"),
        ("f(2)=5", "f(3)=5"), (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}"),
        (r"\{1,2\}", "x=1, y=2"), (r"y=\frac{2}{x}", "xy=3"), (r"y=\frac{2}{x}", "x^2y=2x"), ("5", r"x + 1 = \log 5"),
        ("-2<x<5", "x>-2 and x<4"), (r"(-\infty,3)\cup(3,\infty)", r"\mathbb{R}\setminus\{3,4\}"),
        (r"5\text{ cm}", "5m"), ("5", "2+3=1+4"), ("5", "2+3=5=6"), ("5", "2+3=5 or 2+4=6"),
        (r"3\sqrt2", r"3\sqrt2 \text{ (approximately 5)}"), ("4.24", r"4\sqrt2 \text{ (approximately 4.24)}"),
        ("5", r"4.6 \text{ (about 5)}"), ("7", r"\text{(approximately 7)}"), (r"10\sqrt{2}", "approximately 14.1"),
        ("24", r"A = \frac{1}{2}bh = \frac{1}{2}(6)(8) = 25"), ("24", "A = bh = 6(5) = 24"), ("5", "x = y = 5 = 6"),
        ("24", "A = bh = 24 = xy = 24"), ("5", "PR = PQ + QR = 2+3"), ("5", "x = 5 = 2y"), ("6", "x = y = 5 or 6"),
        ("65", r"m\angle 1 = 180 - m\angle 2 = 66"), ("65", r"m\angle 1 = 65 = 180 - m\angle 2"),
        ("5", r"x = \sum y = 5"),
        ("bh", "A = bh = 24"), ("25.1", r"C = 25.1 = 8\pi"), ("5", r"x = y = \pm 5"), ("5", "2x = y = 5"),
        ("5", "x = 6 = y = 5"), ("5", r"c = \sqrt{a^2+b^2} = \sqrt{3^2+5^2} = 5"), ("5", r"c = \sqrt{a^2+b^2}"),
        ("5", r"c = 5 = \sqrt{a^2+b^2}"), ("5", r"c = \sqrt{a^2+b^2} = 5 \text{ or } 6"), ("5", r"x = \sqrt{36} = 5"),
        ("5", r"x = \sqrt{36 \text{ cm}^2} = 5"), ("5", r"x = \sqrt{6, y} = 5"), ("5", r"2c = \sqrt{y} = 5"),
        ("5", r"c = \sqrt{\sum y} = 5"), ("5", r"c = \sqrt{a} = 6 = \sqrt{b} = 5"), ("5", r"c = \sqrt{y = 5"),
        ("5", r"x = \sin\pi = 5"), ("5", r"x = \sin 30^\circ = 5"), ("5", r"x = \frac{6}{2} = 5"),
        ("5", r"x = \frac{\sqrt{36}}{2} = 5"), ("5", r"x = b\sin\theta"), ("5", r"x = 5 = b\sin\theta"),
        ("5", r"x = b\sin\theta = 6 = 5"), ("5", r"x = b\sin\theta = 5 \text{ or } 6"), ("5", r"x = \frac{a} = 5"),
        ("5", r"x = \frac{a}{\sum y} = 5"), ("5", r"x = \sin(a, b) = 5"), ("5", r"x = \sin = 5"),
        ("normal", "approximately normal"), ("0.5", "approx.5"), ("5", "approximately 5 or 6"),
    ],
)  # fmt: skip
def test_wrong_structures(gold: str, answer: str) -> None:
    """Other orders, bounds, signs, members and statements are wrong."""
    assert not is_right(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer", "correct"),
    [
        ("(8.5, 3)", "(8.46, 3)", True),
        ("(8.5, 3)", "(8.46, 3.01)", False),
        (r"(\frac{1}{3}, 2)", "(0.3333, 2)", True),
        ("8.5, 9.5", "9.54, 8.46", True),
    ],
)
def test_members_follow_the_rules_of_numbers(gold: str, answer: str, correct: bool) -> None:
    """The tolerance and the rule of decimals hold for each member on its own."""
    assert is_right(gold, answer, "geo3k") is correct


_ITEMS = st.lists(st.integers(-99, 99), min_size=2, max_size=5, unique=True)


@given(_ITEMS, st.randoms())
def test_sets_are_unordered_and_points_ordered(items: list[int], random: Random) -> None:
    """Any order of a set is right; a point is right in its own order only."""
    shuffled = random.sample(items, len(items))
    one, other = ", ".join(map(str, items)), ", ".join(map(str, shuffled))
    assert is_right(rf"\{{{one}\}}", rf"\{{{other}\}}")
    assert is_right(one, " and ".join(f"x = {item}" for item in shuffled))
    assert is_right(f"({one})", rf"\left({other}\right)") is (items == shuffled)


@given(low=st.integers(-50, 50), width=st.integers(1, 50), closed=st.tuples(st.booleans(), st.booleans()))
def test_an_inequality_is_its_interval(low: int, width: int, closed: tuple[bool, bool]) -> None:
    """Both directions; the other kind of end is wrong."""
    high = low + width
    opening, closing = "[" if closed[0] else "(", "]" if closed[1] else ")"
    interval = f"{opening}{low}, {high}{closing}"
    left, right = (r"\le" if each else "<" for each in closed)
    assert is_right(interval, f"{low} {left} x {right} {high}")
    assert is_right(f"{low} {left} x {right} {high}", interval)
    wrong = "<" if closed[0] else r"\le"
    assert not is_right(interval, f"{low} {wrong} x {right} {high}")
