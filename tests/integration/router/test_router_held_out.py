"""Replicas that are held out of pushes for an evaluation, as the router treats them."""

import asyncio

import grpc

from penstock.bus.connection import Bus
from penstock.records.held_out_replicas import HELD_OUT_KEY, write_held_out_replicas
from penstock.records.published_version import CURRENT_KEY, POLICY_BUCKET, write_published_version
from penstock.v1 import router_pb2, trainer_pb2
from tests.support.router.routers import ids, pool
from tests.support.waiting import promptly, until

INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT


async def publish(bus: Bus, version: int, min_version: int) -> None:
    value = trainer_pb2.PublishedVersion(policy_version=version, min_policy_version=min_version)
    await (await bus.bucket(POLICY_BUCKET)).put(CURRENT_KEY, write_published_version(value))


async def hold_out(bus: Bus, version: int, *replica_ids: str) -> None:
    value = trainer_pb2.HeldOutReplicas(policy_version=version, replica_ids=replica_ids)
    await (await bus.bucket(POLICY_BUCKET)).put(HELD_OUT_KEY, write_held_out_replicas(value))


async def test_replicas_that_are_held_out_answer_an_evaluation_and_nobody_else(steady_bus: Bus) -> None:
    """Whatever version others want; the evaluation's calls go nowhere else, and are not bound by the staleness."""
    async with pool(steady_bus, 2, wait_for_replica_s=0.5) as (caller, [held, other]):
        for engine in (held, other):
            await engine.update(policy_version=3)
        await caller.until(lambda pool: all(each.replica.policy_version == 3 for each in pool.replicas))
        await caller.generate("begun here", group_id="g")
        await hold_out(steady_bus, 3, held.replica_id)
        await caller.until(lambda pool: not pool.replicas[0].routable)
        seen = (await caller.replicas()).replicas
        assert [each.unroutable_reason for each in seen] == ["held out of pushes for an evaluation", ""]
        sessions = ("begun here", *(f"s{number}" for number in range(8)))
        answers = await asyncio.gather(*(caller.generate(each, group_id="g") for each in sessions))
        assert {each.replica_id for each in answers} == {other.replica_id}
        await publish(steady_bus, 9, 8)
        await other.update(policy_version=9)
        await caller.until(lambda pool: pool.min_policy_version == 8 and pool.replicas[1].replica.policy_version == 9)
        exact = [caller.generate(f"e{number}", version=3, exact_policy_version=3) for number in range(8)]
        assert {each.replica_id for each in await asyncio.gather(*exact)} == {held.replica_id}
        assert (await caller.generate()).replica_id == other.replica_id

        async def refusal() -> grpc.aio.AioRpcError | None:
            """Why a call of the evaluation is not played; None if it is."""
            try:
                await caller.generate(version=3, exact_policy_version=3)
            except grpc.aio.AioRpcError as error:
                return error
            return None

        async def waits_for_another() -> bool:
            reason = "of 2 replicas 1 not held out of pushes for its evaluation, 1 not at exactly policy version 3"
            error = await refusal()
            return error is not None and reason in (error.details() or "")

        async def is_over() -> bool:
            error = await refusal()
            return error is not None and error.code() is INVALID_ARGUMENT

        await hold_out(steady_bus, 3)  # it has died
        await until(waits_for_another)
        await hold_out(steady_bus, 0)
        await until(is_over)
        assert (await caller.generate(version=9, exact_policy_version=9)).replica_id == other.replica_id


async def test_a_call_that_a_held_out_replica_hands_over_is_no_failure_of_it(steady_bus: Bus) -> None:
    """It was taken for an evaluation in the middle of the call, and given an older version: another one goes on."""
    async with pool(steady_bus, 2) as (caller, engines):
        for engine in engines:
            engine.hang_after, engine.fail_after = 2, 3
        pending = asyncio.ensure_future(caller.generate("s", num_tokens=6))
        await until(lambda: any(engine.num_running for engine in engines))
        [taken] = [engine for engine in engines if engine.num_running]
        [other] = [engine for engine in engines if not engine.num_running]
        other.hang_after = other.fail_after = None
        await hold_out(steady_bus, 3, taken.replica_id)
        await caller.until(lambda pool: sum(each.routable for each in pool.replicas) == 1)
        taken.released.set()
        answer = await promptly(pending)
        assert (answer.replica_id, list(answer.output_ids)) == (other.replica_id, ids(6))
        breakers = {each.replica.replica_id: each.breaker for each in (await caller.replicas()).replicas}
        assert breakers[taken.replica_id] == router_pb2.BREAKER_STATE_CLOSED
