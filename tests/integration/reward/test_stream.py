"""VerifyStream over real gRPC: many items at a time, each answered by its id, and bounded in every direction."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.clients import RewardClient
from penstock.errors import DeadlineError, OverloadedError, UnavailableError
from penstock.v1 import reward_pb2
from services.reward import verifier
from services.reward.config import RewardConfig
from services.reward.isolation.pool import WorkerPool
from services.reward.server import running
from tests.support.reward.service import (
    OK,
    OUT_OF_MEMORY,
    TIMEOUT,
    easy_item,
    end_items,
    hanging_item,
    item_of,
    reward_service,
)
from tests.support.waiting import HANG_S, promptly, until

pytestmark = pytest.mark.leaves_behind("the module's pool replaces workers, and their pipes", "descriptor")

Item = reward_pb2.VerifyItem
Response = reward_pb2.VerifyStreamResponse


@pytest.fixture(scope="module")
async def service() -> AsyncIterator[tuple[RewardClient, WorkerPool]]:
    """A service with two workers and the usual settings."""
    async with reward_service() as pair:
        yield pair


async def each(items: Iterable[Item]) -> AsyncIterator[Item]:
    for item in items:
        yield item


async def answers(client: RewardClient, items: Iterable[Item], *, timeout_s: float = 600.0) -> list[Response]:
    return [response async for response in client.verify_stream(each(items), timeout_s=timeout_s)]


async def test_every_item_is_answered_once_by_its_id(service: tuple[RewardClient, WorkerPool]) -> None:
    """Items that tier 1 decides and items that workers decide, mixed; the stream ends when its caller has no more."""
    client, _ = service
    items = [
        easy_item(str(n)) if n % 10 == 5 else item_of(str(n), rf"\boxed{{{n + n % 2}}}", item_id=str(n))
        for n in range(600)
    ]
    verdicts = {response.verdict.item_id: response.verdict for response in await answers(client, items)}
    assert len(verdicts) == 600
    assert {int(name) for name, verdict in verdicts.items() if verdict.score == 1} == {
        *range(0, 600, 2),
        *range(5, 600, 10),
    }
    assert {verdict.status for verdict in verdicts.values()} == {OK}


async def test_an_empty_stream_ends(service: tuple[RewardClient, WorkerPool]) -> None:
    """With nothing."""
    assert await answers(service[0], []) == []


async def test_verdicts_come_as_they_are_reached(service: tuple[RewardClient, WorkerPool]) -> None:
    """Who hangs is answered last, though it was sent first."""
    client, pool = service
    items = [hanging_item("hangs"), *(easy_item(str(n)) for n in range(5))]
    got = []
    async for response in client.verify_stream(each(items), timeout_s=HANG_S):
        got.append(response.verdict)
        if len(got) == 5:
            assert pool.num_busy == 1
            end_items(pool)
    assert {verdict.item_id for verdict in got[:5]} == {"0", "1", "2", "3", "4"}
    assert (got[5].item_id, got[5].status) == ("hangs", OUT_OF_MEMORY)


async def test_an_item_that_cannot_be_taken_leaves_the_stream_whole(service: tuple[RewardClient, WorkerPool]) -> None:
    """Unknown profile, no length of time: an error with the item's id and the remedy; the others are verified."""
    items = [
        item_of("5", r"\boxed{5}", item_id="first"),
        item_of("5", r"\boxed{5}", item_id="profile", profile="mth"),
        item_of("5", r"\boxed{5}", item_id="deadline", deadline_s=-1),
        item_of("5", r"\boxed{5}", item_id="last"),
    ]
    got = await answers(service[0], items)
    assert {response.verdict.item_id for response in got if response.HasField("verdict")} == {"first", "last"}
    errors = {response.error.item_id: response.error.message for response in got if response.HasField("error")}
    assert set(errors) == {"profile", "deadline"}
    assert "'mth' is unknown; known:" in errors["profile"]
    assert "give seconds > 0, or 0" in errors["deadline"]


async def test_a_request_without_an_item_is_an_error_of_its_own(service: tuple[RewardClient, WorkerPool]) -> None:
    """The stream goes on."""
    client, _ = service
    requests = [reward_pb2.VerifyStreamRequest(), reward_pb2.VerifyStreamRequest(item=item_of("5", r"\boxed{5}"))]
    got = [response async for response in client._stub.VerifyStream(iter(requests), timeout=600.0)]
    assert sorted(response.WhichOneof("outcome") for response in got) == ["error", "verdict"]
    assert [response.error.message for response in got if response.HasField("error")] == ["item is missing"]


async def test_while_the_queue_is_full_a_stream_waits_and_a_call_is_refused() -> None:
    """The stream loses nothing; Verify is told RESOURCE_EXHAUSTED."""
    async with reward_service(workers=1, max_items=1) as (client, pool):
        items = [hanging_item("hangs"), *(easy_item(str(n)) for n in range(20))]
        streaming = asyncio.create_task(answers(client, items, timeout_s=HANG_S))
        await until(lambda: pool.num_busy == 1)
        with pytest.raises(OverloadedError, match=r"the queue holds 1 of 1 items .* start another"):
            await client.verify(item_of("5", r"\boxed{5}"), timeout_s=30)
        end_items(pool)
        assert {response.verdict.item_id for response in await streaming} == {"hangs", *map(str, range(20))}
        assert (await client.verify(item_of("5", r"\boxed{5}", item_id="a"), timeout_s=30)).item_id == "a"


async def test_a_stream_that_gets_no_answers_is_read_no_further() -> None:
    """Its sender is held up: the service keeps a bounded number of its items."""
    num_sent = 0

    async def endless() -> AsyncIterator[Item]:
        nonlocal num_sent
        while True:
            num_sent += 1
            item = hanging_item(str(num_sent))
            item.prompt = "x" * 20_000
            yield item

    async with (
        reward_service(workers=1, max_items=1, grace_s=0) as (client, _),
        contextlib.aclosing(client.verify_stream(endless())) as stream,
    ):
        reading = asyncio.ensure_future(anext(stream))
        before = 0
        while num_sent != before or num_sent == 0:  # a sender that is not held up never comes to rest
            before = num_sent
            assert num_sent < 2000
            await asyncio.sleep(0.5)  # nothing says that no more will come
        reading.cancel()
        await asyncio.wait((reading,))


async def test_leaving_a_stream_kills_what_runs_for_it() -> None:
    """And its items leave the queue."""
    async with reward_service(workers=1, max_items=1) as (client, pool):
        pids = pool.worker_pids
        items = [item_of("5", r"\boxed{5}"), hanging_item()]
        async with contextlib.aclosing(client.verify_stream(each(items))) as stream:
            assert (await anext(stream)).verdict.score == 1
            await until(lambda: pool.num_busy == 1)
        await until(lambda: pool.num_busy == 0 and not set(pids) <= set(pool.worker_pids))
        assert (await client.verify(easy_item(), timeout_s=600)).score == 1


async def test_the_deadline_of_a_stream_kills_what_runs_for_it() -> None:
    """The caller hears DeadlineError; items that were answered before stay answered."""
    async with reward_service(workers=1, max_items=2) as (client, pool):
        items = [item_of("5", r"\boxed{5}"), *[hanging_item()] * 4]
        stream = client.verify_stream(each(items), timeout_s=5.0)
        assert (await anext(stream)).verdict.status == OK
        with pytest.raises(DeadlineError):
            assert [response async for response in stream] == []
        await until(lambda: pool.num_busy == 0)
        assert (await client.verify(easy_item(), timeout_s=600)).score == 1


def rpc_error(details: str) -> grpc.aio.AioRpcError:
    """The error of another call, which the caller's items make."""
    none = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, details=details, debug_error_string="")


@pytest.mark.parametrize("error", [LookupError, asyncio.InvalidStateError, rpc_error])
async def test_an_error_of_the_callers_items_reaches_the_caller(
    service: tuple[RewardClient, WorkerPool], error: Callable[[str], Exception]
) -> None:
    """The stream is cancelled, and the caller sees its own error, even one that ended streams have too."""

    async def failing() -> AsyncIterator[Item]:
        yield item_of("5", r"\boxed{5}")
        raise error("no more rows")

    async def read() -> None:
        async for _ in service[0].verify_stream(failing()):
            pass

    with pytest.raises(type(error("")), match="no more rows"):
        await promptly(read())


async def test_draining_answers_what_a_stream_has_sent_and_then_ends_it() -> None:
    """The caller hears UnavailableError, for it may have sent more than was read."""
    done = asyncio.Event()

    async def unending() -> AsyncIterator[Item]:
        yield item_of("5", r"\boxed{5}", item_id="quick")
        yield hanging_item("hangs")
        await done.wait()

    got: list[str] = []
    stack = contextlib.AsyncExitStack()
    service = await stack.enter_async_context(running(RewardConfig(workers=1), grace_s=HANG_S))
    async with RewardClient(service.rpc.address) as client:

        async def read() -> None:
            async for response in client.verify_stream(unending()):
                got.append(response.verdict.item_id)

        reading = asyncio.create_task(read())
        await until(lambda: service.pool.num_busy == 1)
        asyncio.get_running_loop().call_later(1.0, end_items, service.pool)
        await stack.aclose()
        with pytest.raises(UnavailableError, match="stopping; send the items without a verdict again"):
            await reading
    assert got == ["quick", "hangs"]
    done.set()


async def test_nobody_there_is_unavailable() -> None:
    """The stream's first read says so."""
    async with reward_service() as (client, _):
        address = client.address
    async with RewardClient(address) as client:
        with pytest.raises(UnavailableError, match=address):
            await answers(client, [item_of("5", "5")])


async def test_a_call_tells_an_item_less_time_than_the_caller_waits(
    service: tuple[RewardClient, WorkerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One item that asks for more than the whole call has costs its batch nothing: it is a TIMEOUT of its own."""
    monkeypatch.setattr(verifier, "_SHARE_FOR_ITEM", 0.1)
    client, _ = service
    items = [item_of("5", r"\boxed{5}"), hanging_item()]
    verdicts = await client.verify_batch(items, timeout_s=30.0)
    assert [verdict.status for verdict in verdicts] == [OK, TIMEOUT]


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
async def test_a_call_that_ends_takes_its_items_with_it(how: str) -> None:
    """Those that wait for a worker, and the one that a worker is at, which is killed."""
    async with reward_service(workers=1, max_overtime=0) as (client, pool):
        pids, num_killed = pool.worker_pids, pool.num_killed
        timeout_s = HANG_S if how == "cancelled" else 8.0
        calling = asyncio.create_task(client.verify_batch([hanging_item()] * 3, timeout_s=timeout_s))
        await until(lambda: (pool.num_busy, pool.num_waiting) == (1, 2))
        if how == "cancelled":
            calling.cancel()
        await asyncio.wait((calling,))
        if how == "deadline":
            assert isinstance(calling.exception(), DeadlineError)
        await until(lambda: (pool.num_busy, pool.num_waiting) == (0, 0) and pool.worker_pids != pids)
        assert pool.num_killed > num_killed
        assert (await client.verify(easy_item(), timeout_s=600)).score == 1


async def test_health_tells_watchers_of_the_drain() -> None:
    """NOT_SERVING comes before the calls in progress are done."""
    stack = contextlib.AsyncExitStack()
    service = await stack.enter_async_context(running(RewardConfig(workers=1), grace_s=HANG_S))
    async with RewardClient(service.rpc.address) as client:
        request = health_pb2.HealthCheckRequest(service="penstock.v1.RewardService")
        watching = health_pb2_grpc.HealthStub(client._channel).Watch(request, timeout=HANG_S)
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.SERVING
        hanging = asyncio.create_task(client.verify(hanging_item(), timeout_s=HANG_S))
        await until(lambda: service.pool.num_busy == 1)
        stopping = asyncio.create_task(stack.aclose())
        assert (await watching.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not hanging.done()
        end_items(service.pool)
        assert (await hanging).status == OUT_OF_MEMORY
        watching.cancel()  # else it holds the drain until its grace is over
        await stopping
