"""The compatible profiles decide as the frameworks that they are named for."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import math_verify
import mathruler.grader
import pytest

from penstock.verdict_status import Status
from services.reward.config import RewardConfig
from services.reward.item import Item
from services.reward.profiles.profile import Undecided
from services.reward.profiles.registry import make_profiles
from services.reward.verdict import Finding
from services.reward.worker_tasks.perform import perform
from services.reward.worker_tasks.prm800k_grader import _is_arithmetic

_DATA = Path(__file__).parents[2] / "data" / "reward"
_PROFILES = make_profiles(RewardConfig())
_RECORDED = [json.loads(line) for line in (_DATA / "compat.jsonl").read_text().splitlines()]
_CASES = [json.loads(line) for line in (_DATA / "math_verify_cases.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """The originals log what they cannot read."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def verify(profile: str, golds: list[str], response: str) -> Finding:
    """What the profile says, the worker's part done here."""
    decision = _PROFILES[profile].decide(Item(golds=golds, response=response, profile=profile))
    if isinstance(decision, Undecided):
        reply = perform(decision.task)
        return Finding(status=reply.status, credit=reply.credit, extracted=reply.extracted or decision.extracted)
    assert isinstance(decision, Finding)
    return decision


def score(profile: str, golds: list[str], response: str) -> float:
    """Its score."""
    finding = verify(profile, golds, response)
    scoring = _PROFILES[profile].scoring
    has_format = scoring.check_format(finding, response)
    assert isinstance(has_format, bool)
    return scoring.score(finding, has_format=has_format)


@pytest.mark.parametrize("profile", ["slime_math", "deepscaler", "dapo", "verl_geo3k", "math_verify", "f1", "gpqa"])
@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # what Python's parser thinks of an answer such as 5(6)
def test_scores_as_the_original(profile: str) -> None:
    """On every recorded pair, the score is the original's."""
    lines = [line for line in _RECORDED if profile in line["scores"]]
    assert len(lines) >= 150
    assert len({line["scores"][profile] for line in lines}) > 1
    differing = [
        (line, ours)
        for line in lines
        if (ours := score(profile, [line["gold"]], line["response"])) != pytest.approx(line["scores"][profile])
    ]
    assert differing == []


@pytest.mark.variant
def test_gives_the_verdicts_of_math_verifys_own_tests() -> None:
    """Each of its test cases has the verdict that it demands."""
    wrong = [case for case in _CASES if score("math_verify", [case["gold"]], case["response"]) != case["correct"]]
    assert wrong == []


def _fresh_pairs(num_pairs: int) -> list[Any]:
    """Pairs that were written for another purpose than compatibility."""
    lines = [json.loads(line) for line in (_DATA / "pairs.jsonl").read_text().splitlines()]
    return [line for line in lines if "gold" in line][:: max(1, len(lines) // num_pairs)]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_agrees_with_mathruler_on_other_pairs() -> None:
    """The accuracy part of verl_geo3k is MathRuler's, on pairs that were not recorded for it."""
    for pair in _fresh_pairs(300):
        given = mathruler.grader.extract_boxed_content(pair["response"])
        expected = mathruler.grader.grade_answer(given, pair["gold"])
        assert verify("verl_geo3k", [pair["gold"]], pair["response"]).credit == expected, pair


def test_agrees_with_math_verify_on_other_pairs() -> None:
    """The profile is the library, on pairs that were not recorded for it."""
    for pair in _fresh_pairs(60):
        expected = math_verify.verify(math_verify.parse(pair["gold"]), math_verify.parse(pair["response"]))
        assert verify("math_verify", [pair["gold"]], pair["response"]).credit == expected, pair


@pytest.mark.parametrize(
    ("profile", "golds", "response", "status", "credit"),
    [
        ("slime_math", ["4", "5"], r"\boxed{5}", Status.OK, 1.0),
        ("slime_math", [""], r"\boxed{5}", Status.GOLD_INVALID, 0.0),
        ("slime_math", ["5"], "5", Status.NO_ANSWER, 0.0),
        ("slime_math", ["5"], r"\boxed{" + "5" * 513 + "}", Status.TOO_LARGE, 0.0),
        ("slime_math", ["5"], "\\boxed{5\ud800}", Status.OK, 0.0),
        ("deepscaler", ["5"], r"\boxed{5}", Status.NO_ANSWER, 0.0),
        ("verl_geo3k", ["None"], "no box", Status.NO_ANSWER, 0.0),
        ("dapo", ["five"], "Answer: 5", Status.GOLD_INVALID, 0.0),
        ("dapo", ["inf"], "Answer: 5", Status.GOLD_INVALID, 0.0),
        ("dapo", ["5"], "5", Status.NO_ANSWER, 0.0),
        ("math_verify", ["?"], "5", Status.GOLD_INVALID, 0.0),
        ("math_verify", ["5"], "no number", Status.NO_ANSWER, 0.0),
        ("math_verify", ["5", "6"], "It is 6.", Status.OK, 1.0),
        ("f1", ["cat", "the black dog"], "A black dog.", Status.OK, 1.0),
        ("f1", ["the"], "A black dog.", Status.GOLD_INVALID, 0.0),
        ("f1", ["dog"], "...", Status.NO_ANSWER, 0.0),
        ("gpqa", ["C", "a proton"], "A: surely a proton", Status.OK, 0.0),
        ("gpqa", ["C", "proton"], "surely the proton", Status.OK, 1.0),
        ("gpqa", ["C"], "no idea", Status.NO_ANSWER, 0.0),
        ("gpqa", [" "], "C", Status.GOLD_INVALID, 0.0),
    ],
)
def test_says_what_the_originals_leave_unsaid(
    profile: str, golds: list[str], response: str, status: Status, credit: float
) -> None:
    """Where the originals raise, or score 0 for some reason, there is a status; one gold answer of several suffices."""
    finding = verify(profile, golds, response)
    assert (finding.status, finding.credit) == (status, credit)


@pytest.mark.parametrize(
    "text",
    [
        *("x.real", "(1).real", "5..real", "__x", "x__y", "eval(x)", "id", "all(x)", "lambda", "1if 1", "'x'", '"x"'),
        *("x[0]", "{1}", "x=5", "1<<3", "3|4", "@x", "x;y", "#x", "x:y", "\\x", "gamma(3)", "fu(x)"),
    ],
)
def test_only_arithmetic_reaches_sympys_parser(text: str) -> None:
    """Attributes, text, other names and Python's own are refused, wherever they stand."""
    assert not _is_arithmetic(text)
    assert not _is_arithmetic(f"(2)-({text})")


@pytest.mark.parametrize(
    "text", ["2x+1", "-3*sqrt(2)/7", "(1,2)", "ln(x)", "x_1+θ", "1.5e3", ".5", "5!", "2^3", "7+3/4"]
)
def test_arithmetic_reaches_sympys_parser(text: str) -> None:
    """Numbers, variables, operators and a few functions pass."""
    assert _is_arithmetic(text)


@pytest.mark.parametrize("profile", ["dapo", "f1", "gpqa", "slime_math", "deepscaler", "verl_geo3k"])
@pytest.mark.parametrize(
    "response",
    [
        *("answer" + " " * 5_000_000 + "1", "A" + " " * 65_000 + "is" * 100, "\\boxed{" * 700_000, "{" * 5_000_000),
        *("Answer:" * 700_000, "</think>" * 600_000, "is the correct " * 300_000, "$" * 5_000_000),
    ],
    ids=lambda response: response[:8].strip(),
)
@pytest.mark.timeout(20)
def test_hostile_responses_take_the_server_process_moments(profile: str, response: str) -> None:
    """What is decided before the worker is linear in the response. Quadratic time would be hours."""
    _PROFILES[profile].decide(Item(golds=["1"], response=response, profile=profile))
