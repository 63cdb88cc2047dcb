"""Which groups were judged, which failed, and which were only cut short."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.records import Group, Verdict
from services.rollout.worker.episodes.clock import TIME_REMEDY
from services.trainer.admission.judgement import is_judged, why_unjudged
from tests.support.trainer.groups import make_group


def verdict(status: str) -> Verdict:
    """A verdict of no score."""
    return Verdict(score=0.0, status=status, extracted="", method="EXACT")


WRONG: dict[str, Any] = {"reward": 0.0, "finish_reason": "stop", "verdict": verdict("NO_ANSWER")}
LATE = WRONG | {"finish_reason": "deadline", "ended_by": "its runner was ended after 900 s"}
CUT = WRONG | {"finish_reason": "length", "is_cut_short": True}
CUT_BUT_REWARDED = CUT | {"verdict": None}
CRASHED: dict[str, Any] = {
    "reward": None, "finish_reason": "error", "error": "NameError: rewrad", "verdict": verdict("FAILED"),
}  # fmt: skip
UNJUDGED: dict[str, Any] = {"reward": None, "finish_reason": "length", "verdict": verdict("FAILED")}
VERIFIER_FAILED = "it ended as length, and its verdict is FAILED; see the reward service, and the row's golds"
OVER_BUDGET, FURTHER_OVER = (
    UNJUDGED | {"ended_by": f"{n} tokens, but the context leaves room for 16"} for n in (40, 41)
)
CUT_AND_UNJUDGED = UNJUDGED | {"is_cut_short": True}
STUCK = CUT | {
    "finish_reason": "deadline", "ended_by": f"the environment's step took longer than the episode has; {TIME_REMEDY}",
}  # fmt: skip
STUCK_AND_UNJUDGED = STUCK | {"reward": None, "verdict": verdict("FAILED")}
STUCK_WITHOUT_GOLDS = STUCK | {"reward": None, "verdict": verdict("GOLD_INVALID")}
WITHOUT_GOLDS: dict[str, Any] = {"reward": None, "finish_reason": "environment", "verdict": verdict("GOLD_INVALID")}
OUT_OF_TIME = WITHOUT_GOLDS | {"finish_reason": "deadline", "error": "its runner was ended after 900 s"}


def group_of(path: Path, *samples: dict[str, Any]) -> Group:
    """A group of samples with these fields."""
    group = make_group(path, rewards=[0.0] * len(samples))
    changed = [msgspec.structs.replace(each, **fields) for each, fields in zip(group.samples, samples, strict=True)]
    return msgspec.structs.replace(group, samples=tuple(changed))


@pytest.mark.parametrize(
    "samples",
    [(WRONG, CRASHED), (LATE, LATE, CRASHED), (CUT_BUT_REWARDED, CRASHED), (CUT, CUT | {"reward": 1.0}, CRASHED)],
    ids=["wrong", "wrong at the deadline", "rewarded before the cut", "rewards differ"],
)
def test_a_group_with_a_judged_sample_is_judged(tiny_model_path: Path, samples: tuple[dict[str, Any], ...]) -> None:
    """One bad sample never costs the others of its group, whatever ended them."""
    group = group_of(tiny_model_path, *samples)
    assert (is_judged(group), why_unjudged(group)) == (True, "")


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ((CUT, CRASHED), "NameError: rewrad"),
        ((CUT_AND_UNJUDGED, CRASHED), "NameError: rewrad"),
        ((UNJUDGED, UNJUDGED, CRASHED), VERIFIER_FAILED),
        ((OVER_BUDGET, FURTHER_OVER, CRASHED), VERIFIER_FAILED),
        ((STUCK, STUCK), STUCK["ended_by"]),
        ((STUCK_AND_UNJUDGED, STUCK_AND_UNJUDGED, CUT), STUCK["ended_by"]),
        ((STUCK, STUCK_WITHOUT_GOLDS, WITHOUT_GOLDS), STUCK["ended_by"]),
        ((OUT_OF_TIME, OUT_OF_TIME), "its runner was ended after 900 s"),
    ],
    ids=[
        "crashed beside cut",
        "crashed beside unjudged",
        "verifier fails",
        "verifier fails at long observations",
        "environment hangs",
        "environment and verifier fail",
        "environment hangs in most samples",
        "always out of time",
    ],
)
def test_a_group_that_was_not_judged_fails_with_the_most_frequent_reason(
    tiny_model_path: Path, samples: tuple[dict[str, Any], ...], reason: str
) -> None:
    """It would be trained without a gradient. The text of a single turn, or of an agent, that was cut can be judged."""
    group = group_of(tiny_model_path, *samples)
    assert not is_judged(group)
    assert why_unjudged(group) == f"no sample was judged; most often: {reason}"


@pytest.mark.parametrize(
    "others",
    [(WITHOUT_GOLDS,), (CUT,), (STUCK_WITHOUT_GOLDS, WITHOUT_GOLDS, WITHOUT_GOLDS)],
    ids=["turns used up", "cut", "stuck twice"],
)
def test_a_group_is_no_failure_if_at_most_half_of_its_samples_were_stuck(
    tiny_model_path: Path, others: tuple[dict[str, Any], ...]
) -> None:
    """A `step` that is slow now and then ends no run in which samples often end too early."""
    group = group_of(tiny_model_path, STUCK_WITHOUT_GOLDS, *others)
    assert (is_judged(group), why_unjudged(group)) == (False, "")


def test_stuck_samples_whose_rewards_differ_are_judged(tiny_model_path: Path) -> None:
    """Their group has a gradient."""
    group = group_of(tiny_model_path, STUCK, STUCK, STUCK | {"reward": 1.0})
    assert (is_judged(group), why_unjudged(group)) == (True, "")


@pytest.mark.parametrize("sample", [CUT, CUT_AND_UNJUDGED, WITHOUT_GOLDS], ids=["cut", "unjudged", "turns used up"])
def test_a_group_that_ended_too_early_to_be_judged_is_no_failure(tiny_model_path: Path, sample: dict[str, Any]) -> None:
    """An early policy does not get to the end at which its game pays. Such a group ends no row of failures."""
    group = group_of(tiny_model_path, sample, sample)
    assert (is_judged(group), why_unjudged(group)) == (False, "")
