"""The router over prefill and decode engines, simulated ones that really need each other, with real gRPC and leases."""

import asyncio
import contextlib

import grpc
import pytest

from penstock.bus.connection import Bus, connect
from penstock.clients.routed import RoutedGenerateClient
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.testing.simulated_pd_pair import SimulatedDecode
from penstock.v1 import common_pb2
from tests.integration.router.test_routed_client import request
from tests.support.router.pd_pairs import CLOSED, assert_well_paired, breakers, ids, paired, until_idle
from tests.support.router.routers import failure, router
from tests.support.waiting import HANG_S, until


async def test_a_pair_answers_as_one_engine(steady_bus: Bus) -> None:
    """Both peers get the caller's request, with the same room, host, port and version; each call has another room."""
    async with paired(steady_bus, 1, 1, prefill={"policy_version": 3}, decode={"policy_version": 3}) as (
        caller,
        [p],
        [d],
    ):
        answer = await caller.generate("s", input_ids=[5, 6], request_id="q", num_tokens=5)
        assert list(answer.output_ids) == ids(5)
        assert answer.replica_id == "d0"
        assert [(span.num_tokens, span.policy_version) for span in answer.version_spans] == [(5, 3)]
        chunks = [chunk async for chunk in caller.stream("s", num_tokens=5)]
        assert [token for chunk in chunks for token in chunk.output_ids] == ids(5)
        for mine, theirs in zip(p.requests, d.requests, strict=True):
            assert mine == theirs
            assert mine.bootstrap.host == p.replica.disaggregation.bootstrap_host
            assert mine.bootstrap.port == p.replica.disaggregation.bootstrap_port
            assert mine.bootstrap.policy_version == 3
        assert list(p.requests[0].input_ids) == [5, 6]
        assert p.rooms == d.rooms
        assert len({*p.rooms, 0}) == 3
        assert max(p.rooms) < 2**62
        await until(lambda: p.num_answered == 2)
        assert p.num_cancelled == 0
        await until_idle(caller)


@pytest.mark.parametrize(("num_prefill", "num_decode", "num_unified"), [(1, 3, 0), (3, 1, 0), (2, 3, 1)])
async def test_any_mix_serves(steady_bus: Bus, num_prefill: int, num_decode: int, num_unified: int) -> None:
    """Whatever the counts: everybody works, sessions stay where their prompts are read, no pair is a wrong one."""
    async with contextlib.AsyncExitStack() as stack:
        caller, prefills, decodes = await stack.enter_async_context(
            paired(steady_bus, num_prefill, num_decode, decode={"token_s": 0.002}, chunk_tokens=4)
        )
        unified = [
            await stack.enter_async_context(SimulatedEngine(steady_bus, replica_id=f"u{n}", token_s=0.002).running())
            for n in range(num_unified)
        ]
        await caller.until_routable(num_prefill + num_decode + num_unified)
        for _ in range(3):
            answers = await asyncio.gather(
                *(caller.generate(f"s{n}", num_tokens=12, timeout_s=20.0) for n in range(30))
            )
            assert all(list(answer.output_ids) == ids(12) for answer in answers)
        await until(lambda: all(engine.num_answered for engine in (*prefills, *decodes, *unified)))
        await until(lambda: sum(engine.num_answered for engine in (*decodes, *unified)) == 90)
        assert_well_paired([*prefills, *decodes])
        await until_idle(caller)
        for session in ("s0", "s1", "s2"):
            before = [len(engine.requests) for engine in (*prefills, *unified)]
            await asyncio.gather(*(caller.generate(session, num_tokens=4) for _ in range(3)))
            grown = [len(engine.requests) - old for engine, old in zip((*prefills, *unified), before, strict=True)]
            assert sorted(grown)[-1] == sum(grown) == 3


async def test_calls_that_need_both_peers_never_wait_for_each_other(steady_bus: Bus) -> None:
    """One slot here, two there: a waiting call holds none, so thirty calls get through."""
    settings = {"limit": {"factor": 1.0}}
    async with paired(
        steady_bus, 1, 2, prefill={"max_running": 1}, decode={"max_running": 1, "token_s": 0.002}, **settings
    ) as (
        caller,
        [p],
        decodes,
    ):
        await asyncio.gather(*(caller.generate(f"s{n}", timeout_s=30.0) for n in range(30)))
        await until(lambda: p.num_answered == sum(d.num_answered for d in decodes) == 30)
        assert_well_paired([p, *decodes])
        await until_idle(caller)


async def test_a_caller_that_leaves_ends_its_call_on_both_peers(steady_bus: Bus) -> None:
    """While the prompt is read, and while tokens come; both slots are free again."""
    async with paired(
        steady_bus, 1, 1, prefill={"delay_s": 30.0}, decode={"token_s": 0.01, "pair_timeout_s": 30.0}
    ) as (
        caller,
        [p],
        [d],
    ):
        early = caller.generate("s")
        await until(lambda: p.num_running == d.num_running == 1)
        early.cancel()
        await until(lambda: p.num_running == d.num_running == 0)  # one perhaps by the other's end
        p.delay_s = 0.0
        late = caller.stream("s", num_tokens=1000)
        await late.read()
        late.cancel()
        await until(lambda: d.num_running == 0)
        await until_idle(caller)
        assert set((await breakers(caller)).values()) == {CLOSED}


async def test_unequal_tensor_parallelism_is_refused_and_explained(steady_bus: Bus) -> None:
    """In the list of replicas and to callers; an equal partner that comes is used at once."""
    async with paired(steady_bus, 1, 1, prefill={"tensor_parallel": 2}, wait_for_replica_s=0.4) as (caller, [p], [d]):
        listed = (await caller.replicas()).replicas
        assert not any(each.routable for each in listed)
        assert all("tensor_parallel" in each.unroutable_reason for each in listed)
        error = await failure(caller.generate("s"))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "all 2 replicas are without a partner that has the same tensor_parallel" in (error.details() or "")
        async with SimulatedDecode(steady_bus, replica_id="d9", tensor_parallel=2).running():
            await caller.until_routable(2)
            assert (await caller.generate("s")).replica_id == "d9"
        await until(lambda: p.num_answered == 1)
        assert d.num_calls == 0


async def test_a_call_that_reports_on_its_prompt_goes_to_a_unified_engine(steady_bus: Bus) -> None:
    """With logprobs or experts of its tokens, called by the router or by the client itself; a pair refuses it."""
    asked = {"prompt_logprobs": {"prompt_logprobs": True}, "experts": {"routed_experts_from": 0}}
    async with (
        paired(steady_bus, 2, 2) as (caller, _, _),
        RoutedGenerateClient(caller.address) as client,
    ):
        error = await failure(caller.generate("s", **asked["prompt_logprobs"]))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "peer of a PD pair" in (error.details() or "")
        async with SimulatedEngine(steady_bus, replica_id="u", max_running=1, token_s=0.001).running():
            await caller.until_routable(5)
            answers = await asyncio.gather(
                *(caller.generate(f"{name}{n}", **fields) for name, fields in asked.items() for n in range(4)),
                *(client.generate(request(session=f"c{n}", prompt_logprobs=True), timeout_s=HANG_S) for n in range(4)),
            )
            assert {answer.replica_id for answer in answers} == {"u"}
            await until_idle(caller)


async def test_two_routers_share_the_pairs(steady_bus: Bus, run_name: str) -> None:
    """Their rooms never meet, and what one has running counts with the other."""
    async with (
        paired(steady_bus, 2, 2, decode={"token_s": 0.01}) as (caller, prefills, decodes),
        connect(steady_bus.config, run=run_name) as other_bus,
        router(other_bus) as other,
    ):
        await other.until_routable(4)
        calls = [
            one.generate(f"{index}-{n}", num_tokens=8) for index, one in enumerate((caller, other)) for n in range(12)
        ]
        await asyncio.gather(*calls)
        await until(lambda: [sum(each.num_answered for each in peers) for peers in (prefills, decodes)] == [24, 24])
        assert_well_paired([*prefills, *decodes])
        await decodes[0].update(num_running=8)
        await other.until(lambda pool: pool.replicas[0].replica.num_running == 8)
        assert {(await other.generate(f"late-{n}")).replica_id for n in range(4)} == {"d1"}
        for each in (caller, other):
            await until_idle(each)


async def test_a_session_moves_when_its_prefill_replica_drains(steady_bus: Bus) -> None:
    """And its calls go on with the other."""
    async with paired(steady_bus, 2, 1) as (caller, [leaving, staying], _):
        await caller.generate("s")
        await until(lambda: leaving.num_answered == 1)
        await leaving.update(state=common_pb2.REPLICA_STATE_DRAINING)
        await caller.until(lambda pool: not pool.replicas[1].routable)
        await caller.generate("s")
        await until(lambda: staying.num_answered == 1)
