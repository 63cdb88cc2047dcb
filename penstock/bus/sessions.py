"""Sessions of agents: the state of each, and what the policy answered in it.

Every message of a session is in one stream, so any router can go on where another one stopped, and a worker finds all
that was said. Invariants: an answer for which `keep` has returned was stored while its session was open; `read` after
`close` returns every such answer, and no other ever joins them. The server itself holds that: it stores an answer only
if the session's state is still the message that the router saw.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Final

import msgspec
import nats.js.errors
import structlog
from nats.js import api

from penstock.bus.connection import Bus
from penstock.bus.failures import BUS_ERRORS, describe, setting_up
from penstock.errors import InvalidRequestError, OverloadedError, SessionOverError, UnavailableError
from penstock.records import SessionCall, SessionId, SessionState
from penstock.records.codec import decode, encode

log = structlog.get_logger()

MAX_AGE_S: Final = 24 * 3600.0
"""For sessions of workers that died: longer than any episode. So long a session that is over is told from one that
never was."""
_MAX_BYTES: Final = 2 * 2**30
"""Room for all sessions that are open, which hold ids and log-probabilities, no images: about 100 million tokens."""
_DUPLICATE_WINDOW_S = 120.0
_TIMEOUT_S = 15.0
_RETRY_S = 0.25
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
"""The message is stored only if the last one of its subject, or of that in `...-Subject`, has this number."""
_WRONG_SEQUENCE = 10071
"""JetStream's code for a state that is no longer the one that was seen."""
_IS_FULL = (10077, 10122, 10023)
"""JetStream's codes for a stream, or a server, that is full."""


class _OtherStateError(Exception):
    """The session's state is no longer the one that was seen."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    """A session's state as it is stored."""

    id: SessionId
    state: SessionState
    number: int
    """Of the message that holds the state. An answer is stored only while this is the last one."""


class Sessions:
    """The sessions of a run; any process of it may write and read them."""

    def __init__(self, bus: Bus) -> None:
        """Keep them on `bus`."""
        self._bus = bus
        self._js = bus.jetstream
        self._stream = bus.sessions

    async def ensure(self) -> None:
        """Create the stream if it does not exist.

        Raises:
            SetupError: it exists with other settings, or the server does not make it.
        """
        with setting_up(f"stream {self._stream.name}", self._bus.config.url):
            await self._js.add_stream(
                api.StreamConfig(
                    name=self._stream.name,
                    subjects=[f"{self._stream.subject}.*.*"],
                    retention=self._stream.retention,
                    storage=api.StorageType.FILE,
                    discard=api.DiscardPolicy.NEW,
                    max_age=MAX_AGE_S,
                    max_bytes=_MAX_BYTES,
                    duplicate_window=_DUPLICATE_WINDOW_S,
                )
            )

    async def open(self, session: SessionId, state: SessionState) -> OpenedSession:
        """Make `session` the current one of its sample; the one before is superseded, and its answers are removed.

        Raises:
            OverloadedError: there is no room for another session.
            UnavailableError: the server did not store it in time.
        """
        before = await self._find_state(session)
        number = await self._write_state(session, state, {})
        if before is not None and before[1].nonce != session.nonce:
            await self.forget(SessionId(place=session.place, nonce=before[1].nonce))
        return OpenedSession(id=session, state=state, number=number)

    async def close(self, opened: OpenedSession) -> None:
        """Let it take no more answers; one that is closed stays so.

        Raises:
            SessionOverError: it was superseded.
            OverloadedError, UnavailableError: as by `open`.
        """
        closed = msgspec.structs.replace(opened.state, is_closed=True)
        try:
            await self._write_state(opened.id, closed, {_EXPECTED: str(opened.number)})
        except _OtherStateError:
            try:
                await self.find(opened.id)
            except SessionOverError as error:
                if error.is_superseded:
                    raise

    async def find(self, session: SessionId) -> OpenedSession | None:
        """The session, if it takes answers; None if there never was one.

        Raises:
            SessionOverError: it was closed or superseded.
            UnavailableError: the server does not answer.
        """
        found = await self._find_state(session)
        if found is None:
            return None
        number, state = found
        if state.nonce != session.nonce:
            raise SessionOverError(
                "this session was superseded: its sample is played again in another one, because its worker was lost "
                "or its runner failed; end this agent",
                is_superseded=True,
            )
        if state.is_closed:
            raise SessionOverError(
                "this session is closed: its sample has ended, by its runner's result or at its deadline; end this "
                "agent",
                is_superseded=False,
            )
        return OpenedSession(id=session, state=state, number=number)

    async def keep(self, opened: OpenedSession, call: SessionCall) -> int:
        """Store the answer and return its number.

        Raises:
            SessionOverError: the session was closed or superseded meanwhile.
            InvalidRequestError: it is larger than the server accepts.
            OverloadedError: there is no room for it.
            UnavailableError: the server did not store it in time.
        """
        headers = {_EXPECTED: str(opened.number), f"{_EXPECTED}-Subject": self._state_subject(opened.id)}
        message_id = f"{opened.id}/{call.request_id}/{call.choice}"
        try:
            return await self._publish(self._calls_subject(opened.id), encode(call), message_id, headers)
        except _OtherStateError:
            await self.find(opened.id)
            raise UnavailableError("the session's state is gone from the server; start its sample again") from None

    async def read(self, session: SessionId, *, after: int = 0) -> Sequence[tuple[int, SessionCall]]:
        """The session's answers whose number is higher than `after`, in order, with their numbers.

        Raises:
            UnavailableError: the server does not answer.
        """
        calls: list[tuple[int, SessionCall]] = []
        subject = self._calls_subject(session)
        while True:
            request = self._js.get_msg(self._stream.name, seq=after + 1, subject=subject, next=True)
            found = await _found(request, "the session's answers cannot be read")
            if found is None:
                return calls
            assert found.seq is not None
            after = found.seq
            calls.append((after, decode(found.data or b"", SessionCall)))

    async def forget(self, session: SessionId) -> None:
        """Remove the session's answers; a failure is logged, for age removes them too."""
        try:
            await self._js.purge_stream(self._stream.name, subject=self._calls_subject(session))
        except BUS_ERRORS as error:
            log.warning("session.remove_failed", session=session.place, error=describe(error))

    async def _find_state(self, session: SessionId) -> tuple[int, SessionState] | None:
        request = self._js.get_last_msg(self._stream.name, self._state_subject(session))
        found = await _found(request, "the session cannot be read")
        if found is None:
            return None
        assert found.seq is not None
        return found.seq, decode(found.data or b"", SessionState)

    async def _write_state(self, session: SessionId, state: SessionState, headers: Mapping[str, str]) -> int:
        message_id = f"{session}/{state.is_closed}"
        return await self._publish(self._state_subject(session), encode(state), message_id, headers)

    async def _publish(self, subject: str, payload: bytes, message_id: str, headers: Mapping[str, str]) -> int:
        if len(payload) > self._bus.max_payload_bytes(message_id):
            raise InvalidRequestError(
                f"the session's record has {len(payload)} bytes, and the NATS server takes "
                f"{self._bus.max_payload_bytes(message_id)}; make prompts or answers shorter, or raise its max_payload"
            )
        headers, deadline = {**headers, "Nats-Msg-Id": message_id}, time.monotonic() + _TIMEOUT_S
        while True:
            try:
                ack = await self._js.publish(subject, payload, timeout=_TIMEOUT_S / 3, headers=headers)
            except BUS_ERRORS as error:
                code, why = getattr(error, "err_code", None), describe(error)
                if code == _WRONG_SEQUENCE:
                    raise _OtherStateError from None
                if code in _IS_FULL:
                    raise OverloadedError(f"stream {self._stream.name} has no room ({why}); run fewer agents") from None
                if time.monotonic() >= deadline:
                    raise UnavailableError(f"the session's record was not stored: {why}") from None
                log.warning("session.store_retried", subject=subject, error=why)
                await asyncio.sleep(_RETRY_S)
            else:
                return int(ack.seq)

    def _state_subject(self, session: SessionId) -> str:
        return f"{self._stream.subject}.{session.place}.state"

    def _calls_subject(self, session: SessionId) -> str:
        return f"{self._stream.subject}.{session.place}.{session.nonce}"


async def _found(request: Awaitable[api.RawStreamMsg], failure: str) -> api.RawStreamMsg | None:
    """What the server has; None if it has no such message."""
    try:
        return await request
    except nats.js.errors.NotFoundError:
        return None
    except BUS_ERRORS as error:
        raise UnavailableError(f"{failure}: {describe(error)}") from None
