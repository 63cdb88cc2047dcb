"""What is decided without a worker process, and what is left to one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidRequestError
from penstock.v1 import reward_pb2
from services.reward.config import RewardConfig
from services.reward.item import Item
from services.reward.profiles.profile import Decision, Profile, Undecided
from services.reward.profiles.registry import find_profile, make_profiles
from services.reward.verdict import Judgement, Method, Status

_PROFILES = make_profiles(RewardConfig())


def judge(profile: Profile, golds: list[str], response: str) -> Decision:
    return profile.decide(Item(golds=golds, response=response, profile=profile.name))


def _judge(gold: str, answer: str, profile: str = "math") -> Decision:
    return judge(_PROFILES[profile], [gold], rf"So \boxed{{{answer}}}.")


def _is_correct(gold: str, answer: str, profile: str = "math") -> bool:
    judgement = _judge(gold, answer, profile)
    assert isinstance(judgement, Judgement)
    assert judgement.status is Status.OK
    return judgement.credit == 1


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("62.5", r"\frac{125}{2}"), ("62.5", "62.50"), ("62.5", r"62 \frac{1}{2}"), ("45", r"45^\circ"),
        ("45^\\circ", "45"), ("12", r"12\text{ cm}"), ("12 cm", "12"), ("5", "x=5"), ("x=5", "5"),
        ("1000", "1,000"), ("-5", "−5"), ("50", r"50\%"), ("0.5", r"50\%"), ("B", r"\text{B}"),
        ("B", "(B)"), ("Evelyn", r"\text{evelyn}"), (r"3 \sqrt{2}", r"3\sqrt{2}"),
        (r"\frac { 40 } { 3 }", r"\frac{40}{3}"), (r"\angle 1 \cong \angle 4", r"\angle 1 \cong \angle 4"),
    ],
)  # fmt: skip
def test_right_answers(gold: str, answer: str) -> None:
    """Equal text, equal rationals, equal choices and words are right."""
    assert _is_correct(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("62.5", "62.4"), ("270", "-270"), ("12 cm", "12 m"), ("x=5", "y=5"), ("10000", "10001"), ("B", "C"),
        ("12345678901234567890", "12345678901234567891"), ("50", "0.5"), ("Evelyn", "nylevE"), (r"\frac{1}{3}", "0.33"),
        ("7", "8"),
    ],
)  # fmt: skip
def test_wrong_answers(gold: str, answer: str) -> None:
    """Near misses, other units, other variables and other words are wrong."""
    assert not _is_correct(gold, answer)


@pytest.mark.parametrize(
    ("gold", "answer", "correct"),
    [
        ("8.5", "8.45", True),
        ("8.5", "8.55", True),
        ("8.5", "8.449", False),
        ("8.5", "8.551", False),
        ("20.0", "20.04", True),
        ("20.0", "20", True),
        ("20", "20.01", False),
        (r"\frac{1}{2}", "0.51", False),
        ("17/2", "8.51", False),
        ("8.5^\\circ", "8.52", True),
        (r"-0.44", "-0.4", True),
    ],
)
def test_geo3k_takes_rounded_labels_within_the_tolerance(gold: str, answer: str, correct: bool) -> None:
    """|answer - gold| <= 0.05 exactly, for golds with a decimal point, never for integers and fractions."""
    assert _is_correct(gold, answer, "geo3k") is correct
    assert not _is_correct(gold, "1000", "geo3k")
    assert _is_correct("8.5", "8.5", "math")
    assert not _is_correct("8.5", "8.45", "math")


def test_a_tolerance_of_zero_is_strict() -> None:
    """geo3k without its tolerance is math."""
    profile = make_profiles(RewardConfig.model_validate({"geo3k_tolerance": 0.0}))["geo3k"]
    judgement = judge(profile, ["8.5"], r"\boxed{8.51}")
    assert isinstance(judgement, Judgement)
    assert judgement.credit == 0


@pytest.mark.parametrize(
    ("golds", "response", "status"),
    [
        ([], r"\boxed{5}", Status.GOLD_INVALID),
        (["", " "], r"\boxed{5}", Status.GOLD_INVALID),
        (["°", "."], r"\boxed{^\circ}", Status.GOLD_INVALID),
        (["5"], r"\boxed{^\circ}", Status.UNPARSEABLE),
        (["1" * 513], r"\boxed{5}", Status.GOLD_INVALID),
        (["5"], "I do not know", Status.NO_ANSWER),
        (["5"], r"\boxed{" + "1" * 513 + "}", Status.TOO_LARGE),
        (["5"], r"\boxed{9^{9^{9^9}}}", Status.UNPARSEABLE),
        ([r"3\sqrt{2}"], r"\boxed{9^{9^{9^9}}}", Status.UNPARSEABLE),
        (["5"], r"\boxed{9**9**9**9}", None),
        (["5050"], r"\boxed{\sum_{k=1}^{100} k}", Status.UNPARSEABLE),
        (["5"], r"\boxed{5 \neq 6}", Status.UNPARSEABLE),
        (["5"], r"\boxed{__import__('os').getpid()}", Status.UNPARSEABLE),
        (["5"], "\\boxed{5\udfff}", Status.UNPARSEABLE),
        (["5"], "\\boxed{5\x00}", Status.OK),
        (["5"], "x" * 5_000_000 + r"\boxed{5}", Status.OK),
        ([r"3\sqrt{2}"], r"\boxed{\sqrt{18}}", None),
        (["5"], r"\boxed{\sqrt{25}}", None),
    ],
)
def test_statuses(golds: list[str], response: str, status: Status | None) -> None:
    """Every kind of bad item has its status; None: it is left to a worker."""
    judgement = judge(_PROFILES["math"], golds, response)
    if status is None:
        assert isinstance(judgement, Undecided)
    else:
        assert isinstance(judgement, Judgement)
        assert judgement.status is status
        assert (judgement.credit == 1) is (status is Status.OK)
        judgement.extracted.encode()


def test_one_of_several_golds_suffices() -> None:
    """Invalid ones among them do no harm."""
    judgement = judge(_PROFILES["math"], ["", "4", "5"], r"\boxed{5}")
    assert judgement == Judgement(status=Status.OK, credit=1.0, extracted="5", method=Method.EXACT)


def test_an_unknown_profile_names_the_known_ones() -> None:
    """The error says what can be asked for."""
    with pytest.raises(InvalidRequestError, match=r"'maths' is unknown; known: geo3k, math"):
        find_profile(_PROFILES, "maths")


def test_statuses_and_methods_are_the_contracts() -> None:
    """Each word of ours is one of the contract's, and the other way round."""
    statuses = {name.removeprefix("VERDICT_STATUS_") for name in reward_pb2.VerdictStatus.keys()}  # noqa: SIM118 - no dict
    methods = {name.removeprefix("VERDICT_METHOD_") for name in reward_pb2.VerdictMethod.keys()}  # noqa: SIM118 - no dict
    assert set(Status) == statuses - {"UNSPECIFIED"}
    assert set(Method) == methods


@given(st.fractions(), st.integers(1, 9))
def test_value_equality_of_rationals(value: object, factor: int) -> None:
    """A fraction equals itself expanded, in both directions."""
    p, q = value.numerator, value.denominator  # type: ignore[attr-defined]
    assert _is_correct(rf"\frac{{{p}}}{{{q}}}", f"{p * factor}/{q * factor}")
    assert _is_correct(f"{p * factor}/{q * factor}", rf"x = \frac{{{p}}}{{{q}}}")
    assert not _is_correct(f"{p}/{q}", f"{p + 1}/{q}")


@given(gold=st.text(max_size=40), response=st.text(max_size=200), profile=st.sampled_from(sorted(_PROFILES)))
def test_any_text_is_judged(gold: str, response: str, profile: str) -> None:
    """Whatever comes, there is a judgement or a question, never an error."""
    assert isinstance(judge(_PROFILES[profile], [gold], rf"\boxed{{{response}}}"), Judgement | Undecided)
    assert isinstance(judge(_PROFILES[profile], [gold], response), Judgement | Undecided)
