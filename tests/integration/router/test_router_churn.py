"""The router when replicas come and go, and what stays where it was."""

import asyncio
import collections
import contextlib
import random
from collections.abc import AsyncIterator, Callable

import pytest

from penstock.bus.connection import Bus, connect
from penstock.rpc.channel import connect as connect_channel
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.v1 import common_pb2, generate_pb2, generate_pb2_grpc, router_pb2
from tests.support.router.routers import Caller, ids, pool, router
from tests.support.waiting import HANG_S, until


async def test_two_routers_agree_where_a_session_belongs(steady_bus: Bus, run_name: str) -> None:
    """With consistent_hash, though they share nothing but NATS."""
    async with (
        pool(steady_bus, 4, balancing="consistent_hash") as (caller, _),
        connect(steady_bus.config, run=run_name) as other_bus,
        router(other_bus, balancing="consistent_hash") as other,
    ):
        await other.until_routable(4)
        for index in range(20):
            mine, theirs = await caller.generate(f"s{index}"), await other.generate(f"s{index}")
            assert mine.replica_id == theirs.replica_id


async def test_a_group_shares_the_replica_that_has_its_prompt(bus: Bus) -> None:
    """With prefix: equal prompts go to one replica, though their sessions differ; other prompts spread."""
    async with pool(bus, 3, balancing="prefix") as (caller, _):
        prompts = [[number] * 100 for number in range(3)]
        homes = collections.defaultdict(set)
        for turn in range(4):
            for number, prompt in enumerate(prompts):
                answer = await caller.generate(f"{number}-{turn}", input_ids=prompt)
                homes[number].add(answer.replica_id)
        assert all(len(home) == 1 for home in homes.values())


async def test_a_drain_goes_on_when_the_lease_ends(bus: Bus) -> None:
    """The replica answers though it is no longer one of the pool's."""
    async with (
        pool(bus, 1, engine={"hang_after": 0}) as (caller, [engine]),
        connect_channel(engine.replica.address) as channel,
    ):
        request = generate_pb2.GenerateRequest(sampling=generate_pb2.SamplingParams(max_new_tokens=1))
        running = generate_pb2_grpc.GenerateServiceStub(channel).GenerateStream(request, timeout=HANG_S)
        await until(lambda: engine.num_running == 1)
        drain = router_pb2.RouterServiceDrainReplicaRequest(replica_id="r0", grace_s=HANG_S)
        draining = asyncio.ensure_future(caller.router.DrainReplica(drain, timeout=2 * HANG_S))
        await caller.until(lambda pool: pool.replicas[0].replica.state == common_pb2.REPLICA_STATE_DRAINING)
        assert engine._lease is not None
        await engine._lease._bucket.delete("r0")
        engine.released.set()
        assert (await draining).num_finished == 1
        assert [token async for chunk in running for token in chunk.output_ids] == ids(1)


async def test_a_drained_replica_hands_its_calls_over(bus: Bus) -> None:
    """Through the router: calls go on elsewhere from their tokens, sessions move, and the rest do not."""
    async with pool(bus, 2, engine={"hang_after": 4}, chunk_tokens=4) as (caller, [leaving, staying]):
        staying.released.set()
        sessions = [f"s{n}" for n in range(8)]
        before = {each: (await caller.generate(each)).replica_id for each in sessions}
        pending = {each: asyncio.ensure_future(caller.generate(each, num_tokens=50)) for each in sessions}
        await until(lambda: leaving.num_running == 4)
        request = router_pb2.RouterServiceDrainReplicaRequest(replica_id="r0", grace_s=0.3)
        draining = asyncio.ensure_future(caller.router.DrainReplica(request, timeout=HANG_S))
        await until(lambda: leaving._handing_over)
        leaving.released.set()
        drained = await draining
        assert (drained.num_finished, drained.num_handed_over) == (0, 4)
        for each, call in pending.items():
            answer = await call
            assert list(answer.output_ids) == ids(50)
            assert answer.replica_id == "r1"
            assert before[each] in ("r0", "r1")
        assert all(len(taken_over.input_ids) >= 4 for taken_over in staying.requests if "#" in taken_over.request_id)
        assert (await caller.generate("s0")).replica_id == "r1"


class Churn:
    """Replicas that come and go at random, and who of them was there without a break."""

    def __init__(self, bus: Bus, caller: Caller, seed: int) -> None:
        self._bus = bus
        self._caller = caller
        self._random = random.Random(seed)
        self._leaving: dict[str, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.gone: set[str] = set()
        self.num_started = 0

    async def _live(self, name: str, crash: bool, leave: asyncio.Event) -> None:
        engine = SimulatedEngine(self._bus, replica_id=name, token_s=0.02, max_running=64)
        async with engine.running():
            await leave.wait()
            self.gone.add(name)
            if crash:
                await engine.stop_serving()
            else:
                await self._caller.until_listed(name)
                request = router_pb2.RouterServiceDrainReplicaRequest(replica_id=name, grace_s=0.2)
                await self._caller.router.DrainReplica(request, timeout=HANG_S)

    def start(self) -> None:
        name = f"r{self.num_started:03}"
        self.num_started += 1
        self._leaving[name] = leave = asyncio.Event()
        self._tasks.append(asyncio.create_task(self._live(name, self._random.random() < 0.5, leave)))

    def stop_one(self) -> None:
        name = self._random.choice(sorted(self._leaving))
        self._leaving.pop(name).set()

    async def replace(self, num_replicas: int, *, num_answers: Callable[[], int]) -> None:
        """Let one after the other go, and another come for each; the present ones answer some calls in between."""
        for _ in range(num_replicas):
            wanted = num_answers() + self._random.randint(4, 16)
            await until(lambda wanted=wanted: num_answers() >= wanted)
            self.stop_one()
            self.start()

    @contextlib.asynccontextmanager
    async def of(self, num_replicas: int) -> AsyncIterator["Churn"]:
        for _ in range(num_replicas):
            self.start()
        try:
            await self._caller.until_routable(num_replicas)
            yield self
        finally:
            for leave in self._leaving.values():
                leave.set()
            await asyncio.gather(*self._tasks)


@pytest.mark.slow
async def test_replicas_that_come_and_go_lose_no_request(steady_bus: Bus) -> None:
    """Sixteen; half of those that leave crash: every answer is whole, and sessions stay where they can."""
    # Everything fails here but the calls: one that met ten failures in a row would be no reason to give it up.
    async with (
        router(steady_bus, wait_for_replica_s=10.0, chunk_tokens=4, max_attempts=10) as caller,
        Churn(steady_bus, caller, 0).of(16) as churn,
    ):
        stop, num_answers = asyncio.Event(), 0

        async def play(session: str) -> None:
            nonlocal num_answers
            home = ""
            while not stop.is_set():
                answer = await caller.generate(session, num_tokens=10, timeout_s=30.0)
                assert list(answer.output_ids) == ids(10)
                if home and home not in churn.gone:
                    assert answer.replica_id == home
                home = answer.replica_id
                num_answers += 1

        async with asyncio.TaskGroup() as group:
            for number in range(32):
                group.create_task(play(f"s{number}"))
            await churn.replace(50, num_answers=lambda: num_answers)
            await until(lambda: num_answers > 500)
            stop.set()
