"""The reward service over real gRPC, with real worker processes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from penstock.clients import RewardClient
from penstock.errors import InvalidRequestError, OverloadedError, UnavailableError
from penstock.rpc.channel import connect
from penstock.v1 import reward_pb2, reward_pb2_grpc
from services.reward.config import MAX_DEADLINE_S, RewardConfig
from services.reward.isolation.pool import WorkerPool
from services.reward.server import running
from tests.support.processes import is_alive
from tests.support.reward.service import EASY, HANGS, OK, TIMEOUT, item_of, reward_service
from tests.support.waiting import HANG_S, promptly, until

pytestmark = pytest.mark.leaves_behind("the module's pool replaces workers, and their pipes", "descriptor")

_SHARED = Path(__file__).parents[4] / "shared"


@pytest.fixture(scope="module")
async def service() -> AsyncIterator[tuple[RewardClient, WorkerPool]]:
    """A service with two workers and the usual settings."""
    async with reward_service() as pair:
        yield pair


async def test_verdicts_come_in_the_order_of_the_items(service: tuple[RewardClient, WorkerPool]) -> None:
    """However long each takes, and with bad items among them."""
    client, _ = service
    golds = [
        ("5", r"\boxed{5}"),
        EASY,
        ("5", "none"),
        ("5", r"\boxed{6}"),
        (r"3\sqrt{2}", r"\boxed{\sqrt{17}}"),
        ("", ""),
    ]
    items = [item_of(*golds[n % len(golds)], item_id=str(n)) for n in range(120)]
    verdicts = await client.verify_batch(items, timeout_s=600)
    assert [verdict.item_id for verdict in verdicts] == [str(n) for n in range(120)]
    assert [verdict.score for verdict in verdicts] == [1, 1, 0, 0, 0, 0] * 20
    assert [verdict.status for verdict in verdicts[:6]] == [
        OK, OK, reward_pb2.VERDICT_STATUS_NO_ANSWER, OK, OK, reward_pb2.VERDICT_STATUS_GOLD_INVALID,
    ]  # fmt: skip
    assert verdicts[0].method == reward_pb2.VERDICT_METHOD_EXACT
    assert verdicts[1].method == reward_pb2.VERDICT_METHOD_SYMBOLIC
    assert verdicts[1].extracted == "(1+x)^{-1}"


async def test_a_full_queue_refuses() -> None:
    """RESOURCE_EXHAUSTED, at once and for the whole call; a batch that can never fit is refused as such."""
    async with reward_service(workers=1, max_items=4) as (client, pool):
        hanging = asyncio.create_task(client.verify_batch([item_of(*HANGS)] * 3, timeout_s=HANG_S))
        await until(lambda: pool.num_busy + pool.num_waiting == 3)
        with pytest.raises(OverloadedError, match=r"holds 3 of 4 items and 2 more do not fit"):
            await client.verify_batch([item_of("5", r"\boxed{5}")] * 2, timeout_s=30)
        with pytest.raises(InvalidRequestError, match="send at most 4"):
            await client.verify_batch([item_of("5", r"\boxed{5}")] * 5, timeout_s=30)
        (verdict,) = await client.verify_batch([item_of("5", r"\boxed{5}")], timeout_s=30)
        assert verdict.score == 1
        assert not hanging.done()
        hanging.cancel()
        await asyncio.wait((hanging,))


async def test_calls_in_progress_finish_when_the_service_stops() -> None:
    """Draining waits for them; then no process is left."""
    config = RewardConfig(workers=2, deadline_s=MAX_DEADLINE_S)
    async with contextlib.AsyncExitStack() as stack:
        server, pool, _ = await stack.enter_async_context(running(config, grace_s=HANG_S))
        pids = pool.worker_pids
        client = RewardClient(server.address)
        items = [item_of(*HANGS, deadline_s=3.0), item_of(*EASY)]
        pending = asyncio.create_task(client.verify_batch(items, timeout_s=HANG_S))
        await until(lambda: pool.num_busy > 0)
    hung, easy = await pending
    assert (hung.status, easy.score) == (TIMEOUT, 1)
    await client.close()
    await until(lambda: not any(map(is_alive, pids)))


async def test_what_outlasts_the_grace_period_is_stopped() -> None:
    """The service stops in time, whatever its workers do."""
    async with contextlib.AsyncExitStack() as stack:
        server, pool, _ = await stack.enter_async_context(
            running(RewardConfig(workers=1, deadline_s=MAX_DEADLINE_S), grace_s=0.3)
        )
        pids = pool.worker_pids
        client = RewardClient(server.address)
        pending = asyncio.create_task(client.verify_batch([item_of(*HANGS)], timeout_s=600))
        await until(lambda: pool.num_busy == 1)
        await promptly(stack.aclose())
    with pytest.raises(UnavailableError, match="reward at"):
        await pending
    await client.close()
    await until(lambda: not any(map(is_alive, pids)))


async def test_requests_that_can_never_succeed_are_refused(service: tuple[RewardClient, WorkerPool]) -> None:
    """Unknown profiles, deadlines that are none and missing items are errors of the call."""
    client, _ = service
    with pytest.raises(InvalidRequestError, match=r"known: .*geo3k.*, math"):
        await client.verify_batch([item_of("5", r"\boxed{5}", profile="algebra")], timeout_s=600)
    for deadline_s in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidRequestError, match="deadline_s"):
            await client.verify_batch([item_of("5", r"\boxed{5}", deadline_s=deadline_s)], timeout_s=600)
    async with connect(client.address) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="item is missing"):
            await stub.Verify(reward_pb2.VerifyRequest(), timeout=600)
        response = await stub.Verify(
            reward_pb2.VerifyRequest(item=item_of("5", r"\boxed{5}", item_id="a")), timeout=600
        )
    assert (response.verdict.item_id, response.verdict.score) == ("a", 1)


async def test_profiles_are_listed(service: tuple[RewardClient, WorkerPool]) -> None:
    """By name, each with what it does."""
    profiles = await service[0].list_profiles()
    names = [profile.name for profile in profiles]
    assert {"geo3k", "math"} <= set(names)
    assert names == sorted(names)
    assert all(profile.description for profile in profiles)


async def test_long_and_odd_texts_are_taken(service: tuple[RewardClient, WorkerPool]) -> None:
    """5 MB, NUL bytes and replacement characters."""
    client, _ = service
    verdicts = await client.verify_batch(
        [
            item_of("5", "word " * 1_000_000 + r"\boxed{5}"),
            item_of("5", "\x00\\boxed{5\x00}"),
            item_of("5", "\\boxed{5\ufffd}"),
        ],
        timeout_s=600,
    )
    assert [verdict.score for verdict in verdicts] == [1, 1, 0]


async def test_geo3k_tolerance_reaches_symbolic_answers(service: tuple[RewardClient, WorkerPool]) -> None:
    """6 sqrt 2 = 8.4853 is the label 8.5; for the integer 8 and for profile math it is nothing of the kind."""
    client, _ = service
    cases = [("8.5", "geo3k", 1), ("8.5", "math", 0), ("8.4", "geo3k", 0), ("8", "geo3k", 0)]
    items = [item_of(gold, r"\boxed{6\sqrt{2}}", profile=profile) for gold, profile, _ in cases]
    verdicts = await client.verify_batch(items, timeout_s=600)
    assert [verdict.score for verdict in verdicts] == [score for _, _, score in cases]


async def test_real_geo3k_golds_judge_themselves_as_right(service: tuple[RewardClient, WorkerPool]) -> None:
    """Every answer of real Geometry3K rows, put into a box, is right; with one added to it, it is not."""
    parquet = pytest.importorskip("pyarrow.parquet")
    paths = sorted((_SHARED / "geo3k").glob("*.parquet"))
    if not paths:
        pytest.skip("needs Geometry3K rows in ../shared/geo3k")
    client, _ = service
    golds = [gold for path in paths for gold in parquet.read_table(path, columns=["answer"])["answer"].to_pylist()]
    for profile in ("math", "geo3k"):
        right = [
            item_of(gold, rf"<think>Hm.</think> \boxed{{{gold}}}", item_id=gold, profile=profile) for gold in golds
        ]
        verdicts = await client.verify_batch(right, timeout_s=600)
        assert [verdict.item_id for verdict in verdicts if verdict.score != 1 or verdict.status != OK] == []
        wrong = [item_of(gold, rf"\boxed{{{gold} + 1}}", item_id=gold, profile=profile) for gold in golds]
        verdicts = await client.verify_batch(wrong, timeout_s=600)
        assert [verdict.item_id for verdict in verdicts if verdict.score != 0] == []


async def test_accuracy_on_labelled_pairs(service: tuple[RewardClient, WorkerPool]) -> None:
    """At least 95% of the labelled pairs are verified as labelled."""
    path = _SHARED / "reward" / "pairs.jsonl"
    if not path.is_file():
        pytest.skip("needs labelled pairs in ../shared/reward/pairs.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    items = [item_of(row["gold"], row["response"], item_id=row["id"]) for row in rows]
    verdicts = await service[0].verify_batch(items, timeout_s=600)
    as_labelled = sum((verdict.score == 1) is row["correct"] for verdict, row in zip(verdicts, rows, strict=True))
    assert as_labelled / len(rows) >= 0.95
