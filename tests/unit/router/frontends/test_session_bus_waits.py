"""Calls of agents' sessions wait while NATS does not answer, and not for ever."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import SamplingConfig
from penstock.errors import OverloadedError, SessionOverError, UnavailableError
from penstock.model.chat.chat_template import Renderer
from penstock.records import SessionCall, SessionId, VersionSpan
from penstock.runtime.backoff import Backoff
from services.router.frontends.openai.request_parser import RequestParser
from services.router.frontends.openai.schema.requests import ChatRequest
from services.router.frontends.openai.sessions import session_api
from services.router.frontends.openai.sessions.session_api import SessionApi
from services.router.tuning import OpenAITuning
from tests.support.router.agent_session import group_id, state_of
from tests.support.waiting import HANG_S, promptly, until

CHAT = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
GROUP = group_id("run")
SESSION = SessionId.new(GROUP, 0)


class ParsedError(Exception):
    """The call has got as far as its prompt: the session and its answers are known."""


class Outage:
    """Stands for the sessions of a bus that fails some requests before it answers."""

    def __init__(self, *, finds: float = 0, reads: float = 0, keeps: float = 0, timeout_s: float = 600.0) -> None:
        self.left = {"find": finds, "read": reads, "keep": keeps}
        self.num_failed = 0
        self.is_stored_unanswered = False
        """Whether the answer is stored by a request that fails."""
        self.refusal: Exception | None = None
        """Answers a request to store, once NATS answers."""
        self.calls: list[SessionCall] = []
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
        return list(enumerate(self.calls, start=1))[after:]

    async def forget_refusal(self, _: SessionId) -> None:
        """None was noted."""

    async def keep(self, _: Any, call: SessionCall) -> int:
        if self.left["keep"] > 0 and self.is_stored_unanswered:
            self.calls.append(call)
        self.fail("keep")
        if self.refusal is not None:
            raise self.refusal
        self.calls.append(call)
        return len(self.calls)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_api, "_BACKOFF", Backoff(first_s=0.001, max_s=0.001))
    monkeypatch.setattr(session_api, "_MIN_KEEP_S", 0.0)


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


def ending_call(renderer: Renderer, outage: Outage) -> Any:
    """A call of the session to a policy whose answer is complete at once; it ends when that is recorded."""
    parser = RequestParser(
        OpenAITuning(), SamplingConfig(), renderer, longest_token_bytes=10, context_length=lambda: None
    )
    said = SimpleNamespace(
        content="fine", calls=(), ending="stop", tokens=[SimpleNamespace(number=5, logprob=-0.5)],
        version_spans=(VersionSpan(num_tokens=1, policy_version=1),), num_prompt_tokens=9, num_cached_tokens=0,
        replica_id="engine-1", began=0.0, ended=0.0,
    )  # fmt: skip

    async def parse(parse: Any, **_: object) -> Any:
        return parse(parser)

    async def answer(*_: object, keep: Any, **__: object) -> str:
        await keep([said])
        return "answered"

    make: Any = SessionApi
    return make(SimpleNamespace(parse=parse, answer=answer), outage, None, grid=None).answer(str(SESSION), CHAT)


@pytest.mark.parametrize("timeout_s", [0.0, 600.0])
async def test_a_complete_answer_waits_while_nats_does_not_answer(renderer: Renderer, timeout_s: float) -> None:
    """It was generated for minutes, and is not lost for that."""
    outage = Outage(keeps=5, timeout_s=timeout_s)
    assert await promptly(ending_call(renderer, outage)) == "answered"
    assert (outage.num_failed, len(outage.calls)) == (5, 1)


async def test_an_answer_that_was_stored_unnoticed_is_not_stored_again(renderer: Renderer) -> None:
    """NATS knows an equal message for two minutes only, and an outage may be longer: it would be trained twice."""
    outage = Outage(keeps=1)
    outage.is_stored_unanswered = True
    assert await promptly(ending_call(renderer, outage)) == "answered"
    assert len(outage.calls) == 1


@pytest.mark.parametrize("refusal", [SessionOverError("closed", is_superseded=False), OverloadedError("full")])
async def test_what_refuses_an_answer_ends_its_call(renderer: Renderer, refusal: Exception) -> None:
    """Once NATS answers, waiting does not help."""
    outage = Outage(keeps=2)
    outage.refusal = refusal
    with pytest.raises(type(refusal)):
        await promptly(ending_call(renderer, outage))
    assert (outage.num_failed, outage.calls) == (2, [])


async def test_an_answer_that_ends_with_its_session_waits_for_nats_too(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens that came for a sample whose time is over are all that it has."""
    monkeypatch.setattr(session_api, "_MIN_KEEP_S", HANG_S)
    outage = Outage(keeps=5, timeout_s=1e-9)
    assert await promptly(ending_call(renderer, outage)) == "answered"
    assert (outage.num_failed, len(outage.calls)) == (5, 1)


async def test_no_answer_waits_for_nats_longer_than_its_session_is_open(renderer: Renderer) -> None:
    """Then its client gets the failure."""
    with pytest.raises(UnavailableError, match="keep: no answer"):
        await promptly(ending_call(renderer, Outage(keeps=float("inf"), timeout_s=0.05)))
