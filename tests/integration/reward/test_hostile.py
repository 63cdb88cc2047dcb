"""Items that hang or bloat verifiers for ever get a verdict over gRPC, and none is right. bench/ measures how soon."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.clients import RewardClient
from penstock.testing.hostile_answers import HostileItem, generated_items, stored_items
from penstock.v1 import reward_pb2
from services.reward.isolation.pool import WorkerPool
from tests.support.reward.service import EASY, item_of, reward_service
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.leaves_behind("the module's pool replaces workers, and their pipes", "descriptor")

_STORED = Path(__file__).parents[4] / "shared" / "reward" / "hostile.jsonl"


@pytest.fixture(scope="module")
async def service() -> AsyncIterator[tuple[RewardClient, WorkerPool]]:
    """A service with two workers, whose items have half a second."""
    async with reward_service(deadline_s=0.5) as pair:
        yield pair


async def _assert_harmless(client: RewardClient, items: list[HostileItem], profile: str) -> None:
    for item in items:
        items = [item_of(item.gold, item.response, profile=profile)]
        (verdict,) = await client.verify_batch(items, timeout_s=HANG_S)
        assert verdict.status != reward_pb2.VERDICT_STATUS_UNSPECIFIED, item.name
        assert item.may_be_right or verdict.score == 0, item.name


@pytest.mark.parametrize("profile", ["math", "geo3k"])
async def test_stored_items(service: tuple[RewardClient, WorkerPool], profile: str) -> None:
    """Each alone."""
    items = stored_items(_STORED)
    if not items:
        pytest.skip("needs hostile items in ../shared/reward/hostile.jsonl")
    await _assert_harmless(service[0], items, profile)


async def test_generated_items(service: tuple[RewardClient, WorkerPool]) -> None:
    """Each alone; some of them do reach a worker, and have it killed."""
    client, pool = service
    num_killed = pool.num_killed
    await _assert_harmless(client, generated_items(), "math")
    assert pool.num_killed > num_killed


async def test_all_at_once(service: tuple[RewardClient, WorkerPool]) -> None:
    """Among items that are right, which stay so."""
    client, _ = service
    hostile = generated_items()
    items = [item_of(item.gold, item.response, item_id=item.name) for item in hostile]
    easy = [item_of(*EASY, deadline_s=30.0) for _ in hostile]
    verdicts = await asyncio.gather(client.verify_batch(items, timeout_s=600), client.verify_batch(easy, timeout_s=600))
    assert [verdict.item_id for verdict in verdicts[0] if verdict.score != 0] == []
    assert [verdict.score for verdict in verdicts[1]] == [1.0] * len(easy)
