"""The profiles of value equality: numbers, units, decimals, tolerance, statuses, and what they never ask a worker."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.verdict_status import Status
from services.reward.exact.comparison import Side
from services.reward.profiles.profile import Undecided
from services.reward.verdict import Finding, Method
from tests.support.calls import num_calls
from tests.support.reward.value_profiles import PROFILES, is_right, verify


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("62.5", r"\frac{125}{2}"), ("62.5", "62.50"), ("62.5", r"62 \frac{1}{2}"), ("45", r"45^\circ"),
        (r"45^\circ", "45"), ("12", r"12\text{ cm}"), ("12 cm", "12"), ("5", "x=5"), ("x=5", "5"), ("1000", "1,000"),
        ("-5", "−5"), ("50", r"50\%"), ("0.5", r"50\%"), (r"3 \sqrt{2}", r"3\sqrt{2}"),
        (r"\frac { 40 } { 3 }", r"\frac{40}{3}"), (r"3\sqrt2", "4.243"), (r"3\sqrt2", r"\sqrt{18}"),
        (r"3\sqrt2", "√18"), (r"3\sqrt2", "3√2"), (r"\frac{8}{\sqrt3}", r"\frac{8\sqrt{3}}{3}"), ("3+4i", "4i+3"),
        ("y=2x+1", "y = 1+2x"), ("y=2x+1", "2x+1"), ("1.2 m", "120 cm"),
        (r"12 \text{ cm}^2", r"12\ \text{square centimeters}"), ("60 mph", "60 miles per hour"),
        ("5 m/s", r"18\text{ km/h}"), ("5", r"\$5"), ("5 dollars", r"\$5.00"), (r"\frac{1}{3}", "0.3333"),
        (r"\frac13", r"0.\overline{3}"), ("45", r"m\angle ABC = 45^\circ"), ("12", "AB = 12"),
        ("x^2+2x+1", "(x+1)^2"), (r"12+4\sqrt3+2\sqrt6", r"2\sqrt{6}+4\sqrt{3}+12"), (r"8\pi", "8π"),
        (r"8\pi", "25.13"), (r"60^\circ", r"\frac{\pi}{3}\text{ rad}"), ("1000", "1 000"), ("1000", "1{,}000"),
        ("1000000", "1,000,000"), ("6", "3!"), ("10", r"\binom{5}{2}"), ("2", r"\log_2 4"),
        (r"\frac{1}{2}", r"\sin 30^\circ"), ("5", r"\boxed{5}"), (r"1.5\times10^3", "1500"), ("7", "7 units"),
        ("7", r"7\text{ sq units}"), (r"40\%", "0.4"), ("0.5", "½"), ("x=3", "3=x"),
        (r"\frac{\sqrt{3}}{2}", "sqrt(3)/2"), (r"2\pi", "2pi"), ("32", "2^5"), (r"\sqrt[3]{2}", "2^{1/3}"),
        (r"\frac{1}{2}", "1/2"), ("90", r"90\text{ degrees}"), ("5", r"\approx 5"), (r"4.5 \times 10^{-3}", "0.0045"),
        (r"1+\sqrt2", r"\sqrt{3+2\sqrt2}"), (r"\frac{15}{2}\sqrt3", r"\frac{15\sqrt{3}}{2}"),
        (r"\frac{1}{2}", r"\frac{x}{2x}"), ("AB", "BA"), ("12x^2", "12 x^{2}"), ("5 apples", "5 apples"),
        (r"\tan 35^\circ", "0.7002"), (r"\frac{3}{4} \text{ ft}", r"9 \text{ in}"), (r"0.\overline{6}", "0.666..."),
        ("150 cents", r"\$1.50"), (r"\frac{1}{3}", r"33.33\%"), (r"\sqrt{2}", "1.414213562"), ("30.25°", "30° 15'"),
        (r"5\text{ m}", "5m"), (r"5\text{ km}", "5000m"), (r"\frac{\pi}{6}", r"30^\circ"), ("19", "[ABC] = 19"),
        ("19", r"|\overline{AB}| = 19"), ("19", r"\overset{\frown}{BC} = 19^\circ"),
        ("19", r"\text{The answer is } 19"),
        ("19", r"19 \text{ (since } x > 0)"), ("19", r"19 \frac{\text{m}}{\text{s}}"), ("19", r"\text{length: } 19"),
        (r"\frac{3\sqrt{2}}{2}", r"\frac{6 \sqrt{8}}{8}"), (r"\frac{0\sqrt{2}}{2}", "0"), ("f(2)=5", "5"),
        (r"\frac{3}{4}", r"\cos\theta = \frac34"), (r"\frac{3}{4}", r"\sin(\alpha) = \frac34"),
        ("12", r"x^\circ = 12^\circ"),
        (r"\frac{2}{3}", r"\frac{AB}{DE} = \frac{2}{3}"), (r"\frac{AB}{DE} = \frac{2}{3}", r"\frac46"),
        (r"\frac{AB}{DE} = \frac{2}{3}", r"\frac{DE}{AB} = \frac{3}{2}"), ("2:3", r"\frac{AB}{DE} = \frac{2}{3}"),
        (r"\cos\theta = \frac{3}{4}", "0.75"), ("x = 12", r"x^{\circ} = 12^{\circ}"), ("y = 2x", r"y^\circ = 2x^\circ"),
        (r"-\frac{1}{2}", r"\cos\frac{2\pi}{3} = -\frac12"), (r"\frac{1}{e^{100\pi}}", r"e^{-100\pi}"),
        ("0", r"\sqrt[3]{16}-\sqrt[3]{2}\cdot2"), ("0", r"\sin(\sqrt[3]{\pi^3})"),
        ("0", r"\ln\frac{\sqrt[3]{2}\sqrt[3]{4}}{2}"),
    ],
)  # fmt: skip
def test_right_numbers(gold: str, answer: str) -> None:
    """What has the value of the gold answer is right."""
    assert is_right(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("62.5", "62.4"), ("270", "-270"), ("12 cm", "12 m"), ("x=5", "y=5"), ("10000", "10001"),
        ("12345678901234567890", "12345678901234567891"), ("50", "0.5"), (r"\frac{1}{3}", "0.33"), ("7", "8"),
        (r"3\sqrt2", "4.24"), (r"3\sqrt2", "4.242"), ("5", "2+3"), ("5", "(2+3)"), ("70", r"\frac{180-40}{2}"),
        ("5", r"(2+3) \cdot 1"), ("5", "|2+3|"), ("5", "5x"), ("120 cm^2", "120 cm"),
        ("1.2 m", "1.2 cm"), ("3", "3i"), ("45", "x + 45"), ("x^2", "x^3"), (r"\frac{1}{2}", "0.5001"),
        (r"60^\circ", "60 cm"), ("0.3333", r"\frac13"), ("3", "-3"), ("5 apples", "5 oranges"),
        ("1414", r"1000\sqrt{2}"), (r"1000\sqrt{2}", "1414"), (r"8\pi", "25.1"), (r"8\pi", "25.132"), ("0.5", r"5\%"),
        ("12", "12 + 0"), ("14.42", r"4\sqrt{13}"), ("5", r"x^2 = 5^\circ"),
        (r"\frac{2}{3}", r"\frac{AB}{DE} = \frac{3}{2}"),
        (r"\frac{AB}{DE} = \frac{2}{3}", r"\frac{DE}{AB} = \frac{2}{3}"), ("6", r"\frac{AB}{2} = 6"),
        (r"\frac{2}{3}", r"\cos\theta = \frac{2}{3}x"),
        ("12", r"2x^\circ = 12^\circ"), ("x = 12", r"y^\circ = 12^\circ"), ("0", r"\cos\pi = 0"),
        ("0", r"e^{-100\pi}"), (r"e^{-100\pi}", "0"), (r"e^{-100\pi}", r"e^{-200\pi}"), ("1", r"1+e^{-100\pi}"),
        ("1", r"\sin(e^{-100\pi}+\frac{\pi}{2})"), ("0", "e^{-1000}"), ("e^{-1000}", "0"), ("0", "10^{-1000}"),
    ],
)  # fmt: skip
def test_wrong_numbers(gold: str, answer: str) -> None:
    """Near misses, however small, other units, work that was not carried out and variables are wrong."""
    assert not is_right(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer", "correct"),
    [
        ("8.5", "8.45", True), ("8.5", "8.55", True), ("8.5", "8.449", False), ("8.5", "8.551", False),
        ("20.0", "20.04", True), ("20.0", "20", True), ("20", "20.01", False), (r"\frac{1}{2}", "0.51", False),
        ("17/2", "8.51", False), ("8.5^\\circ", "8.52", True), ("-0.44", "-0.4", True), ("150", "150.04", True),
        ("-150", "-150.04", True), ("100", "99.95", True), ("99", "99.04", False), ("150", "150.06", False),
        ("150", "-150", False), ("4.24", r"3\sqrt{2}", True), (r"3\sqrt{2}", "4.25", False),
        ("8.5 cm", "85.4 mm", True),
        ("8.5 cm", "8.5 m", False), (r"100\sqrt{2}", "141.46", False),
    ],
)  # fmt: skip
def test_geo3k_takes_rounded_labels_within_the_tolerance(gold: str, answer: str, correct: bool) -> None:
    """|answer - gold| <= 0.05 exactly, for decimals and integers from 100 on, never for exact forms."""
    assert is_right(gold, answer, "geo3k") is correct
    assert not is_right(gold, "1000", "geo3k")


def test_decimals_for_exact_forms_can_be_turned_off() -> None:
    """Without figures, a root is not its decimal; equal rationals stay equal."""
    assert is_right(r"3\sqrt{2}", "4.243")
    assert not is_right(r"3\sqrt{2}", "4.243", "strict")
    assert is_right(r"\frac{1}{8}", "0.125", "strict")


@pytest.mark.parametrize(
    ("golds", "response", "status"),
    [
        ([], r"\boxed{5}", Status.GOLD_INVALID),
        (["", " "], r"\boxed{5}", Status.GOLD_INVALID),
        (["°", "."], r"\boxed{^\circ}", Status.GOLD_INVALID),
        (["1" * 513], r"\boxed{5}", Status.GOLD_INVALID),
        (["5"], r"\boxed{^\circ}", Status.UNPARSEABLE),
        (["5"], "I do not know", Status.NO_ANSWER),
        (["5"], r"\boxed{" + "1" * 513 + "}", Status.TOO_LARGE),
        (["5"], r"\boxed{9^{9^{9^9}}}", Status.TOO_LARGE),
        ([r"3\sqrt{2}"], r"\boxed{9**9**9**9}", Status.TOO_LARGE),
        ([r"\frac{x}{x+1}"], r"\boxed{\frac{x^{9^{9^9}}}{x+1}}", Status.TOO_LARGE),
        ([r"\frac{x}{x+1}"], r"\boxed{\frac{99999999!}{x+1}}", Status.TOO_LARGE),
        ([r"\frac{x}{x+1}"], r"\boxed{\sum_{k=1}^{9} \frac{k}{x+k}}", Status.UNPARSEABLE),
        ([r"\frac{x}{x+1}"], r"\boxed{" + "(" * 30 + "x" + ")" * 30 + "}", Status.TOO_LARGE),
        (["5"], r"\boxed{10000000!}", Status.TOO_LARGE),
        (["5050"], r"\boxed{\sum_{k=1}^{100} k}", Status.UNPARSEABLE),
        (["5"], r"\boxed{\int_0^5 1 dx}", Status.UNPARSEABLE),
        (["5"], r"\boxed{2+3=6}", Status.UNPARSEABLE),
        (["5"], r"\boxed{5=5}", Status.UNPARSEABLE),
        (["5"], r"\boxed{5 \text{ million}}", Status.UNPARSEABLE),
        (["5"], r"\boxed{\frac{5}{0}}", Status.UNPARSEABLE),
        (["5"], r"\boxed{__import__('os').getpid()}", Status.UNPARSEABLE),
        (["5"], "\\boxed{5\udfff}", Status.UNPARSEABLE),
        (["5"], "\\boxed{5\x00}", Status.OK),
        (["5"], "x" * 5_000_000 + r"\boxed{5}", Status.OK),
        (["10^{10^{10}}"], r"\boxed{10^{10^{10}}}", Status.OK),
    ],
)
def test_statuses(golds: list[str], response: str, status: Status) -> None:
    """Every kind of bad item has its status, and none of these costs a worker anything."""
    finding = verify(golds, response)
    assert isinstance(finding, Finding)
    assert finding.status is status
    assert (finding.credit == 1) is (status is Status.OK)
    finding.extracted.encode()


@pytest.mark.parametrize(
    ("gold", "answer"),
    [(r"\frac{x}{x+1}", r"1-\frac{1}{x+1}"), (r"\sqrt{x^2+1}", r"\sqrt{1+x^2}"), (r"\arctan 1", r"\frac{\pi}{4}")],
)
def test_symbolic_algebra_is_left_to_a_worker(gold: str, answer: str) -> None:
    """Where there are variables in denominators or under roots, or functions that the grammar lacks."""
    assert isinstance(verify([gold], rf"\boxed{{{answer}}}"), Undecided)


@pytest.mark.parametrize(
    ("gold", "answer", "method"),
    [("5", "5", Method.EXACT), (r"\sqrt{8}", r"2\sqrt{2}", Method.EXACT), ("(1,2)", "(1,2)", Method.STRUCTURE)],
)
def test_the_method_says_what_decided(gold: str, answer: str, method: Method) -> None:
    """Numbers are decided exactly, everything else by structure."""
    finding = verify([gold], rf"\boxed{{{answer}}}")
    assert finding == Finding(status=Status.OK, credit=1.0, extracted=answer, method=method)


def test_one_of_several_golds_suffices() -> None:
    """Invalid ones among them do no harm."""
    finding = verify(["", "4", "5"], r"\boxed{5}")
    assert finding == Finding(status=Status.OK, credit=1.0, extracted="5", method=Method.EXACT)


_RATIONALS = st.fractions(max_denominator=999).map(lambda value: value.limit_denominator(999))
_SURDS = st.tuples(st.integers(1, 40), st.sampled_from([2, 3, 5, 6, 7, 10, 13, 41]), st.integers(1, 12))


@given(_RATIONALS, st.integers(1, 9))
def test_rewritten_rationals_are_equal(value: Fraction, factor: int) -> None:
    """A fraction equals itself expanded, named, spaced and signed otherwise, in both directions; its neighbour not."""
    p, q = value.numerator, value.denominator
    forms = [
        rf"\frac{{{p}}}{{{q}}}", f"{p * factor}/{q * factor}", rf"x = \dfrac {{ {p * factor} }} {{ {q * factor} }}",
        rf"$-\tfrac{{{-p}}}{{{q}}}$", f"{p}/{q}".replace("-", "−"), rf"\left(\frac{{{p}}}{{{q}}}\right)",
    ]  # fmt: skip
    for one in forms:
        assert is_right(forms[0], one, "strict")
        assert is_right(one, forms[0], "strict")
        assert not is_right(f"{p + 1}/{q}", one, "strict")


@given(_SURDS)
def test_rewritten_roots_are_equal(parts: tuple[int, int, int]) -> None:
    """a sqrt(r) / q in every way that people write it."""
    a, r, q = parts
    forms = [
        rf"\frac{{{a} \sqrt {{ {r} }} }}{{{q}}}", rf"\frac{{{a}}}{{{q}}}\sqrt{{{r}}}",
        rf"\frac{{\sqrt{{{a * a * r}}}}}{{{q}}}",
        rf"{a}\sqrt{{{r}}}/{q}", rf"\frac{{{a * r}}}{{{q}\sqrt{{{r}}}}}", f"{a}√{r}/{q}",
        rf"{a} \cdot {r}^{{1/2}} \div {q}",
        rf"\sqrt{{\frac{{{a * a * r}}}{{{q * q}}}}}", f"{a}*sqrt({r})/{q}",
    ]  # fmt: skip
    for one in forms:
        assert is_right(forms[0], one, "strict")
        assert is_right(one, forms[0], "strict")
        assert not is_right(one, rf"\frac{{{a + 1}\sqrt{{{r}}}}}{{{q}}}", "strict")
        assert not is_right(one, rf"-\frac{{{a}\sqrt{{{r}}}}}{{{q}}}", "strict")


@given(_SURDS, st.integers(4, 8))
def test_the_rounded_decimal_of_a_root_is_right_and_its_neighbours_wrong(
    parts: tuple[int, int, int], figures: int
) -> None:
    """The rule of decimals, against Decimal's own rounding."""
    a, r, q = parts
    exact = Decimal(a) * Decimal(r).sqrt() / q
    step = Decimal(1).scaleb(exact.adjusted() - figures + 1)
    rounded = exact.quantize(step)
    gold = rf"\frac{{{a}\sqrt{{{r}}}}}{{{q}}}"
    assert is_right(gold, f"{rounded:f}") is (step < 1)
    assert not is_right(gold, f"{rounded + step:f}")
    assert not is_right(gold, f"{rounded - step:f}")


@given(st.integers(1, 10**9), st.sampled_from(["cm", "mm", "km", "in", "ft"]))
def test_units_are_converted_exactly(length: int, unit: str) -> None:
    """Metres in another unit are the same length, both ways; another dimension is not."""
    sizes = {"cm": "0.01", "mm": "0.001", "km": "1000", "in": "0.0254", "ft": "0.3048"}
    value = Fraction(length) / Fraction(sizes[unit])
    assert is_right(f"{length} m", rf"{value.numerator}/{value.denominator} \text{{ {unit}}}", "strict")
    assert is_right(f"{value.numerator}/{value.denominator} {unit}", f"{length} meters", "strict")
    assert not is_right(f"{length} m", f"{length} {unit}", "strict")
    assert not is_right(f"{length} m", f"{length} {unit}^2", "strict")


_ANSWERS = [
    "5", "-3.25", r"\frac{1}{3}", r"3\sqrt{2}", r"2\pi", "12 cm",
    "50\\%", "(1,2)", "[1,2)", r"\{1,2\}", "5, 7",
    r"\pm 3", "x=5", "3:4",
    "B", "Evelyn", "x>3",
    r"y=2x+1", r"x^2+1", "3+4i", r"45^\circ", "(-\\infty,3)",
    r"\begin{pmatrix}1\\2\end{pmatrix}", "x=1, y=2",
]  # fmt: skip


@given(st.sampled_from(_ANSWERS), st.sampled_from(_ANSWERS))
def test_equality_is_reflexive_and_symmetric(one: str, other: str) -> None:
    """Every answer equals itself, and the roles of gold and answer may be exchanged."""
    assert is_right(one, one, "strict")
    assert is_right(one, other, "strict") is is_right(other, one, "strict")


_PIECES = [
    *"0123456789.-+*/^(){}[]e ,:;=<>|_!'&xAB$%~", r"\frac", r"\sqrt", r"\pi", r"\times ", r"\pm", r"\le ", r"\cup",
    r"\infty", r"\{",
    r"\}", r"^\circ", r"\sin", r"\ln ", r"\text{", "cm", "km/h", " or ", " and ", r"\begin{pmatrix}",
    r"\end{pmatrix}", "√",
    "½", "²", "−", "⑤", "٣",
    r"\approx ", r"\in ", r"\$", "x=", "1,000", "\ud800", "\x00", r"\sum_{k=1}^",
]  # fmt: skip
_TEXTS = st.lists(st.sampled_from(_PIECES), max_size=80).map("".join)


@given(
    gold=st.text(max_size=40) | _TEXTS,
    response=st.text(max_size=200) | _TEXTS,
    profile=st.sampled_from(sorted(PROFILES)),
)
def test_any_text_is_judged(gold: str, response: str, profile: str) -> None:
    """Whatever comes, there is a finding or a question, never an error."""
    for text in (response, f"<answer>{response}</answer>"):
        assert isinstance(verify([gold], text, profile), Finding | Undecided)


_TROUBLESOME = pytest.mark.parametrize(
    "piece",
    [
        "−y½",
        "5,",
        "5 or ",
        r"\pm",
        "cm ",
        r"A\cup7",
        "1&",
        "x=",
        r"5\approx ",
        r"\{a,",
        "1:",
        "x<",
        "a b c ",
        r"\text{",
        "9",
        r"1^\circ 2'",
    ],
)


@_TROUBLESOME
@pytest.mark.parametrize("gold", ["5", "5, 7", "x^2+1", "(0,1)"])
def test_the_longest_answers_take_little_work(piece: str, gold: str) -> None:
    """An answer of nothing but a troublesome piece is decided within milliseconds."""
    response = f"<answer>{(piece * 512)[:512]}</answer>"
    assert num_calls(lambda: verify([gold], response)) < 25_000


@pytest.mark.timeout(60)
@_TROUBLESOME
def test_answers_are_read_in_linear_time(piece: str) -> None:
    """A text 512 times as long as an answer may be is refused at once; a pattern that backtracks would take minutes."""
    assert Side.of((piece * 2**18)[: 2**18]).is_too_large
