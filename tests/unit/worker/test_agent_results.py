"""What runners may return, and what a result makes of it."""

import math

import msgspec
import numpy as np
import pytest

from penstock.agents import AgentResult
from penstock.records import Verdict
from services.rollout.worker.agents.agent_player import AgentEpisode, Ending
from services.rollout.worker.agents.runners import RunnerError, read_result
from tests.contract.golden_records import SESSION_CALL


@pytest.mark.parametrize(
    ("value", "reward", "metrics"),
    [
        (None, None, {}),
        (1, 1, {}),
        (np.float32(0.5), 0.5, {}),
        ({"reward": 0.5, "metrics": {"n": 2}}, 0.5, {"n": 2}),
        ({"reward": None, "metrics": None, "error": None}, None, {}),
        (AgentResult(reward=2.0), 2.0, {}),
        (AgentResult(reward=1.0, error=None), 1.0, {}),
    ],
)
def test_what_a_runner_may_return(value: object, reward: float | None, metrics: dict[str, float]) -> None:
    """A number, nothing, or the fields of a result."""
    result = read_result(value)
    assert (result.reward, result.metrics, result.error) == (reward, metrics, "")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "reward = nan must be a finite number"),
        (True, "reward = True must be a finite number"),
        ("1.0", "not str"),
        ([1.0], "not list"),
        ({"reward": "1"}, "reward = '1' must be a finite number"),
        ({"score": 1}, r"unknown fields \['score'\]"),
        ({"metrics": {"n": math.inf}}, "must be finite numbers; leave out"),
        pytest.param(
            10**400, "reward = an integer of 1329 bits must be a finite number", id="a reward that no float holds"
        ),
        pytest.param({"metrics": {"n": 10**400}}, "must be finite numbers; leave out", id="such a metric"),
        ({"metrics": [1]}, "must map names to numbers"),
    ],
)
def test_what_is_no_result_is_named(value: object, reason: str) -> None:
    """With what it should be."""
    with pytest.raises(RunnerError, match=reason):
        read_result(value)


@pytest.mark.parametrize(
    ("error", "text"),
    [(ValueError("no browser"), "no browser"), (TimeoutError(), "TimeoutError()"), ("x" * 5000, "x" * 2000)],
)
def test_why_there_is_no_reward_is_text(error: str | Exception, text: str) -> None:
    """Of bounded length, whatever a runner gives as its reason."""
    for value in (AgentResult(error=error), {"error": error}):
        assert read_result(value).error == text


LATE = "its runner was ended after 9 s"


@pytest.mark.parametrize(
    ("ending", "ended_by", "status", "error"),
    [
        ("deadline", LATE, "GOLD_INVALID", LATE),
        ("deadline", LATE, "FAILED", ""),
        ("length", "", "GOLD_INVALID", "its runner gave no reward, and the row's gold answers cannot be read"),
        ("length", "", "FAILED", ""),
    ],
)
def test_a_sample_that_ended_early_and_whose_golds_cannot_be_read_says_why_it_has_no_reward(
    ending: Ending, ended_by: str, status: str, error: str
) -> None:
    """As one of a row without golds does: an agent that is always late or cut would be trained without a gradient."""
    early = AgentEpisode(
        calls=[(1, msgspec.structs.replace(SESSION_CALL, continues=0))],
        texts=["3"],
        result=AgentResult(),
        finish_reason=ending,
        started_at=0.0,
        elapsed_s=9.0,
        ended_by=ended_by,
    )
    sample = early.to_sample(Verdict(score=0.0, status=status, extracted="", method="UNSPECIFIED"))
    assert (sample.reward, sample.error, sample.ended_by) == (None, error, ended_by)
