"""PD pairs with a peer that stands still while its connection stands."""

import asyncio
import signal
from typing import Any

import grpc
import pytest

from penstock.bus.connection import Bus
from penstock.clients import pd_pair
from penstock.clients.stream_attempt import Peer
from penstock.errors import UnavailableError
from penstock.testing.freezing import frozen
from penstock.testing.simulated_pd_pair import SimulatedDecode, SimulatedPrefill
from penstock.testing.simulated_process import simulated_process
from penstock.v1 import generate_pb2, router_pb2
from tests.support.router.pd_pairs import CLOSED, breakers, ids
from tests.support.router.routers import failure, router
from tests.support.waiting import HANG_S, promptly, settled, until


@pytest.fixture
def hasty_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen peer counts as dead soon."""
    monkeypatch.setattr("penstock.clients.pd_pair._HEALTH_TIMEOUT_S", 1.0)


@pytest.mark.usefixtures("hasty_blame")
async def test_a_frozen_prefill_replica_is_blamed_for_what_its_partner_waited_for(bus: Bus, run_name: str) -> None:
    """Its connection stands, and the decode replica is the first to give up; yet that is who goes on."""
    async with (
        simulated_process(bus, run_name, "a-frozen", role="prefill", delay_s=60.0) as standing_still,
        SimulatedDecode(bus, replica_id="d", pair_timeout_s=1.0).running() as d,
        router(bus, breaker={"failures": 1}) as caller,
    ):
        await caller.until_routable(2)
        pending = asyncio.ensure_future(caller.generate("s", timeout_s=30.0))
        await until(lambda: d.num_running == 1)
        standing_still.send_signal(signal.SIGSTOP)
        await until(lambda: d.num_timed_out == 1)
        d.pair_timeout_s = HANG_S  # the next partner has all the time
        async with SimulatedPrefill(bus, replica_id="b-heir").running():
            while not pending.done():
                assert (await breakers(caller))["d"] == CLOSED
                await asyncio.sleep(0.02)  # the next look
            assert list((await pending).output_ids) == ids(4)


async def test_a_living_partner_may_be_silent_for_a_moment(
    steady_bus: Bus, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets no turn on a busy host: the peer that failed is to blame, and its breaker opens."""
    assert pd_pair._HEALTH_TIMEOUT_S >= 5.0
    monkeypatch.setattr(pd_pair, "_HEALTH_TIMEOUT_S", HANG_S)
    asked, is_alive = asyncio.Event(), pd_pair._is_alive

    async def ask(peer: Peer[Any, Any]) -> bool:
        asked.set()
        return await is_alive(peer)

    monkeypatch.setattr(pd_pair, "_is_alive", ask)
    async with (
        simulated_process(steady_bus, run_name, "p", role="prefill", delay_s=60.0) as silent,
        SimulatedDecode(steady_bus, replica_id="d").running() as d,
        router(steady_bus, breaker={"failures": 1}, max_attempts=1) as caller,
    ):
        await caller.until_routable(2)
        may_crash = asyncio.Event()

        async def crash(request: generate_pb2.GenerateRequest) -> None:
            await may_crash.wait()
            raise UnavailableError("crashed")

        monkeypatch.setattr(d, "_delay", crash)
        pending = asyncio.ensure_future(caller.generate("s"))
        await until(lambda: d.num_running == 1)
        with frozen(silent.pid):
            may_crash.set()
            await promptly(asked.wait())
            await settled()
        await failure(pending)
        assert await breakers(caller) == {"p": CLOSED, "d": router_pb2.BREAKER_STATE_OPEN}


@pytest.mark.usefixtures("hasty_blame")
async def test_a_turn_that_freezes_its_peers_is_given_up_for_good(bus: Bus, run_name: str) -> None:
    """Like one that kills them: ABORTED, which nobody retries. The frozen peer gets no more calls."""
    async with (
        simulated_process(bus, run_name, "p", role="prefill", delay_s=60.0) as standing_still,
        SimulatedDecode(bus, replica_id="d", pair_timeout_s=1.0).running() as d,
        router(bus, max_attempts=1) as caller,
    ):
        await caller.until_routable(2)
        pending = asyncio.ensure_future(caller.generate("s", timeout_s=30.0))
        await until(lambda: d.num_running == 1)
        standing_still.send_signal(signal.SIGSTOP)
        error = await failure(pending)
        assert error.code() == grpc.StatusCode.ABORTED
        assert "given up after 1 replicas failed" in (error.details() or "")
        states = await breakers(caller)
        assert states.get("p") != CLOSED  # its lease may have ended
        assert states["d"] == CLOSED
