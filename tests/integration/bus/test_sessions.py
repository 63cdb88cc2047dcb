"""Agents' sessions on the bus: what is left of one that has ended."""

import pytest

from penstock.bus.connection import Bus
from penstock.bus.sessions import Sessions
from penstock.errors import SessionOverError
from penstock.records import GroupId, Sampling, SessionId, SessionState

GROUP = GroupId(run_id="run", index=3, attempt=0, trainer_epoch="a")


def state_of(session: SessionId) -> SessionState:
    """With tools of some kilobytes."""
    tool = {"type": "function", "function": {"name": "search", "description": "x" * 5000}}
    return SessionState(
        nonce=session.nonce,
        group="g",
        scope="run.3.0",
        sampling=Sampling(temperature=1.0, max_new_tokens=8),
        min_version=1,
        tools=(tool,),
    )


async def test_what_is_left_of_a_sample_is_one_small_message(bus: Bus) -> None:
    """Also of one that was played again, so a day's samples fit into the stream. It still says that both are over."""
    sessions = Sessions(bus)
    await sessions.ensure()
    for sample in range(4):
        superseded = SessionId.new(GROUP, sample)
        await sessions.open(superseded, state_of(superseded))
        session = SessionId.new(GROUP, sample)
        await sessions.close(await sessions.open(session, state_of(session)))
        await sessions.forget(session)
        with pytest.raises(SessionOverError, match="this session is closed"):
            await sessions.find(session)
        with pytest.raises(SessionOverError, match="was superseded"):
            await sessions.find(superseded)
    stored = (await bus.jetstream.stream_info(bus.sessions.name)).state
    assert stored.messages == 4
    assert stored.bytes < 4 * 1000
