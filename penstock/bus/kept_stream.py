"""A stream of a run whose messages are found by subject, and kept until they expire or are removed.

Invariants: a message for which `publish` has returned is stored exactly once. No message is removed to make room: a
full stream rejects new ones.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable

import nats.js.errors
import structlog
from nats.js import api

from penstock.bus.connection import Bus, Stream
from penstock.bus.failures import BUS_ERRORS, describe
from penstock.errors import InvalidRequestError, OverloadedError, UnavailableError

log = structlog.get_logger()

_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
"""The message is stored only if the last one of its subject, or of the subject in `...-Subject`, has this number."""
_DUPLICATE_WINDOW_S = 120.0
_TIMEOUT_S = 15.0
_RETRY_S = 0.25
_WRONG_SEQUENCE = 10071
"""JetStream's code for a message whose expected last message is not the last one.

10164 is another case: a message for that subject is on its way through the cluster, maybe this one, sent before."""
_IS_FULL = (10077, 10122, 10023)
"""JetStream's codes for a stream, or a server, that is full."""


class OtherMessageError(Exception):
    """The last message of a subject is not the one that the publisher has seen."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """Words for the errors of a stream."""

    record: str
    """What one message is called."""
    stream: str
    """What all messages together are called."""
    when_large: str
    """How to make messages smaller."""
    when_full: str
    """How to make room."""


class KeptStream:
    """A kept stream; any process of the run may write and read it."""

    def __init__(self, bus: Bus, stream: Stream, wording: Wording) -> None:
        """Use `stream` of `bus`."""
        self._bus = bus
        self._js = bus.jetstream
        self._stream = stream
        self._wording = wording

    async def ensure(self, subjects: str, *, max_age_s: float, max_bytes: int) -> None:
        """Create the stream, or give an existing one these bounds.

        Raises:
            SetupError: the server does not create it.
        """
        config = api.StreamConfig(
            name=self._stream.name,
            subjects=[f"{self._stream.subject}.{subjects}"],
            retention=self._stream.retention,
            storage=api.StorageType.FILE,
            discard=api.DiscardPolicy.NEW,
            max_age=max_age_s,
            max_bytes=max_bytes,
            duplicate_window=min(_DUPLICATE_WINDOW_S, max_age_s),
        )
        await self._bus.ensure_stream(config, update=True)

    async def publish(
        self, subject: str, payload: bytes, *, message_id: str, seen: tuple[str, int] | None = None
    ) -> int:
        """Store a message under `subject` and return its number; safe to repeat with the same id.

        Args:
            subject: The subject.
            payload: The message's bytes.
            message_id: The message's identity.
            seen: A subject, and the number that its last message must have.

        Raises:
            OtherMessageError: the last message has another number; the server stored nothing.
            InvalidRequestError: the message is larger than the server accepts.
            OverloadedError: there is no room for it.
            UnavailableError: the server did not store it in time.
        """
        wording, max_bytes = self._wording, self._bus.max_payload_bytes(message_id)
        if len(payload) > max_bytes:
            raise InvalidRequestError(
                f"{wording.record} has {len(payload)} bytes, and the NATS server takes {max_bytes}; "
                f"{wording.when_large}, or raise its max_payload"
            )
        headers, deadline = {"Nats-Msg-Id": message_id}, time.monotonic() + _TIMEOUT_S
        if seen is not None:
            headers |= {_EXPECTED: str(seen[1]), f"{_EXPECTED}-Subject": self._full(seen[0])}
        while True:
            try:
                ack = await self._js.publish(self._full(subject), payload, timeout=_TIMEOUT_S / 3, headers=headers)
            except BUS_ERRORS as error:
                code, why = getattr(error, "err_code", None), describe(error)
                if code == _WRONG_SEQUENCE:
                    raise OtherMessageError from None
                if code in _IS_FULL:
                    raise OverloadedError(
                        f"{wording.record} was not recorded, {wording.stream} are full ({why}); {wording.when_full}"
                    ) from None
                if time.monotonic() >= deadline:
                    raise UnavailableError(f"{wording.record} was not recorded: {why}") from None
                log.warning("stream.store_retried", stream=self._stream.name, subject=subject, error=why)
                await asyncio.sleep(_RETRY_S)
            else:
                return int(ack.seq)

    async def last(self, subject: str) -> tuple[int, bytes] | None:
        """Return the last message of `subject` and its number; None if there is none.

        Raises:
            UnavailableError: the server does not answer.
        """
        return await self._found(self._js.get_last_msg(self._stream.name, self._full(subject)))

    async def next(self, subject: str, *, after: int) -> tuple[int, bytes] | None:
        """Return the first message of `subject` numbered above `after`, and its number; None if there is none.

        Raises:
            UnavailableError: the server does not answer.
        """
        request = self._js.get_msg(self._stream.name, seq=after + 1, subject=self._full(subject), next=True)
        return await self._found(request)

    async def remove(self, subject: str, *, but_last: int = 0) -> None:
        """Remove the messages of `subject`, all but the last `but_last` ones.

        Raises:
            UnavailableError: the server does not answer.
        """
        try:
            await self._js.purge_stream(self._stream.name, subject=self._full(subject), keep=but_last or None)
        except BUS_ERRORS as error:
            raise UnavailableError(f"{self._wording.stream} cannot be removed: {describe(error)}") from None

    async def _found(self, request: Awaitable[api.RawStreamMsg]) -> tuple[int, bytes] | None:
        try:
            found = await request
        except nats.js.errors.NotFoundError:
            return None
        except BUS_ERRORS as error:
            raise UnavailableError(f"{self._wording.stream} cannot be read: {describe(error)}") from None
        assert found.seq is not None
        return found.seq, found.data or b""

    def _full(self, subject: str) -> str:
        return f"{self._stream.subject}.{subject}"
