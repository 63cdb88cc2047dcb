"""PD pairs whose peers die, reject, take a push, join and leave."""

import asyncio
import random
import signal

import grpc
import pytest

from penstock.bus.connection import Bus
from penstock.clients import GenerateClient
from penstock.clients.routed import RoutedGenerateClient
from penstock.errors import OverloadedError, UnavailableError
from penstock.testing.simulated_engine import SimulatedEngine
from penstock.testing.simulated_pd_pair import SimulatedDecode, SimulatedPrefill
from penstock.testing.simulated_process import simulated_process
from penstock.v1 import generate_pb2, router_pb2
from tests.support.router.pd_pairs import CLOSED, assert_well_paired, breakers, ids, paired, until_idle
from tests.support.router.routers import Caller, router
from tests.support.waiting import HANG_S, promptly, until


async def test_a_prefill_replica_is_free_when_its_part_is_done_and_may_die_then(bus: Bus, run_name: str) -> None:
    """Its slot is released while the decode replica goes on; kill -9 after that costs the call nothing."""
    async with (
        simulated_process(bus, run_name, "p", role="prefill") as victim,
        SimulatedDecode(bus, replica_id="d", hang_after=2).running() as d,
        router(bus) as caller,
    ):
        await caller.until_routable(2)
        stream = caller.stream("s", num_tokens=50, timeout_s=30.0)
        first = await stream.read()
        await caller.until(lambda pool: [each.num_in_flight for each in pool.replicas] == [1, 0])
        victim.send_signal(signal.SIGKILL)
        await victim.wait()
        d.released.set()
        tokens = list(first.output_ids)
        while (chunk := await stream.read()) != grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
            tokens.extend(chunk.output_ids)
        assert tokens == ids(50)
        assert len(d.requests) == 1
        await until_idle(caller)


async def test_a_prefill_replica_that_is_killed_before_its_part_is_done_costs_the_call_a_moment(
    bus: Bus, run_name: str
) -> None:
    """The only decode replica is not blamed: it is given the call again, with another prefill replica and room."""
    async with (
        simulated_process(bus, run_name, "a-victim", role="prefill", delay_s=30.0) as victim,
        SimulatedDecode(bus, replica_id="d", pair_timeout_s=20.0).running() as d,
        router(bus) as caller,
    ):
        await caller.until_routable(2)
        pending = asyncio.ensure_future(caller.generate("s", num_tokens=6))
        await until(lambda: d.num_running == 1)
        async with SimulatedPrefill(bus, replica_id="b-heir").running() as heir:
            await caller.until_routable(3)
            victim.send_signal(signal.SIGKILL)
            answer = await promptly(pending)
            assert list(answer.output_ids) == ids(6)
            await until(lambda: heir.num_answered == d.num_answered == 1)
            assert d.num_calls == 2
            assert len(set(d.rooms)) == 2
            assert (await breakers(caller))["d"] == CLOSED
            assert_well_paired([heir, d])
            await until_idle(caller)


async def test_a_killed_prefill_replica_is_blamed_also_where_its_partner_says_so_first(steady_bus: Bus) -> None:
    """The decode replica's "transfer failed" arrives before the connection is lost; a health check finds who died."""
    async with paired(steady_bus, 2, 1, prefill={"delay_s": 30.0}, breaker={"failures": 1}) as (
        caller,
        [first, second],
        [d],
    ):
        second.delay_s = 0.0
        pending = asyncio.ensure_future(caller.generate("s"))
        await until(lambda: d.num_running == first.num_running == 1)
        d.error = UnavailableError("the transfer failed")  # heard by the router as soon as the ticket is there
        first.drop_passes()
        await first.stop_serving()
        d.error = None
        assert list((await promptly(pending)).output_ids) == ids(4)
        assert (await breakers(caller))["d0"] == CLOSED
        await until(lambda: second.num_answered == 1)
        await until_idle(caller)


async def test_a_decode_replica_that_is_killed_in_mid_stream_costs_nothing_delivered(bus: Bus, run_name: str) -> None:
    """Another goes on from the tokens, with the prefill replica that the session belongs to, in another room."""
    async with (
        SimulatedPrefill(bus, replica_id="p").running() as p,
        simulated_process(bus, run_name, "a-victim", role="decode", token_s=0.02, hang_after=30) as victim,
        router(bus) as caller,
    ):
        await caller.until_routable(2)
        chunks: list[generate_pb2.GenerateChunk] = []

        async def play() -> None:
            async for chunk in caller.stream("s", num_tokens=60, input_ids=[5, 6], request_id="q", timeout_s=30.0):
                chunks.append(chunk)

        playing = asyncio.create_task(play())
        await until(lambda: len(chunks) >= 5)
        async with SimulatedDecode(bus, replica_id="b-heir").running() as heir:
            await caller.until_routable(3)
            victim.send_signal(signal.SIGKILL)
            await promptly(playing)
            assert [token for chunk in chunks for token in chunk.output_ids] == ids(60)
            [rest] = heir.requests
            assert 5 <= len(rest.input_ids) - 2 < 60
            assert rest.request_id == "q#1"
            assert p.requests[1] == rest
            assert len(set(p.rooms)) == 2
            assert (await breakers(caller))["p"] == CLOSED
            await until_idle(caller)


async def test_the_peer_that_fails_first_ends_the_other_at_once(steady_bus: Bus) -> None:
    """It does not wait for a partner that will not come; and it is given the call again, for it did nothing wrong."""
    patient = {"pair_timeout_s": 30.0}
    async with paired(steady_bus, 2, 2, prefill=patient, decode=patient, breaker={"failures": 1}) as (
        caller,
        [p, other_p],
        [d, other_d],
    ):
        p.delay_s, d.delay_s, d.error = 30.0, 1.0, OverloadedError("full")
        pending = asyncio.ensure_future(caller.generate("s"))
        await until(lambda: p.num_cancelled == 1)
        await until(lambda: p.num_running == other_d.num_running == 1)  # both peers are called at once
        assert (d.num_calls, p.num_calls, other_p.num_calls) == (1, 2, 0)
        pending.cancel()
        await until(lambda: p.num_running == other_d.num_running == 0)
        p.delay_s, p.error = (
            0.1,
            OverloadedError("full"),
        )  # its partner may notice before the router
        d.delay_s, d.error = 0.0, None
        await caller.generate("s")
        await until(lambda: other_p.num_answered == 1)
        await until(lambda: other_d.num_running == d.num_running == 0)
        assert set((await breakers(caller)).values()) == {CLOSED}
        await until_idle(caller)


async def test_a_peer_that_turns_out_to_have_another_version_is_no_failure(steady_bus: Bus) -> None:
    """Its lease is late: it rejects the call, which goes on elsewhere, and both breakers stay closed."""
    settings = {"policy_version": 3}
    async with paired(steady_bus, 2, 1, prefill=settings, decode=settings, breaker={"failures": 1}) as (
        caller,
        [early, late],
        _,
    ):
        lease, value = early._lease, early._describe()
        assert lease is not None
        lease._describe = lambda: value  # it goes on naming the old version
        early.replica.policy_version = 4
        for n in range(6):
            answer = await caller.generate(f"s{n}")
            assert answer.version_spans[0].policy_version == 3
        assert early.num_calls >= 1
        assert early.num_answered == 0
        await until(lambda: late.num_answered == 6)
        assert set((await breakers(caller)).values()) == {CLOSED}
        await until_idle(caller)


async def test_a_rolling_push_loses_no_call_and_mixes_no_versions(steady_bus: Bus) -> None:
    """Replicas are pushed to one after the other, three times, while turns run: each attempt has one version on both
    peers, what a push breaks off goes on from its tokens, and no breaker opens."""
    async with paired(
        steady_bus,
        2,
        2,
        decode={"token_s": 0.005},
        wait_for_replica_s=20.0,
        chunk_tokens=2,
        breaker={"failures": 1},
        max_attempts=1,
    ) as (caller, prefills, decodes):
        stop, spans, opened = asyncio.Event(), [], set()

        async def play(session: str) -> None:
            while not stop.is_set():
                answer = await caller.generate(session, num_tokens=60, timeout_s=30.0)
                assert list(answer.output_ids) == ids(60)
                spans.append([span.policy_version for span in answer.version_spans])

        async def watch() -> None:
            while not stop.is_set():
                opened.update(name for name, state in (await breakers(caller)).items() if state != CLOSED)
                await asyncio.sleep(0.05)  # the next look

        async def some_answers() -> None:
            wanted = len(spans) + 16
            await until(lambda: len(spans) >= wanted)

        async with asyncio.TaskGroup() as group:
            for n in range(8):
                group.create_task(play(f"s{n}"))
            group.create_task(watch())
            for version in (1, 2, 3):
                await some_answers()
                for engine in (*prefills, *decodes):
                    await engine.begin_push()
                    await asyncio.sleep(0.05)  # how long a push takes
                    await engine.end_push(version)
            await some_answers()
            stop.set()
        assert {version for each in spans for version in each} == {0, 1, 2, 3}
        assert all(each == sorted(each) for each in spans)
        assert any(len(each) > 1 for each in spans)
        assert not opened
        assert not any(d.num_mismatched for d in decodes)
        await until_idle(caller)


async def test_a_push_makes_an_answer_of_a_form_start_over(steady_bus: Bus) -> None:
    """Called by the router or by the client itself, while the caller has nothing of it. A stream that has begun ends
    with UNAVAILABLE, so that its client asks again. Nobody is blamed."""
    form = generate_pb2.Constraint(regex=".*")
    asked = generate_pb2.GenerateRequest(
        request_id="q",
        input_ids=[5, 6],
        sampling=generate_pb2.SamplingParams(max_new_tokens=40, constraint=form),
        chunk_tokens=1,
    )
    async with (
        paired(steady_bus, 1, 1, decode={"hang_after": 20}, breaker={"failures": 1}, chunk_tokens=2) as (
            caller,
            [p],
            [d],
        ),
        RoutedGenerateClient(caller.address) as client,
        GenerateClient(caller.address) as forwarded,
    ):
        playing = [asyncio.create_task(each.generate(asked, timeout_s=HANG_S)) for each in (client, forwarded)]
        await until(lambda: d.num_running == 2)
        tokens: list[int] = []

        async def stream() -> None:
            async for chunk in forwarded.stream(asked, timeout_s=HANG_S):
                tokens.extend(chunk.output_ids)

        streaming = asyncio.create_task(stream())
        await until(lambda: len(tokens) == 20 and p.num_answered == 3)
        for engine in (p, d):
            await engine.begin_push()
        d.hang_after = None
        d.released.set()
        await until(lambda: d.num_running == 0)
        for engine in (p, d):
            await engine.end_push(1)
        for answer in await promptly(asyncio.gather(*playing)):
            assert list(answer.output_ids) == ids(40)
            assert [(span.num_tokens, span.policy_version) for span in answer.version_spans] == [(40, 1)]
        with pytest.raises(UnavailableError, match="lost its replica after 20 tokens"):
            await promptly(streaming)
        assert [list(again.input_ids) for again in d.requests if again.request_id == "q#1"] == [[5, 6], [5, 6]]
        assert set((await breakers(caller)).values()) == {CLOSED}
        await until_idle(caller)


class PairChurn:
    """Engines of all roles join and leave; half of those that leave crash."""

    def __init__(self, bus: Bus, caller: Caller, seed: int) -> None:
        self._bus = bus
        self._caller = caller
        self._random = random.Random(seed)
        self._leaving: dict[str, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.num_started = 0
        self.engines: list[SimulatedEngine] = []

    def start(self, kind: str) -> None:
        name = f"{kind}{self.num_started:03}"
        self.num_started += 1
        make = {"p": SimulatedPrefill, "d": SimulatedDecode, "u": SimulatedEngine}[kind]
        engine = make(self._bus, replica_id=name, token_s=0.01, max_running=32)
        self.engines.append(engine)
        self._leaving[name] = leave = asyncio.Event()
        self._tasks.append(asyncio.create_task(self._live(engine, leave, crash=self._random.random() < 0.5)))

    async def _live(self, engine: SimulatedEngine, leave: asyncio.Event, *, crash: bool) -> None:
        async with engine.running():
            await leave.wait()
            if crash:
                await engine.stop_serving()
            else:
                await self._caller.until_listed(engine.replica_id)
                request = router_pb2.RouterServiceDrainReplicaRequest(replica_id=engine.replica_id, grace_s=0.1)
                await self._caller.router.DrainReplica(request, timeout=HANG_S)

    def replace_one(self) -> None:
        name = self._random.choice(sorted(self._leaving))
        self._leaving.pop(name).set()
        self.start(name[0])

    async def end(self) -> None:
        for leave in self._leaving.values():
            leave.set()
        await asyncio.gather(*self._tasks)


@pytest.mark.slow
async def test_five_hundred_calls_under_churn_lose_none(steady_bus: Bus) -> None:
    """Engines of every role crash and drain at random; every answer is whole, and all slots are free in the end."""
    # Everything fails here but the calls: one that met ten failures in a row would be no reason to give it up.
    async with router(steady_bus, wait_for_replica_s=10.0, chunk_tokens=4, max_attempts=10) as caller:
        churn = PairChurn(steady_bus, caller, 0)
        for kind in "pppdddduu":
            churn.start(kind)
        try:
            await caller.until_routable(9)
            num_answers = 0

            def is_over() -> bool:
                return num_answers >= 500 and churn.num_started >= 30

            async def play(session: str) -> None:
                nonlocal num_answers
                while not is_over():
                    answer = await caller.generate(session, num_tokens=10, timeout_s=30.0)
                    assert list(answer.output_ids) == ids(10)
                    num_answers += 1

            async def disturb() -> None:
                while not is_over():
                    wanted = num_answers + 24  # from the present ones
                    await until(lambda wanted=wanted: num_answers >= wanted or is_over())
                    churn.replace_one()

            async with asyncio.TaskGroup() as group:
                for number in range(24):
                    group.create_task(play(f"s{number}"))
                group.create_task(disturb())
            assert not any(engine.num_mismatched for engine in churn.engines if isinstance(engine, SimulatedDecode))
            await until_idle(caller)
        finally:
            await churn.end()
