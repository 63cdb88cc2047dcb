"""Sessions of agents while engines or NATS are away, and after the bus has lost images: what a sample need not be lost
for."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from structlog.testing import capture_logs

from penstock.bus.connection import connect
from penstock.bus.image_store import ImageStore, hash_of
from penstock.bus.local_server import local_server
from penstock.bus.sessions import Sessions
from penstock.config import BusConfig
from penstock.errors import MissingImageError
from penstock.records import SessionId
from penstock.v1 import common_pb2
from services.router.frontends.openai.sessions.session_api import SessionApi
from tests.support.router.agent_session import agent_session, group_id, state_of
from tests.support.router.openai_harness import HI, PNG, Harness, collect, data_url
from tests.support.waiting import promptly, until

LOOK: Any = [
    {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": data_url(PNG)}}, {"type": "text", "text": "look"}],
    }
]


async def set_states(harness: Harness, state: common_pb2.ReplicaState.ValueType) -> None:
    """Show all engines in this state."""
    for engine in harness.engines:
        await engine.update(state=state)


async def test_a_call_of_a_session_waits_for_an_engine_while_the_session_is_open(harness: Harness) -> None:
    """Longer than router.wait_for_replica_s, in which another client's call fails: an agent takes 503 as its end."""
    async with agent_session(harness, timeout_s=600.0) as agent:
        await set_states(harness, common_pb2.REPLICA_STATE_DRAINING)
        await harness.until_routable(0)
        once = agent.clients[0].with_options(max_retries=0).chat.completions
        waiting = asyncio.create_task(once.create(model="any", messages=HI))
        await harness.until_waiting(1)
        with pytest.raises(openai.InternalServerError, match="no replica could take the request") as caught:
            await harness.chat()
        assert caught.value.status_code == 503
        await set_states(harness, common_pb2.REPLICA_STATE_READY)
        answer = await promptly(waiting)
        assert answer.choices[0].message.content == "fine"
        assert len(await agent.calls()) == 1


async def test_the_images_of_a_waiting_call_count_in_the_wait_queue(harness: Harness) -> None:
    """Those of a session too, which the router keeps to restore them, though engines fetch them themselves."""
    image = PNG + bytes(2**18)
    look: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(image)}}]}]
    async with agent_session(harness, timeout_s=600.0) as agent:
        await set_states(harness, common_pb2.REPLICA_STATE_DRAINING)
        await harness.until_routable(0)
        waiting = asyncio.create_task(agent.ask(look))
        await harness.until_waiting(1, min_bytes=len(image))
        await set_states(harness, common_pb2.REPLICA_STATE_READY)
        assert (await promptly(waiting)).choices[0].message.content == "fine"


@pytest.mark.parametrize("timeout_s", [0.0, 2.0])
async def test_no_call_waits_for_an_engine_longer_than_its_session_is_open(harness: Harness, timeout_s: float) -> None:
    """Then it answers 503; without a known time, after router.wait_for_replica_s."""
    async with agent_session(harness, timeout_s=timeout_s) as agent:
        await set_states(harness, common_pb2.REPLICA_STATE_DRAINING)
        await harness.until_routable(0)
        once = agent.clients[0].with_options(max_retries=0).chat.completions
        with pytest.raises(openai.InternalServerError, match="no replica could take the request") as caught:
            await promptly(once.create(model="any", messages=HI))
        assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "1")


@pytest.mark.slow
async def test_a_session_is_found_after_a_restart_of_nats(tmp_path: Path, run_name: str) -> None:
    """However long its server is away: the first requests of a call wait for it."""
    async with contextlib.AsyncExitStack() as server:
        url = await server.enter_async_context(local_server(tmp_path))
        async with connect(BusConfig(url=url), run=run_name) as bus:
            sessions, group = Sessions(bus), group_id(run_name)
            await sessions.ensure()
            session = SessionId.new(group, 0)
            opened = await sessions.open(session, state_of(group, session, timeout_s=600.0))
            make: Any = SessionApi
            api = make(SimpleNamespace(), sessions, None, grid=None)
            await server.aclose()
            with capture_logs() as events:
                pending = asyncio.create_task(api.require_open(str(session)))
                await until(lambda: pending.done() or "session.waits_for_bus" in [each["event"] for each in events])
            assert not pending.done()
            async with local_server(tmp_path, port=int(url.rsplit(":", 1)[1])):
                assert await promptly(pending) == opened


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_lost_images_of_a_session_are_restored_from_its_next_call(harness: Harness, is_streamed: bool) -> None:
    """The client sends the whole conversation again, and with it what the store has lost or let expire."""
    images = ImageStore(harness.bus, cache_bytes=0)
    for engine in harness.engines:
        engine.image_store = images
    group = group_id(harness.run)
    async with agent_session(harness, group, images=(hash_of(PNG),)) as agent:  # the row's, which nobody stored
        said = (await agent.ask(LOOK)).choices[0].message.model_dump(exclude_none=True)
        assert await images.get(group.scope, hash_of(PNG)) == PNG
        await images.remove(group.scope)
        other = PNG + b"other"
        new = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(other)}}]}
        answer = await agent.ask([*LOOK, said, new], router=1, stream=is_streamed)
        if is_streamed:
            assert (await collect(answer))[-1].choices[0].finish_reason == "stop"
        assert [await images.get(group.scope, hash_of(each)) for each in (PNG, other)] == [PNG, other]
        assert [list(call.images) for call in await agent.calls()] == [[hash_of(PNG)], [hash_of(other)]]


async def test_an_image_that_stays_lost_is_a_refusal_in_words(harness: Harness) -> None:
    """Clients do not try that again."""
    for engine in harness.engines:
        engine.error = MissingImageError("image ab is not stored; store it again")
    async with agent_session(harness) as agent:
        with pytest.raises(openai.BadRequestError, match="end this agent, or send the conversation again") as caught:
            await agent.ask(LOOK)
        assert caught.value.code == "image_lost"
        assert sum(engine.num_calls for engine in harness.engines) == 2
        assert await agent.calls() == []
