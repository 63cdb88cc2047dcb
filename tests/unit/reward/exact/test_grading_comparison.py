"""Symbolic comparison: what is equal, and what a lenient comparison would take for equal."""

import pytest

from penstock.verdict_status import Status
from services.reward.isolation.tasks import SymbolicGold, SymbolicTask
from services.reward.worker_tasks.symbolic import compare

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def _credit(gold: str, answer: str, *, value: str = "", tolerance: str = "0") -> float:
    symbolic = SymbolicGold(text=gold, use_text=False, value=value, tolerance=tolerance, decimal_figures=4)
    return compare(SymbolicTask(golds=(symbolic,), body=answer, text=answer)).credit


_EQUAL = [
    ("(x+1)^2", "x^2+2x+1"),
    (r"\frac{x}{2}", "x/2"),
    (r"\frac{x}{2}", "0.5x"),
    (r"\frac{1}{x}", "x^{-1}"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"2\frac{1}{2}x", r"\frac{5x}{2}"),
    (r"\sin x \cos x", r"\frac{1}{2}\sin(2x)"),
    (r"\tan x", r"\frac{\sin x}{\cos x}"),
    (r"\sin^2 x", r"1-\cos^{2}{x}"),
    (r"\sin 20^\circ", r"\cos 70^{\circ}"),
    (r"\arctan x", r"\tan^{-1} x"),
    (r"\sqrt{x^2}", "|x|"),
    (r"\sqrt[3]{x}", r"x^{\frac{1}{3}}"),
    (r"2\ln x", r"\ln x^2"),
    (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
    (r"\log 2", r"\log_{10}(2)"),
    ("e^{x+1}", r"e \cdot e^x"),
    ("2^x 3^x", "6^x"),
    (r"\frac{\pi}{2}+2k\pi", r"2\pi k+\frac{\pi}{2}"),
    ("x_1+x_2", "x_{2}+x_{1}"),
    ("(2+i)^2", "3+4i"),
    ("e^2", "7.389"),
    (r"\sqrt[3]{2}", "1.260"),
    ("1", r"\tan(\arctan 1)+\cos\frac{\pi}{2}"),
    ("1", r"\arctan(\tan 1)+\sin(2\pi)"),
    ("1", r"\sin(\arctan(1)\cdot 2)+\cos\frac{\pi}{2}"),
    ("2", r"2+\arcsin(\sin\pi)"),
    ("45", r"\arctan(1)\cdot\frac{180}{\pi}+\sin\pi"),
    ("y=2x+1", "2x-y+1=0"),
    ("y=2x+1", "2y=4x+2"),
    ("x^2=4", "(x-2)(x+2)=0"),
    ("xy=1", r"y=\frac{1}{x}"),
    ("f(x)=2x", "f(x)=x+x"),
    ("x>3", "3<x"),
    ("x>3", "-2x<-6"),
    (r"1<x\le 2", r"2 \ge x > 1"),
    ("x^2<4", "-2<x<2"),
    ("[1,2)", r"1 \le x < 2"),
    (r"(-\infty,-1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,-1)"),
    (r"\{x+1, 2\}", r"\{2, 1+x\}"),
    ("(x+1, 2)", "(1+x, 2)"),
    ("x=1, y=2x", r"y=x+x, x=1"),
    (r"\begin{pmatrix}1&2\\3&x+x\end{pmatrix}", r"\begin{bmatrix}1&2\\3&2x\end{bmatrix}"),
    ("n!", r"n\cdot (n-1)!"),
    (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
    (r"\sum_{k=1}^n k", r"\frac{n(n+1)}{2}"),
]


@pytest.mark.parametrize(("gold", "answer"), _EQUAL)
def test_the_same_is_right(gold: str, answer: str) -> None:
    """However it is written, and whichever of the two is the gold answer."""
    assert _credit(gold, answer) == 1
    if answer not in ("7.389", "1.260") and "sum" not in gold:
        assert _credit(answer, gold) == 1
    assert _credit(gold, gold) == 1


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("2x+1", "2y+1"),
        ("x", r"\sqrt{x^2}"),
        ("x", "|x+100|-100"),
        ("x", r"x \tanh(1000)"),
        ("x^2+y^2=4", r"y=\sqrt{4-x^2}"),
        (r"\{2x, 1\}", r"\{x2, 1\}"),
        ("x", "X"),
        ("|x|", "x"),
        (r"\sin x", r"\cos x"),
        ("x+1", "x+1.0000001"),
        ("x", "x+10^{-50}"),
        ("x", r"x+\exp(-1000)"),
        ("x", "x+0." + "0" * 150 + "1"),
        ("x=e^{-1000}", "x=0"),
        ("x=e^{-1000}", "x=e^{-2000}"),
        (r"\frac{x}{3}", "0.333333x"),
        (r"\pi x", "3.14159x"),
        (r"\sqrt{2}+\ln 2", "2.1073606"),
        ("e^2", "7.39"),
        ("e^2", "7.3890560"),
        ("x+1", "x+1=x+1"),
        ("x", "x=x"),
        ("x", "True"),
        ("x", r"\{x\}"),
        ("x", "x, x"),
        (r"\{1,x\}", "x"),
        ("x+1", r"x+1 \text{ or } x+2"),
        ("x+1", "x+1, x+2"),
        ("x+1", "x+1 hello"),
        ("(x, y)", "(y, x)"),
        ("(x, 1)", r"\{x, 1\}"),
        (r"\{x, x, y\}", r"\{x, y, y\}"),
        ("[1,x)", "(1,x)"),
        ("x=5", "5=5"),
        ("x=5", "x=5=6"),
        ("y=x", "y=x+1=x"),
        ("y=2x+1", "y=2x+2"),
        ("xy=1", "xy=2"),
        ("xy=1", "0=0"),
        ("x^2=4", "x=2"),
        ("x^2=-1", "x^2=-2"),
        ("x>3", "x<3"),
        ("x>3", r"x \ge 3"),
        ("x>3", "-x>-3"),
        ("1<x<2", "1<x<3"),
        (r"\pm 3", "3"),
        (r"\begin{pmatrix}1&x\end{pmatrix}", r"\begin{pmatrix}1\\x\end{pmatrix}"),
        (r"\frac{n(n+1)}{2}", r"\sum_{k=1}^n k"),
        ("f(x)=2x", "f(x)=2x+1"),
        ("ab", "a+b"),
    ],
)
def test_what_is_not_the_same_is_wrong(gold: str, answer: str) -> None:
    """Near, of another kind, in other variables, or hedged."""
    assert _credit(gold, answer) == 0


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        (r"\log_2 32", True),
        (r"\binom{5}{4}", True),
        (r"\sqrt{25}", True),
        (r"5 \sin 90^\circ", True),
        (r"\sqrt{25.00000001}", False),
        ("5.0000001", False),
        ("5+10^{-60}", False),
        ("x=5", False),
        ("5=5", False),
        ("5, 5", False),
        (r"\{5\}", False),
        ("(5,6)", False),
        ("4<x<6", False),
        ("[5,5]", False),
        ("x-x+5", False),
        ("5+0i", True),
        ("5+10^{-40}i", False),
        (r"\frac{5}{0}", False),
        (r"\infty", False),
        ("2 3", False),
        ("5 x", False),
        (r"\sum_{k=1}^{5} 1", False),
        ("True", False),
    ],
)
def test_a_number_is_matched_by_a_number_only(answer: str, is_right: bool) -> None:
    """By its exact value, whatever function it is made with; by no relation, set or work that is left to do."""
    assert _credit("5", answer, value="5") == is_right


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        (r"\arcsin(\sin\pi)", True),
        (r"4\arctan(1)-\pi", True),
        (r"\arcsin(10^{-64}\cdot 10^{-64})", False),
        (r"\arctan(e^{-1000})", False),
    ],
)
def test_only_rounding_errors_count_as_zero(answer: str, is_right: bool) -> None:
    """A computed zero is never exact, but it is smaller with more digits; a number that is not zero stays."""
    assert _credit("0", answer, value="0") == is_right


def test_a_rounded_label_has_a_tolerance() -> None:
    """Within it is right, beyond it is wrong."""
    assert _credit("8.5", r"6\sqrt{2}", value="17/2", tolerance="1/20") == 1
    assert _credit("8.4", r"6\sqrt{2}", value="42/5", tolerance="1/20") == 0
    assert _credit("8.45", r"8.5\cos 0", value="169/20", tolerance="1/20") == 1


def test_statuses() -> None:
    """A gold answer that cannot be read is told from an answer that cannot; one that can be read is enough."""
    golds = [SymbolicGold(text=text, use_text=False, value="", tolerance="0") for text in (r"\frac{", r"\frac{1}{x}")]
    for some, answer, status, credit in (
        (golds[:1], "x", Status.GOLD_INVALID, 0),
        (golds[1:], r"\frac{", Status.UNPARSEABLE, 0),
        (golds, "x^{-1}", Status.OK, 1),
        (golds, "x", Status.OK, 0),
    ):
        reply = compare(SymbolicTask(golds=tuple(some), body=answer, text=answer))
        assert (reply.status, reply.credit) == (status, credit)


def test_an_equation_is_compared_with_the_whole_answer() -> None:
    """The name that an answer was given is part of the equation that the gold answer is."""
    gold = SymbolicGold(text="y=2x+1", use_text=True, value="", tolerance="0")
    assert compare(SymbolicTask(golds=(gold,), body="2x+1", text="y=1+2x")).credit == 1
