"""The router over replicas that take prompts of different lengths."""

import asyncio
import collections
import re

import grpc
import pytest
from structlog.testing import capture_logs

from penstock.bus.connection import Bus
from penstock.clients.routed import RoutedGenerateClient
from penstock.errors import PromptTooLongError, UnavailableError
from penstock.telemetry import metrics
from penstock.testing.answers import FIRST_ID
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.v1 import common_pb2, generate_pb2
from tests.support.router.routers import pool, router
from tests.support.waiting import HANG_S, promptly


async def test_prompts_go_where_they_fit(steady_bus: Bus) -> None:
    """A long one never to the small replica, though its session is there; a short one to either."""
    async with pool(steady_bus, 2) as (caller, [small, large]):
        await small.update(max_tokens=10)
        await caller.until(lambda pool: any(each.replica.max_tokens == 10 for each in pool.replicas))
        assert (await caller.generate("s", input_ids=[1] * 9)).replica_id == "r0"
        assert (await caller.generate("s", input_ids=[1] * 10)).replica_id == "r1"
        assert small.num_calls == large.num_calls == 1


async def test_what_fits_nowhere_is_refused_at_once_and_clearly(steady_bus: Bus) -> None:
    """OUT_OF_RANGE with both numbers; one replica that does not say how much it takes is asked."""
    async with pool(steady_bus, 2, wait_for_replica_s=2 * HANG_S) as (caller, engines):
        for engine, most in zip(engines, (10, 20), strict=True):
            await engine.update(max_tokens=most)
        await caller.until(lambda pool: sum(each.replica.max_tokens for each in pool.replicas) == 30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await caller.generate(input_ids=[1] * 20)
        assert caught.value.code() == grpc.StatusCode.OUT_OF_RANGE
        assert "20 ids is too long: the largest replica takes 20 tokens" in (caught.value.details() or "")
        assert not any(engine.num_calls for engine in engines)
        await engines[0].update(max_tokens=0)
        await caller.until(lambda pool: sum(each.replica.max_tokens for each in pool.replicas) == 20)
        assert (await caller.generate(input_ids=[1] * 20)).replica_id == "r0"


@pytest.mark.parametrize("says_so", [True, False])
async def test_a_call_that_was_begun_outgrows_only_the_small_replica(steady_bus: Bus, says_so: bool) -> None:
    """A replica that breaks off leaves more than the small one takes, by its ids or (as with images) by more than that:
    the call goes on with the large one."""
    settings = {"chunk_tokens": 1, "breaker": {"failures": 100}, "balancing": "round_robin"}
    async with pool(steady_bus, 2, **settings) as (caller, [large, small]):
        large.fail_after = 8
        small.error = PromptTooLongError("images and all, that is too long")
        await large.update(max_tokens=100)
        await small.update(max_tokens=12 if says_so else 50)
        await caller.until(lambda pool: all(each.replica.max_tokens for each in pool.replicas))
        answer = await caller.generate(input_ids=[1] * 9, num_tokens=16)
        assert list(answer.output_ids) == list(range(FIRST_ID, FIRST_ID + 16))
        assert small.num_calls == (0 if says_so else 1)
        assert large.num_calls >= 2


async def test_a_prompt_whose_images_are_too_large_for_a_replica_goes_to_a_larger_one(steady_bus: Bus) -> None:
    """The router cannot see what images come to; the small replica says so. Where none is larger, the caller hears it,
    with the replica's own reason."""
    async with pool(steady_bus, 2, balancing="round_robin") as (caller, [small, large]):
        await small.update(max_tokens=50)
        await large.update(max_tokens=100)
        await caller.until(lambda pool: sum(each.replica.max_tokens for each in pool.replicas) == 150)
        small.error = PromptTooLongError("the prompt has 60 tokens with its images expanded")
        images = [common_pb2.Image(data=b"a large picture")]
        for _ in range(2):
            assert (await caller.generate(input_ids=[1] * 9, images=images)).replica_id == "r1"
        assert small.num_calls >= 1
        async with RoutedGenerateClient(caller.address) as routed:
            for _ in range(2):
                request = generate_pb2.GenerateRequest(
                    input_ids=[1] * 9, images=images, sampling=generate_pb2.SamplingParams(max_new_tokens=4)
                )
                assert (await routed.generate(request, timeout_s=10.0)).replica_id == "r1"
        large.error = PromptTooLongError("the prompt has 160 tokens with its images expanded")
        async with RoutedGenerateClient(caller.address) as routed:
            with pytest.raises(PromptTooLongError, match="160 tokens with its images expanded"):
                await routed.generate(request, timeout_s=10.0)
        with pytest.raises(grpc.aio.AioRpcError, match="160 tokens with its images expanded") as caught:
            await caller.generate(input_ids=[1] * 9, images=images)
        assert caught.value.code() == grpc.StatusCode.OUT_OF_RANGE


async def test_a_prompt_too_long_for_all_is_refused_at_once_though_a_replica_failed(steady_bus: Bus) -> None:
    """A client that bypasses the router waits for no other replica as large as the one that failed."""
    async with pool(steady_bus, 2, balancing="round_robin", wait_for_replica_s=HANG_S) as (caller, [broken, small]):
        for engine in (broken, small):
            await engine.update(max_tokens=50)
        await caller.until(lambda pool: sum(each.replica.max_tokens for each in pool.replicas) == 100)
        broken.error = UnavailableError("it broke")
        small.error = PromptTooLongError("the prompt has 60 tokens with its images expanded")
        request = generate_pb2.GenerateRequest(
            input_ids=[1] * 9, sampling=generate_pb2.SamplingParams(max_new_tokens=4)
        )
        async with RoutedGenerateClient(caller.address) as routed:
            with pytest.raises(PromptTooLongError, match="60 tokens with its images expanded"):
                await routed.generate(request, timeout_s=10.0)
        assert (broken.num_calls, small.num_calls) == (1, 1)


async def test_a_replica_that_is_too_small_has_not_failed(steady_bus: Bus) -> None:
    """Its calls move as rejected ones, and nobody is warned."""
    async with pool(steady_bus, 2, balancing="round_robin") as (caller, [small, large]):
        await small.update(max_tokens=50)
        await large.update(max_tokens=100)
        await caller.until(lambda pool: sum(each.replica.max_tokens for each in pool.replicas) == 150)
        small.error = PromptTooLongError("the prompt has 60 tokens with its images expanded")
        before = await num_moved_calls()
        with capture_logs() as events:
            for _ in range(2):
                assert (await caller.generate(input_ids=[1] * 9)).replica_id == "r1"
        assert small.num_calls == 2
        assert await num_moved_calls() - before == {"rejected": 2}
        assert [each for each in events if each["log_level"] == "warning"] == []


async def num_moved_calls() -> collections.Counter[str]:
    """The calls of this process's routers that have moved so far, by reason."""
    page = (await metrics.page()).decode()
    samples = re.findall(r'^penstock_router_moved_calls_total\{reason="(\w+)"\} (\d+)', page, re.MULTILINE)
    return collections.Counter({reason: int(count) for reason, count in samples})


async def test_a_replica_of_another_size_frees_the_calls_that_fit_it(steady_bus: Bus) -> None:
    """A long call and short ones wait where there is nobody; a small replica comes: the short ones are played, though
    the long one has waited longer, and so are those that come later."""
    async with router(steady_bus, wait_for_replica_s=2 * HANG_S) as caller:
        long = asyncio.ensure_future(caller.generate("long", input_ids=[1] * 50, timeout_s=2 * HANG_S))
        await caller.until(lambda pool: pool.num_waiting == 1)
        short = [asyncio.ensure_future(caller.generate(f"s{number}")) for number in range(3)]
        await caller.until(lambda pool: pool.num_waiting == 4)
        small = SimulatedEngine(steady_bus, replica_id="small")
        small.replica.max_tokens = 10
        async with small.running():
            answers = await promptly(asyncio.gather(*short, caller.generate("later")))
            assert {answer.replica_id for answer in answers} == {"small"}
            assert not long.done()
            async with SimulatedEngine(steady_bus, replica_id="large").running():
                assert (await promptly(long)).replica_id == "large"
