"""The reward service over real gRPC, with real worker processes, some of which are killed."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import pytest

from penstock.clients import RewardClient
from penstock.errors import DeadlineError, InvalidRequestError, OverloadedError, UnavailableError
from penstock.rpc.channel import connect
from penstock.v1 import reward_pb2, reward_pb2_grpc
from services.reward.config import RewardConfig
from services.reward.isolation.pool import WorkerPool
from services.reward.server import running

_SHARED = Path(__file__).parents[3] / "shared"
_OK = reward_pb2.VERDICT_STATUS_OK
_TIMEOUT = reward_pb2.VERDICT_STATUS_TIMEOUT
_GRACE_S = 0.5
"""Slack for two busy cores."""

# No exact tier decides these; the first takes a worker milliseconds, the second for ever.
_EASY = (r"3\sqrt{2}", r"\boxed{\sqrt{18}}")
_HANGS = (r"3\sqrt{2}", r"\boxed{10000000!}")


def _item(
    gold: str, response: str, *, item_id: str = "", profile: str = "math", deadline_s: float = 0.0
) -> reward_pb2.VerifyItem:
    return reward_pb2.VerifyItem(
        item_id=item_id, golds=[gold], response=response, profile=profile, deadline_s=deadline_s
    )


async def _until(condition: Callable[[], bool], *, timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextlib.asynccontextmanager
async def _service(**settings: object) -> AsyncIterator[tuple[RewardClient, WorkerPool]]:
    config = RewardConfig.model_validate({"workers": 2, **settings})
    async with running(config) as (server, pool), RewardClient(server.address) as client:
        yield client, pool


@pytest.fixture(scope="module")
async def service() -> AsyncIterator[tuple[RewardClient, WorkerPool]]:
    """A service with two workers and the usual settings."""
    async with _service() as pair:
        yield pair


async def test_verdicts_come_in_the_order_of_the_items(service: tuple[RewardClient, WorkerPool]) -> None:
    """However long each takes, and with bad items among them."""
    client, _ = service
    golds = [
        ("5", r"\boxed{5}"),
        _EASY,
        ("5", "none"),
        ("5", r"\boxed{6}"),
        (r"3\sqrt{2}", r"\boxed{\sqrt{17}}"),
        ("", ""),
    ]
    items = [_item(*golds[n % len(golds)], item_id=str(n)) for n in range(120)]
    verdicts = await client.verify_batch(items, timeout_s=30)
    assert [verdict.item_id for verdict in verdicts] == [str(n) for n in range(120)]
    assert [verdict.score for verdict in verdicts] == [1, 1, 0, 0, 0, 0] * 20
    assert [verdict.status for verdict in verdicts[:6]] == [
        _OK, _OK, reward_pb2.VERDICT_STATUS_NO_ANSWER, _OK, _OK, reward_pb2.VERDICT_STATUS_GOLD_INVALID,
    ]  # fmt: skip
    assert verdicts[0].method == reward_pb2.VERDICT_METHOD_EXACT
    assert verdicts[1].method == reward_pb2.VERDICT_METHOD_SYMBOLIC
    assert verdicts[1].extracted == r"\sqrt{18}"


async def test_hostile_items_end_at_their_deadline_while_others_go_on(service: tuple[RewardClient, WorkerPool]) -> None:
    """A worker that hangs is killed; the next one is at work while it hangs."""
    client, _ = service
    started = time.monotonic()
    hanging = asyncio.create_task(client.verify_batch([_item(*_HANGS, deadline_s=3.0)], timeout_s=10))
    await asyncio.sleep(0.05)
    easy = await client.verify_batch([_item(*_EASY)] * 20, timeout_s=10)
    assert [verdict.score for verdict in easy] == [1] * 20
    assert not hanging.done()
    (verdict,) = await hanging
    assert (verdict.status, verdict.score) == (_TIMEOUT, 0)
    assert time.monotonic() - started < 3.0 + _GRACE_S
    assert 3.0 <= verdict.elapsed_s < 3.0 + _GRACE_S


@pytest.mark.parametrize(
    "answer", ["9**9**9**9", "9^{9^{9^9}}", r"\frac{1}{0}", r"\sqrt{" * 60 + "2" + "}" * 60, "{" * 200]
)
async def test_pathological_answers_get_a_verdict(service: tuple[RewardClient, WorkerPool], answer: str) -> None:
    """In time, and with score 0."""
    client, _ = service
    for gold in ("5", r"3\sqrt{2}"):
        started = time.monotonic()
        (verdict,) = await client.verify_batch([_item(gold, rf"\boxed{{{answer}}}")], timeout_s=10)
        assert verdict.score == 0
        assert verdict.status != reward_pb2.VERDICT_STATUS_UNSPECIFIED
        assert time.monotonic() - started < 1.0 + _GRACE_S


async def test_an_item_that_eats_memory_is_stopped() -> None:
    """Its worker is replaced, and the next item is judged."""
    async with _service(workers=1, deadline_s=8.0, memory_limit_mb=128) as (client, pool):
        (before,) = pool.worker_pids
        (verdict,) = await client.verify_batch([_item("2^{100}", r"\boxed{2^{3^{4^{5}}}}")], timeout_s=20)
        assert (verdict.status, verdict.score) == (reward_pb2.VERDICT_STATUS_OUT_OF_MEMORY, 0)
        (verdict,) = await client.verify_batch([_item(*_EASY)], timeout_s=20)
        assert verdict.score == 1
        assert pool.worker_pids != [before]


async def test_killed_workers_lose_no_item() -> None:
    """Items whose worker is killed from outside are judged by another."""
    async with _service() as (client, pool):
        items = [_item(*_EASY, item_id=str(n)) for n in range(400)]
        pending = asyncio.create_task(client.verify_batch(items, timeout_s=60))
        for _ in range(4):
            await asyncio.sleep(0.1)
            for pid in pool.worker_pids[:1]:
                os.kill(pid, signal.SIGKILL)
        verdicts = await pending
        assert [verdict.item_id for verdict in verdicts] == [item.item_id for item in items]
        assert {(verdict.status, verdict.score) for verdict in verdicts} == {(_OK, 1.0)}
        await _until(lambda: len(pool.worker_pids) == 2)


async def test_a_killed_forkserver_is_started_again() -> None:
    """Its workers go with it; new ones come, and no item is lost."""
    async with _service() as (client, pool):
        (worker, _) = pool.worker_pids
        forkserver = _parent_of(worker)
        os.kill(forkserver, signal.SIGKILL)
        verdicts = await client.verify_batch([_item(*_EASY)] * 20, timeout_s=60)
        assert [verdict.score for verdict in verdicts] == [1] * 20


async def test_workers_are_recycled() -> None:
    """After so many items a worker makes place for a fresh one."""
    async with _service(workers=1, recycle_after=5) as (client, pool):
        (before,) = pool.worker_pids
        verdicts = await client.verify_batch([_item(*_EASY)] * 12, timeout_s=60)
        assert [verdict.score for verdict in verdicts] == [1] * 12
        await _until(lambda: len(pool.worker_pids) == 1)
        assert pool.worker_pids != [before]
        assert not _is_alive(before)


async def test_a_full_queue_refuses() -> None:
    """RESOURCE_EXHAUSTED, at once and for the whole call; a batch that can never fit is refused as such."""
    async with _service(workers=1, max_queue=4) as (client, _):
        hanging = asyncio.create_task(client.verify_batch([_item(*_HANGS)] * 3, timeout_s=20))
        await asyncio.sleep(0.2)
        with pytest.raises(OverloadedError, match=r"holds 3 of 4 items and 2 more do not fit"):
            await client.verify_batch([_item("5", r"\boxed{5}")] * 2, timeout_s=5)
        with pytest.raises(InvalidRequestError, match="send at most 4"):
            await client.verify_batch([_item("5", r"\boxed{5}")] * 5, timeout_s=5)
        (verdict,) = await client.verify_batch([_item("5", r"\boxed{5}")], timeout_s=5)
        assert verdict.score == 1
        assert {verdict.status for verdict in await hanging} == {_TIMEOUT}


async def test_cancelling_a_call_stops_its_items() -> None:
    """Queued ones are dropped, the running one's worker is killed, and the place is free for others at once."""
    async with _service(workers=1, deadline_s=20.0) as (client, pool):
        (before,) = pool.worker_pids
        hanging = asyncio.create_task(client.verify_batch([_item(*_HANGS)] * 50, timeout_s=60))
        await asyncio.sleep(0.3)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        started = time.monotonic()
        (verdict,) = await client.verify_batch([_item(*_EASY)], timeout_s=10)
        assert verdict.score == 1
        assert time.monotonic() - started < 2
        assert not _is_alive(before)


async def test_the_callers_deadline_stops_its_items() -> None:
    """An item may take longer than its caller waits; then its worker is killed."""
    async with _service(workers=1, deadline_s=20.0) as (client, pool):
        (before,) = pool.worker_pids
        with pytest.raises(DeadlineError, match=r"(?i)deadline"):
            await client.verify_batch([_item(*_HANGS)], timeout_s=0.5)
        await _until(lambda: not _is_alive(before))


async def test_calls_in_progress_finish_when_the_service_stops() -> None:
    """Draining waits for them; then no process is left."""
    config = RewardConfig(workers=2, grace_s=5.0)
    async with contextlib.AsyncExitStack() as stack:
        server, pool = await stack.enter_async_context(running(config))
        pids = pool.worker_pids
        client = RewardClient(server.address)
        pending = asyncio.create_task(client.verify_batch([_item(*_HANGS), _item(*_EASY)], timeout_s=20))
        await asyncio.sleep(0.3)
    hung, easy = await pending
    assert (hung.status, easy.score) == (_TIMEOUT, 1)
    await client.close()
    await _until(lambda: not any(map(_is_alive, pids)))


async def test_what_outlasts_the_grace_period_is_stopped() -> None:
    """The service stops in time, whatever its workers do."""
    async with contextlib.AsyncExitStack() as stack:
        server, pool = await stack.enter_async_context(running(RewardConfig(workers=1, deadline_s=30, grace_s=0.3)))
        pids = pool.worker_pids
        client = RewardClient(server.address)
        pending = asyncio.create_task(client.verify_batch([_item(*_HANGS)], timeout_s=60))
        await asyncio.sleep(0.3)
        started = time.monotonic()
    assert time.monotonic() - started < 3
    with pytest.raises(UnavailableError, match="reward at"):
        await pending
    await client.close()
    await _until(lambda: not any(map(_is_alive, pids)))


_PROGRAM = """
import asyncio, sys
from penstock import log
from penstock.config import LogConfig
from services.reward.config import RewardConfig
from services.reward.server import running
from services.reward.item import Item
from services.reward.verifier import Verifier

async def main():
    log.configure(LogConfig(), service="reward")
    config = RewardConfig(workers=2, deadline_s=30)
    async with running(config) as (server, pool):
        sys.stdout.write(" ".join(map(str, pool.worker_pids)) + "\\n")
        sys.stdout.flush()
        await Verifier(config, pool).verify([Item(golds=[sys.argv[1]], response=sys.argv[2], profile="math")])

asyncio.run(main())
"""


async def test_no_worker_outlives_a_killed_server() -> None:
    """kill -9 of the server ends the forkserver and all workers, the busy one too."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PROGRAM, *_HANGS, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        workers = [int(pid) for pid in (await process.stdout.readline()).split()]
    forkserver = _parent_of(workers[0])
    await asyncio.sleep(0.5)
    assert all(map(_is_alive, [*workers, forkserver]))
    process.kill()
    await process.wait()
    await _until(lambda: not any(map(_is_alive, [*workers, forkserver])))


async def test_requests_that_can_never_succeed_are_refused(service: tuple[RewardClient, WorkerPool]) -> None:
    """Unknown profiles, deadlines that are none and missing items are errors of the call."""
    client, _ = service
    with pytest.raises(InvalidRequestError, match="known: geo3k, math"):
        await client.verify_batch([_item("5", r"\boxed{5}", profile="algebra")], timeout_s=5)
    for deadline_s in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidRequestError, match="deadline_s"):
            await client.verify_batch([_item("5", r"\boxed{5}", deadline_s=deadline_s)], timeout_s=5)
    async with connect(client.address) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="item is missing"):
            await stub.Verify(reward_pb2.VerifyRequest(), timeout=5)
        response = await stub.Verify(reward_pb2.VerifyRequest(item=_item("5", r"\boxed{5}", item_id="a")), timeout=5)
    assert (response.verdict.item_id, response.verdict.score) == ("a", 1)


async def test_profiles_are_listed(service: tuple[RewardClient, WorkerPool]) -> None:
    """By name, each with what it does."""
    profiles = await service[0].list_profiles()
    assert [profile.name for profile in profiles] == ["geo3k", "math"]
    assert all(profile.description for profile in profiles)


async def test_long_and_odd_texts_are_taken(service: tuple[RewardClient, WorkerPool]) -> None:
    """5 MB, NUL bytes and replacement characters."""
    client, _ = service
    verdicts = await client.verify_batch(
        [
            _item("5", "word " * 1_000_000 + r"\boxed{5}"),
            _item("5", "\x00\\boxed{5\x00}"),
            _item("5", "\\boxed{5\ufffd}"),
        ],
        timeout_s=20,
    )
    assert [verdict.score for verdict in verdicts] == [1, 1, 0]


async def test_geo3k_tolerance_reaches_symbolic_answers(service: tuple[RewardClient, WorkerPool]) -> None:
    """6 sqrt 2 = 8.4853 is the label 8.5; for the integer 8 and for profile math it is nothing of the kind."""
    client, _ = service
    cases = [("8.5", "geo3k", 1), ("8.5", "math", 0), ("8.4", "geo3k", 0), ("8", "geo3k", 0)]
    items = [_item(gold, r"\boxed{6\sqrt{2}}", profile=profile) for gold, profile, _ in cases]
    verdicts = await client.verify_batch(items, timeout_s=10)
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
        right = [_item(gold, rf"<think>Hm.</think> \boxed{{{gold}}}", item_id=gold, profile=profile) for gold in golds]
        verdicts = await client.verify_batch(right, timeout_s=60)
        assert [verdict.item_id for verdict in verdicts if verdict.score != 1 or verdict.status != _OK] == []
        wrong = [_item(gold, rf"\boxed{{{gold} + 1}}", item_id=gold, profile=profile) for gold in golds]
        verdicts = await client.verify_batch(wrong, timeout_s=60)
        assert [verdict.item_id for verdict in verdicts if verdict.score != 0] == []


async def test_accuracy_on_labelled_pairs(service: tuple[RewardClient, WorkerPool]) -> None:
    """At least 95% of the labelled pairs are judged as labelled."""
    path = _SHARED / "reward" / "pairs.jsonl"
    if not path.is_file():
        pytest.skip("needs labelled pairs in ../shared/reward/pairs.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    items = [_item(row["gold"], row["response"], item_id=row["id"]) for row in rows]
    verdicts = await service[0].verify_batch(items, timeout_s=60)
    as_labelled = sum((verdict.score == 1) is row["correct"] for verdict, row in zip(verdicts, rows, strict=True))
    assert as_labelled / len(rows) >= 0.95


async def test_hostile_lines_answer_in_time(service: tuple[RewardClient, WorkerPool]) -> None:
    """Every one, alone, within the deadline."""
    path = _SHARED / "reward" / "hostile.jsonl"
    if not path.is_file():
        pytest.skip("needs hostile inputs in ../shared/reward/hostile.jsonl")
    late = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        response = row["response"].encode("utf-8", "replace").decode()
        started = time.monotonic()
        await service[0].verify_batch([_item(row["gold"], response, profile="geo3k")], timeout_s=10)
        if time.monotonic() - started > 1.0 + _GRACE_S:
            late.append(row["name"])
    assert late == []
