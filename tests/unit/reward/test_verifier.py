"""The service without its frontends: what one item's fault does to the others."""

import pytest

from penstock.verdict_status import Status
from services.reward.config import RewardConfig
from services.reward.isolation.pool import WorkerPool
from services.reward.item import Item
from services.reward.profiles.profile import Decision, Profile, Scoring
from services.reward.verifier import Verifier


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
