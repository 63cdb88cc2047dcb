"""The service without its frontends: what one item's fault does to the others."""

import dataclasses
import re

import pydantic
import pytest

from penstock.errors import InvalidRequestError
from penstock.telemetry import metrics
from penstock.verdict_status import Status
from services.reward.config import RewardConfig
from services.reward.isolation.pool import WorkerPool
from services.reward.isolation.tasks import Task, WorkerReply
from services.reward.item import Item
from services.reward.profiles.profile import Decision, Profile, Scoring
from services.reward.verdict import Method
from services.reward.verifier import Verifier
from services.rollout.worker.answer_verifier import _VERIFY_TIMEOUT_S


class _Crashing(Profile):
    def decide(self, item: Item) -> Decision:
        raise RecursionError(item.response)


async def test_a_profile_that_crashes_costs_its_item_only(capsys: pytest.CaptureFixture[str]) -> None:
    """The item's status is FAILED, the log has the reason, and the batch goes on."""
    verifier = Verifier(RewardConfig(), WorkerPool(num_workers=1, memory_limit_bytes=2**28, recycle_after=1))
    verifier.profiles["crashing"] = _Crashing(name="crashing", description="", scoring=Scoring(reward_min=-1.0))
    items = [Item(golds=["5"], response=r"\boxed{5}", profile=profile) for profile in ("math", "crashing", "math")]
    verdicts = await verifier.verify(items)
    assert [verdict.finding.status for verdict in verdicts] == [Status.OK, Status.FAILED, Status.OK]
    assert [verdict.score for verdict in verdicts] == [1.0, -1.0, 1.0]
    logged = capsys.readouterr().out
    assert "profile.crashed" in logged
    assert "RecursionError" in logged


async def series() -> set[tuple[str, str, str]]:
    """Method, profile and status of each count of items in this process, which other tests add to."""
    page = (await metrics.page()).decode()
    return {*re.findall(r'penstock_reward_items_total{method="(.*)",profile="(.*)",status="(.*)"}', page)}


async def test_profiles_that_callers_make_up_are_no_labels() -> None:
    """Each label is a time series; one that no profile has is refused before anything is counted."""
    verifier = Verifier(RewardConfig(), WorkerPool(num_workers=1, memory_limit_bytes=2**28, recycle_after=1))
    right = Item(golds=["5"], response=r"\boxed{5}", profile="math")
    before = await series()
    for name in ("made_up", "made_up_2", "MATH", "", 'math",status="OK'):
        with pytest.raises(InvalidRequestError, match="is unknown"):
            await verifier.verify([right, dataclasses.replace(right, profile=name)])
    await verifier.verify([right, dataclasses.replace(right, response="made up", profile="geo3k")])
    found = await series()
    assert {("EXACT", "math", "OK"), ("UNSPECIFIED", "geo3k", "NO_ANSWER")} <= found
    assert all(
        method in {*Method} and profile in verifier.profiles and status in {*Status}
        for method, profile, status in found - before
    )


class _Deadlines(WorkerPool):
    """Notes the deadlines of its items, and takes all for right."""

    def __init__(self) -> None:
        super().__init__(num_workers=1, memory_limit_bytes=2**28, recycle_after=1)
        self.given_s: list[float] = []

    async def run(self, task: Task, deadline_s: float) -> tuple[WorkerReply, float]:
        self.given_s.append(deadline_s)
        return WorkerReply(status=Status.OK, credit=1.0), 0.0


async def test_a_deadline_of_the_settings_is_the_item_s() -> None:
    """Also a long one, within the minute that workers wait. An item may ask for its own, up to the same maximum."""
    pool = _Deadlines()
    verifier = Verifier(RewardConfig(deadline_s=45), pool, {"mine": "mine.py:verify"})
    for deadline_s in (0.0, 1.0, 120.0):
        item = Item(golds=["5"], response="5", profile="mine", deadline_s=deadline_s)
        await verifier.verify([item], within_s=_VERIFY_TIMEOUT_S)
    assert pool.given_s == [45.0, 1.0, 50.0]


def test_a_deadline_that_workers_do_not_wait_for_is_refused() -> None:
    """With the configuration, not by verdicts that come too early."""
    with pytest.raises(pydantic.ValidationError, match=r"deadline_s\n +Input should be less than or equal to 50"):
        RewardConfig(deadline_s=120)
