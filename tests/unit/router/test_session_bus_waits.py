"""Calls of agents' sessions wait while NATS does not answer, and not for ever."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import UnavailableError
from penstock.records import SessionId
from penstock.runtime.backoff import Backoff
from services.router.frontends.openai.schema.requests import ChatRequest
from services.router.frontends.openai.sessions import session_api
from services.router.frontends.openai.sessions.session_api import SessionApi
from tests.support.router.agent_session import group_id, state_of
from tests.support.waiting import promptly, until

CHAT = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
GROUP = group_id("run")
SESSION = SessionId.new(GROUP, 0)


class ParsedError(Exception):
    """The call has got as far as its prompt: the session and its answers are known."""


class Outage:
    """Stands for the sessions of a bus that fails some reads before it answers."""

    def __init__(self, *, finds: float = 0, reads: float = 0, timeout_s: float = 600.0) -> None:
        self.left = {"find": finds, "read": reads}
        self.num_failed = 0
        self.opened = SimpleNamespace(id=SESSION, state=state_of(GROUP, SESSION, timeout_s=timeout_s))

    def fail(self, what: str) -> None:
        """Fail if failures are left."""
        if self.left[what] > 0:
            self.left[what] -= 1
            self.num_failed += 1
            raise UnavailableError(f"{what}: no answer")

    async def find(self, _: SessionId) -> Any:
        self.fail("find")
        return self.opened

    async def read(self, _: SessionId, *, after: int) -> list[Any]:
        self.fail("read")
        return []


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_api, "_BACKOFF", Backoff(first_s=0.001, max_s=0.001))


def api_of(outage: Any) -> SessionApi:
    """The sessions of a router with this bus."""

    async def parse(*_: object, **__: object) -> None:
        raise ParsedError

    make: Any = SessionApi
    return make(SimpleNamespace(parse=parse), outage, None, grid=None)  # type: ignore[no-any-return]


@pytest.mark.parametrize("timeout_s", [0.0, 600.0])
@pytest.mark.parametrize("failing", ["finds", "reads"])
async def test_a_call_waits_while_nats_does_not_answer(failing: str, timeout_s: float) -> None:
    """For the session's state, and for its answers; an agent takes 503 as its end."""
    outage = Outage(**{failing: 5}, timeout_s=timeout_s)
    with pytest.raises(ParsedError):
        await promptly(api_of(outage).answer(str(SESSION), CHAT))
    assert outage.num_failed == 5


async def test_no_call_waits_for_nats_longer_than_its_session_is_open() -> None:
    """The second call of a session has only what the first one left."""
    outage = Outage(timeout_s=0.05)
    api = api_of(outage)
    with pytest.raises(ParsedError):
        await api.answer(str(SESSION), CHAT)
    outage.left["read"] = float("inf")
    with pytest.raises(UnavailableError, match="read: no answer"):
        await promptly(api.answer(str(SESSION), CHAT))
    before = outage.num_failed
    with pytest.raises(UnavailableError, match="read: no answer"):
        await promptly(api.answer(str(SESSION), CHAT))
    assert outage.num_failed == before + 1


async def test_a_call_of_an_unknown_session_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows how long it would be open."""
    monkeypatch.setattr(session_api, "_MAX_WAIT_S", 0.05)
    with pytest.raises(UnavailableError, match="find: no answer"):
        await promptly(api_of(Outage(finds=float("inf"))).require_open(str(SESSION)))


@pytest.mark.parametrize("failing", ["finds", "reads"])
async def test_a_call_whose_client_left_waits_no_longer(failing: str) -> None:
    """Nor one that a router which stops has cancelled."""
    outage = Outage(**{failing: float("inf")})
    call = asyncio.ensure_future(api_of(outage).answer(str(SESSION), CHAT))
    await until(lambda: outage.num_failed > 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await promptly(call)


async def test_a_cancellation_that_the_bus_swallows_ends_the_wait() -> None:
    """As nats-py does while it flushes."""
    is_asked, may_fail = asyncio.Event(), asyncio.Event()

    async def find(_: SessionId) -> Any:
        is_asked.set()
        try:
            await may_fail.wait()
        except asyncio.CancelledError:
            raise UnavailableError("find: no answer") from None

    call = asyncio.ensure_future(api_of(SimpleNamespace(find=find)).require_open(str(SESSION)))
    await is_asked.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await promptly(call)
