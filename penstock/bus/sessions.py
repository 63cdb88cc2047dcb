"""Agents' sessions: the state of each, and the policy's answers in it.

Every message of a session is in one stream, so any router can continue where another one stopped, and a worker finds
all answers. Invariants: an answer for which `keep` has returned was stored while its session was open; `read` after
`close` returns every such answer, and none is added later. The server itself enforces that: it stores an answer only if
the session's state is still the message that the router saw.
"""

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import Sequence
from typing import Final

import msgspec
import structlog

from penstock.bus.connection import Bus
from penstock.bus.kept_stream import KeptStream, OtherMessageError, Wording
from penstock.errors import SessionOverError, UnavailableError
from penstock.records import SessionCall, SessionFailure, SessionId, SessionState
from penstock.records.codec import decode, encode

log = structlog.get_logger()

MAX_AGE_S: Final = 24 * 3600.0
"""For sessions of workers that died: longer than any episode. For this long, a session that is over can be told from
one that never existed."""
_MAX_BYTES: Final = 2 * 2**30
"""Room for all open sessions, which hold ids and log-probabilities but no images: about 100 million tokens; and for a
few hundred bytes of each that was closed within `MAX_AGE_S`."""
_WORDING = Wording(
    record="the session's record",
    stream="the sessions",
    when_large="make prompts or answers shorter",
    when_full="run fewer agents; of each session that has ended a few hundred bytes stay for a day",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSession:
    """A session's stored state."""

    id: SessionId
    state: SessionState
    number: int
    """Number of the message that holds the state. An answer is stored only while that message is the last one."""


def state_is_gone() -> SessionOverError:
    """Return the error of a session that NATS has lost."""
    return SessionOverError(
        "the session's state is gone from NATS, so that no answer can be recorded; end this agent", is_superseded=False
    )


class Sessions:
    """The sessions of a run; any of its processes may write and read them."""

    def __init__(self, bus: Bus) -> None:
        """Keep the sessions on `bus`."""
        self._stream = KeptStream(bus, bus.sessions, _WORDING)

    async def ensure(self) -> None:
        """Create the stream if it does not exist.

        Raises:
            SetupError: the server does not create it.
        """
        await self._stream.ensure("*.*", max_age_s=MAX_AGE_S, max_bytes=_MAX_BYTES)

    async def open(self, session: SessionId, state: SessionState) -> OpenedSession:
        """Make `session` the current one of its sample; supersede the one before it and remove that one's answers.

        Raises:
            OverloadedError: there is no room for another session.
            UnavailableError: the server did not store it in time.
        """
        before = await self._find_state(session)
        number = await self._write_state(session, state)
        if before is not None and before[1].nonce != session.nonce:
            await self.forget(SessionId(sample_key=session.sample_key, nonce=before[1].nonce))
        return OpenedSession(id=session, state=state, number=number)

    async def begin_end(self, opened: OpenedSession) -> None:
        """Have routers record what has come of the answers in progress, and take no more calls.

        Raises:
            SessionOverError: it was closed or superseded.
            OverloadedError, UnavailableError: as by `open`.
        """
        ending = msgspec.structs.replace(opened.state, is_ending=True)
        try:
            await self._write_state(opened.id, ending, seen=_seen(opened))
        except OtherMessageError:
            await self.find(opened.id)

    async def close(self, opened: OpenedSession) -> None:
        """Close the session to further answers; a closed session stays closed.

        Raises:
            SessionOverError: it was superseded.
            OverloadedError, UnavailableError: as by `open`.
        """
        closed = msgspec.structs.replace(opened.state, is_closed=True, images=(), tools=(), chat_template_kwargs={})
        try:
            await self._write_state(opened.id, closed, seen=_seen(opened))
        except OtherMessageError:
            try:
                found = await self.find(opened.id)
            except SessionOverError as error:
                if error.is_superseded:
                    raise
            else:
                if found is not None and found.number != opened.number:  # it is ending
                    await self.close(found)

    async def find(self, session: SessionId) -> OpenedSession | None:
        """Return the session if it takes answers; None if it never existed.

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
            SessionOverError: the session was closed or superseded meanwhile, or its state is gone.
            InvalidRequestError: it is larger than the server accepts.
            OverloadedError: there is no room for it.
            UnavailableError: the server did not store it in time.
        """
        message_id = f"{opened.id}/{call.request_id}/{call.choice}"
        try:
            return await self._stream.publish(
                _calls_subject(opened.id), encode(call), message_id=message_id, seen=_seen(opened)
            )
        except OtherMessageError:
            found = await self.find(opened.id)
            if found is None or found.number == opened.number:
                raise state_is_gone() from None
            return await self.keep(found, call)  # the session is ending, and still takes answers

    async def read(self, session: SessionId, *, after: int = 0) -> Sequence[tuple[int, SessionCall]]:
        """Return the session's answers numbered above `after`, in order, with their numbers.

        Raises:
            UnavailableError: the server does not answer.
        """
        calls: list[tuple[int, SessionCall]] = []
        while found := await self._stream.next(_calls_subject(session), after=after):
            after, data = found
            calls.append((after, decode(data, SessionCall)))
        return calls

    async def note_failure(self, opened: OpenedSession, failure: SessionFailure) -> None:
        """Note that a call failed for good; a session that is over needs no note.

        Raises:
            PenstockError: the server did not store it.
        """
        # The same failure may be noted again after it was forgotten, so each note is a message of its own.
        subject = _failure_subject(opened.id, is_poison=failure.is_poison)
        message_id = f"{opened.id}/failure/{uuid.uuid4().hex}"
        try:
            await self._stream.publish(subject, encode(failure), message_id=message_id, seen=_seen(opened))
        except OtherMessageError:
            with contextlib.suppress(SessionOverError):
                found = await self.find(opened.id)
                if found is not None and found.number != opened.number:  # it is ending
                    await self.note_failure(found, failure)

    async def read_failure(self, session: SessionId) -> SessionFailure | None:
        """Return a failure that was noted in the session and not forgotten; None without one. A failure that broke
        replicas comes before that of a call that was refused.

        Raises:
            UnavailableError: the server does not answer.
        """
        for is_poison in (True, False):
            found = await self._stream.last(_failure_subject(session, is_poison=is_poison))
            if found is not None:
                return decode(found[1], SessionFailure)
        return None

    async def forget(self, session: SessionId) -> None:
        """Remove the session's answers and failure, and its sample's states except the last, which is small when it is
        closed; an error is only logged, because they expire anyway."""
        await asyncio.gather(
            self._remove(session, _state_subject(session), but_last=1),
            self._remove(session, _calls_subject(session)),
            *(self._remove(session, _failure_subject(session, is_poison=is_poison)) for is_poison in (True, False)),
        )

    async def forget_refusal(self, session: SessionId) -> None:
        """Remove what was noted of calls that were refused, but not what broke replicas.

        Raises:
            UnavailableError: the server does not answer.
        """
        subject = _failure_subject(session, is_poison=False)
        if await self._stream.last(subject) is not None:
            await self._stream.remove(subject)

    async def _remove(self, session: SessionId, subject: str, *, but_last: int = 0) -> None:
        try:
            await self._stream.remove(subject, but_last=but_last)
        except UnavailableError as error:
            log.warning("session.remove_failed", session=session.sample_key, error=str(error))

    async def _find_state(self, session: SessionId) -> tuple[int, SessionState] | None:
        found = await self._stream.last(_state_subject(session))
        return None if found is None else (found[0], decode(found[1], SessionState))

    async def _write_state(
        self, session: SessionId, state: SessionState, *, seen: tuple[str, int] | None = None
    ) -> int:
        message_id = f"{session}/{state.is_ending}/{state.is_closed}"
        return await self._stream.publish(_state_subject(session), encode(state), message_id=message_id, seen=seen)


def _seen(opened: OpenedSession) -> tuple[str, int]:
    return _state_subject(opened.id), opened.number


def _state_subject(session: SessionId) -> str:
    return f"{session.sample_key}.state"


def _calls_subject(session: SessionId) -> str:
    return f"{session.sample_key}.{session.nonce}"


def _failure_subject(session: SessionId, *, is_poison: bool) -> str:
    return f"{session.sample_key}.{session.nonce}-{'poison' if is_poison else 'refused'}"
