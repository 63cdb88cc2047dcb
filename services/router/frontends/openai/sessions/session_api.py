"""Answers the calls of agents' sessions.

Any router can answer any call, because state and answers are on the bus. Invariants: for the client, an answer ends
once it is recorded. If the client leaves, nothing of its call is recorded.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

import structlog
from starlette.responses import Response

from penstock.bus.image_store import ImageStore
from penstock.bus.sessions import OpenedSession, Sessions, state_is_gone
from penstock.errors import InvalidRequestError, PenstockError, PoisonError, SessionOverError, UnavailableError
from penstock.model.families.qwen_vl import ImageGrid
from penstock.records import SessionCall, SessionFailure, SessionId
from penstock.records.session import LAST_TOKENS_S
from penstock.runtime.backoff import Backoff
from penstock.runtime.text import printable
from penstock.telemetry import spans
from services.router.frontends.openai.chat_api import ChatApi, Keep
from services.router.frontends.openai.choice import Choice
from services.router.frontends.openai.errors import SessionLimitError, UnknownSessionError
from services.router.frontends.openai.generation import Terms
from services.router.frontends.openai.parsed_request import ParsedRequest
from services.router.frontends.openai.parsing.text_sizes import size_to_parse
from services.router.frontends.openai.responses import ChatFormat
from services.router.frontends.openai.schema.requests import ChatRequest
from services.router.frontends.openai.sessions.call import Call
from services.router.frontends.openai.sessions.history import SessionHistory
from services.router.frontends.openai.sessions.history_cache import HistoryCache

log = structlog.get_logger()

FoundT = TypeVar("FoundT")

_MAX_HISTORY_BYTES = 256 * 2**20
"""Memory for the ids of sessions that a router keeps: those of 60 million tokens."""
_MAX_WAIT_S = 600.0
"""Seconds that a call waits for NATS while the time of its session is not known: OpenAI's own clients give up then."""
_MIN_KEEP_S = 30.0
"""Seconds that an answer waits for NATS at least, as long as its client is there: an answer that ends with its
session's time has none of that time left."""
_LOOK_S = 5.0
"""Seconds between two looks at a session whose time is over while its answer is generated."""
_EARLY_LOOK_S = 60.0
"""The same before that: it may have been closed or superseded, or is older than this router knows."""
_BACKOFF = Backoff(first_s=0.5, max_s=5.0)


class _EndingError(SessionOverError):
    """The session's sample is out of time."""

    def __init__(self) -> None:
        super().__init__("the time of this session's sample is over; end this agent")


class SessionApi:
    """The sessions of a run, answered by its policy."""

    def __init__(self, chat: ChatApi, sessions: Sessions, images: ImageStore, *, grid: ImageGrid | None) -> None:
        """Answer with `chat`, record in `sessions`, keep images in `images`; `grid` is how the model cuts images into
        tokens, None for a model without images."""
        self._chat = chat
        self._grid = grid
        self._sessions = sessions
        self._images = images
        self._histories = HistoryCache(sessions, max_bytes=_MAX_HISTORY_BYTES)

    async def require_open(self, name: str) -> OpenedSession:
        """Return the session of that name; wait while NATS does not answer.

        Raises:
            UnknownSessionError: it never existed.
            SessionOverError: it is ending, or was closed or superseded.
            UnavailableError: NATS did not answer for `_MAX_WAIT_S`.
        """
        session, opened = SessionId.parse(name), None
        if session is not None:
            find = functools.partial(self._sessions.find, session)
            try:
                opened = await _until_answered(find, session, deadline=time.monotonic() + _MAX_WAIT_S)
            except SessionOverError:
                self._histories.forget(session)
                raise
        if opened is None:
            raise UnknownSessionError("there is no such session; use the base URL that the runner was given")
        if opened.state.is_ending:
            raise _EndingError
        return opened

    async def answer(self, name: str, body: ChatRequest) -> Response:
        """Answer a chat of the session."""
        began = time.monotonic()
        opened = await self.require_open(name)
        try:
            return await self._answer(opened, body, began)
        except PenstockError as error:
            await self._note_failure(opened, began, error)
            raise

    async def note_refusal(self, name: str, reason: str) -> None:
        """Note that a call's body was refused before it came to `answer`; without an open session of that name, do
        nothing."""
        began = time.monotonic()
        with contextlib.suppress(PenstockError):
            await self._note_failure(await self.require_open(name), began, InvalidRequestError(reason))

    async def _answer(self, opened: OpenedSession, body: ChatRequest, began: float) -> Response:
        history = await self._history_of(opened, began)
        max_turns = opened.state.limits.max_turns
        if max_turns is not None and len(history) + body.n > max_turns:
            raise SessionLimitError(
                f"the session has {len(history)} answers, and {body.n} more are over its max_turns = {max_turns}; end "
                "the agent's loop earlier, or raise the limit"
            )
        call = Call(opened, history, self._grid, began=began)
        body = call.with_tools(body)
        request = await self._chat.parse(lambda parser: call.parse(parser, body), size_bytes=size_to_parse(body))
        if not len(history):  # the agent goes on after a refusal, so it is not what leaves the sample without an answer
            forget = functools.partial(self._sessions.forget_refusal, opened.id)
            await _until_answered(forget, opened.id, deadline=_patience_ends_at(opened, history.known_since, began))
        await self._store_images(opened, call, stored={*opened.state.images, *call.prompt.prefix_images})
        keep = functools.partial(self._keep, opened, history, call, request, began)
        return await self._chat.answer(
            request,
            ChatFormat,
            is_streamed=body.stream,
            keep=keep,
            terms=self._terms(opened, history, call, began, keep),
        )

    async def _history_of(self, opened: OpenedSession, began: float) -> SessionHistory:
        """Return the session's history; wait while NATS does not answer, because an agent takes a refusal as its own
        failure.

        Raises:
            UnavailableError: NATS did not answer as long as the session stays open.
        """
        since = self._histories.known_since(opened.id, began)
        read = functools.partial(self._histories.current, opened.id, since)
        return await _until_answered(read, opened.id, deadline=_patience_ends_at(opened, since, began))

    def _terms(self, opened: OpenedSession, history: SessionHistory, call: Call, began: float, keep: Keep) -> Terms:
        """Let a call wait as long as its session stays open, because an agent takes a refusal as its own failure."""
        timeout_s = opened.state.timeout_s
        left_s = timeout_s - (time.monotonic() - history.known_since)
        restore = functools.partial(self._store_images, opened, call, stored=frozenset())
        return Terms(
            wait_s=max(0.0, left_s),
            timeout_s=left_s + LAST_TOKENS_S,  # or it would end before the session is seen to be ending
            restore_images=restore,
            restorable_bytes=sum(map(len, call.images)),
            watch=functools.partial(self._watch, opened.id, left_s) if timeout_s else None,
            note_failure=functools.partial(self._end_early, keep, opened, began),
        )

    async def _watch(self, session: SessionId, left_s: float) -> None:
        """Wait until the session is over, and raise that. It stays open after its time while verdicts that its agent
        asked for are awaited.

        Raises:
            SessionOverError: it is ending, was closed or superseded, or its state is gone.
        """
        over_at = time.monotonic() + left_s
        while True:
            await asyncio.sleep(min(_EARLY_LOOK_S, max(0.0, over_at - time.monotonic()) + _LOOK_S))
            try:
                with contextlib.suppress(UnavailableError):
                    found = await self._sessions.find(session)
                    if found is None:
                        raise state_is_gone()
                    if found.state.is_ending:
                        raise _EndingError
            except SessionOverError:
                self._histories.forget(session)
                raise
            _require_wanted()

    async def _end_early(
        self, keep: Keep, opened: OpenedSession, began: float, error: PenstockError, choices: Sequence[Choice]
    ) -> None:
        """Keep the tokens that came for a sample whose time is over; note any other failure."""
        if isinstance(error, _EndingError) and any(choice.tokens for choice in choices):
            await keep(choices)
        else:
            await self._note_failure(opened, began, error)

    async def _note_failure(self, opened: OpenedSession, began: float, error: PenstockError) -> None:
        """Record the call's failure; tell the worker of one that another attempt at the sample would repeat."""
        spans.record("session.call", began, **_about(opened), error=str(error))
        if isinstance(error, PoisonError | InvalidRequestError):
            failure = SessionFailure(reason=printable(str(error)), is_poison=isinstance(error, PoisonError))
            try:
                await self._sessions.note_failure(opened, failure)
            except PenstockError as unnoted:
                log.warning("session.failure_not_noted", session=opened.id.sample_key, reason=str(unnoted))

    async def _store_images(self, opened: OpenedSession, call: Call, stored: Collection[str]) -> None:
        """Store the images of the call's messages, except those in `stored`."""
        images = dict(zip(call.hashes, call.images, strict=True))
        for sha256 in images.keys() - stored:
            await self._images.put(opened.state.scope, images[sha256])

    async def _keep(
        self,
        opened: OpenedSession,
        history: SessionHistory,
        call: Call,
        request: ParsedRequest,
        began: float,
        choices: Sequence[Choice],
    ) -> None:
        deadline = max(_patience_ends_at(opened, history.known_since, began), time.monotonic() + _MIN_KEEP_S)
        for index, choice in enumerate(choices):
            if choice.tokens:
                store = self._storing(opened, call.record(request, index, choice), after=call.last_known)
                await _until_answered(store, opened.id, deadline=deadline)
        spans.record(
            "session.call",
            began,
            **_about(opened),
            num_tokens=sum(len(choice.tokens) for choice in choices),
            num_prompt_tokens=choices[0].num_prompt_tokens,
            num_cached_tokens=choices[0].num_cached_tokens,
        )

    def _storing(self, opened: OpenedSession, record: SessionCall, *, after: int) -> Callable[[], Awaitable[None]]:
        """Return a function that stores an answer once, however often it is called. A call that got no answer from NATS
        may have stored it, under a number above `after`. NATS recognises equal messages for two minutes only."""
        is_first = True

        async def store() -> None:
            nonlocal is_first
            if not is_first:
                for _, stored in await self._sessions.read(opened.id, after=after):
                    if (stored.request_id, stored.choice) == (record.request_id, record.choice):
                        return
            is_first = False
            await self._sessions.keep(opened, record)

        return store


def _patience_ends_at(opened: OpenedSession, since: float, began: float) -> float:
    """Return until when a call that began at `began` waits for NATS, by `time.monotonic()`: as long as its session,
    known since `since`, stays open."""
    return since + opened.state.timeout_s if opened.state.timeout_s else began + _MAX_WAIT_S


async def _until_answered(ask: Callable[[], Awaitable[FoundT]], session: SessionId, *, deadline: float) -> FoundT:
    """Return what `ask` finds, asking again while NATS does not answer.

    Args:
        ask: Asks NATS.
        session: What it asks about, for the log.
        deadline: Time of `time.monotonic()` from which a failure is final.

    Raises:
        UnavailableError: NATS did not answer before the deadline.
    """
    num_failures = 0
    while True:
        try:
            return await ask()
        except UnavailableError as error:
            _require_wanted()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise
            if not num_failures:  # once for each call that waits
                log.warning("session.waits_for_bus", session=session.sample_key, reason=str(error))
            num_failures += 1
        await asyncio.sleep(min(left_s, _BACKOFF.after(num_failures)))


def _require_wanted() -> None:
    """Raise the cancellation of this task, if nats-py has swallowed it, as it does where it flushes what is large."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _about(opened: OpenedSession) -> dict[str, object]:
    """Return of which sample a call is."""
    return {"group": opened.state.group, "sample": opened.id.sample}
