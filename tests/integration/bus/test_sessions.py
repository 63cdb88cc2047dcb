"""Agents' sessions on the bus: what they take, and what is left of one that has ended."""

import asyncio

import msgspec
import numpy as np
import pytest

from penstock.bus.connection import Bus
from penstock.bus.kept_stream import KeptStream
from penstock.bus.sessions import Sessions
from penstock.errors import SessionOverError
from penstock.records import GroupId, Sampling, SessionCall, SessionFailure, SessionId, SessionState, VersionSpan
from tests.support.waiting import promptly

GROUP = GroupId(run_id="run", index=3, attempt=0, trainer_epoch="a")
CALL = SessionCall(
    request_id="q",
    choice=0,
    conversation="c",
    answer="a",
    input_ids=np.array([1], "<i4"),
    output_ids=np.array([2], "<i4"),
    logprobs=np.zeros(1, "<f4"),
    version_spans=(VersionSpan(num_tokens=1, policy_version=1),),
    finish_reason="stop",
    num_prompt_tokens=1,
    num_cached_tokens=0,
)


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


async def test_a_session_whose_state_is_lost_takes_no_answer(bus: Bus) -> None:
    """Nothing brings it back, so a call need not try again until its session's time is over."""
    sessions = Sessions(bus)
    await sessions.ensure()
    session = SessionId.new(GROUP, 9)
    opened = await sessions.open(session, state_of(session))
    await bus.jetstream.purge_stream(bus.sessions.name)
    with pytest.raises(SessionOverError, match="state is gone"):
        await sessions.keep(opened, CALL)
    assert await sessions.read(session) == []


async def test_a_session_that_is_ending_takes_the_answers_in_progress(bus: Bus) -> None:
    """Their routers saw it before. Its worker closes it as it opened it."""
    sessions = Sessions(bus)
    await sessions.ensure()
    session = SessionId.new(GROUP, 10)
    opened = await sessions.open(session, state_of(session))
    await sessions.begin_end(opened)
    found = await sessions.find(session)
    assert found is not None
    assert found.state.is_ending
    number = await sessions.keep(opened, CALL)
    await sessions.close(opened)
    with pytest.raises(SessionOverError, match="this session is closed"):
        await sessions.keep(found, msgspec.structs.replace(CALL, request_id="later"))
    assert [each for each, _ in await sessions.read(session)] == [number]


async def test_a_failure_of_a_session_is_gone_with_it(bus: Bus) -> None:
    """It is noted while the session is open, and is no answer."""
    sessions, failure = Sessions(bus), SessionFailure(reason="too long", is_poison=False)
    await sessions.ensure()
    session = SessionId.new(GROUP, 11)
    opened = await sessions.open(session, state_of(session))
    await sessions.note_failure(opened, failure)
    assert (await sessions.read(session), await sessions.read_failure(session)) == ([], failure)
    await sessions.close(opened)
    await sessions.forget(session)
    await sessions.note_failure(opened, failure)
    assert await sessions.read_failure(session) is None


async def test_a_failure_can_be_forgotten_and_noted_again(bus: Bus) -> None:
    """An agent may be refused, go on, and be refused for the same reason."""
    sessions, failure = Sessions(bus), SessionFailure(reason="too long", is_poison=False)
    await sessions.ensure()
    session = SessionId.new(GROUP, 12)
    opened = await sessions.open(session, state_of(session))
    for _ in range(2):
        await sessions.note_failure(opened, failure)
        assert await sessions.read_failure(session) == failure
        await sessions.forget_refusal(session)
        assert await sessions.read_failure(session) is None


async def test_a_refusal_neither_hides_nor_removes_that_replicas_broke(bus: Bus) -> None:
    """An agent may try another parameter after the call that broke them, and go on."""
    sessions = Sessions(bus)
    await sessions.ensure()
    session = SessionId.new(GROUP, 14)
    opened = await sessions.open(session, state_of(session))
    broken = SessionFailure(reason="it broke 3 replicas", is_poison=True)
    await sessions.note_failure(opened, broken)
    await sessions.note_failure(opened, SessionFailure(reason="not supported", is_poison=False))
    assert await sessions.read_failure(session) == broken
    await sessions.forget_refusal(session)
    assert await sessions.read_failure(session) == broken
    await sessions.forget(session)
    assert await sessions.read_failure(session) is None


async def test_a_failure_is_noted_while_its_session_is_ending(bus: Bus) -> None:
    """Its call began before, and may have broken every engine."""
    sessions, failure = Sessions(bus), SessionFailure(reason="it broke 3 replicas", is_poison=True)
    await sessions.ensure()
    session = SessionId.new(GROUP, 13)
    opened = await sessions.open(session, state_of(session))
    await sessions.begin_end(opened)
    await sessions.note_failure(opened, failure)
    assert await sessions.read_failure(session) == failure


async def test_what_a_session_leaves_is_removed_at_once(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers, both kinds of failures and earlier states do not wait for one another."""
    all_begun = asyncio.Barrier(4)

    async def remove(stream: KeptStream, subject: str, *, but_last: int = 0) -> None:
        await all_begun.wait()

    monkeypatch.setattr(KeptStream, "remove", remove)
    await promptly(Sessions(bus).forget(SessionId.new(GROUP, 15)))
