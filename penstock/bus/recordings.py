"""Calls of clients, kept by session in a stream of the run, so that they can be trained on.

Invariants: a call for which `keep` has returned is stored, in order; it is removed when it is too old or on request,
never to make room: a full stream rejects new calls. A page that is read is bounded in bytes, because every call repeats
the images of its conversation.
"""

import asyncio
import base64
import dataclasses
import time
from collections.abc import Sequence

import nats.js.errors
import structlog
from nats.js import api

from penstock.bus.connection import Bus
from penstock.bus.failures import BUS_ERRORS, describe, setting_up
from penstock.errors import InvalidRequestError, OverloadedError, UnavailableError
from penstock.records import RecordedCall
from penstock.records.codec import decode, encode

log = structlog.get_logger()

_KEEP_TIMEOUT_S = 15.0
_RETRY_S = 0.25
_DUPLICATE_WINDOW_S = 120.0
_IS_FULL = (10077, 10122, 10023)
"""JetStream's codes for a stream, or a server, that is full."""


_MAX_PAGE_BYTES = 16 * 2**20
"""A page ends before it exceeds this, unless its first call alone does."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPage:
    """Some of a session's calls, in order."""

    calls: Sequence[tuple[int, RecordedCall]]
    """Each with its number in the stream."""
    has_more: bool
    """Whether there may be calls after the last of these."""


class Recordings:
    """The recorded calls of a run; any process of it may write and read them."""

    def __init__(self, bus: Bus) -> None:
        """Keep them on `bus`."""
        self._bus = bus
        self._js = bus.jetstream
        self._stream = bus.calls

    async def ensure(self, *, max_age_s: float, max_bytes: int) -> None:
        """Create the stream, or give an existing one these bounds.

        Raises:
            SetupError: the server does not create it.
        """
        config = api.StreamConfig(
            name=self._stream.name,
            subjects=[f"{self._stream.subject}.*"],
            retention=self._stream.retention,
            storage=api.StorageType.FILE,
            discard=api.DiscardPolicy.NEW,
            max_age=max_age_s,
            max_bytes=max_bytes,
            duplicate_window=min(_DUPLICATE_WINDOW_S, max_age_s),
        )
        with setting_up(f"stream {self._stream.name}", self._bus.config.url):
            try:
                await self._js.add_stream(config)
            except nats.js.errors.BadRequestError:
                await self._js.update_stream(config)

    async def keep(self, call: RecordedCall) -> None:
        """Store the call.

        Raises:
            InvalidRequestError: it is larger than the server accepts.
            OverloadedError: the recordings are full.
            UnavailableError: the server did not store it in time.
        """
        payload, message_id = encode(call), f"{call.request_id}/{call.choice}"
        if len(payload) > self._bus.max_payload_bytes(message_id):
            raise InvalidRequestError(
                f"the recorded call has {len(payload)} bytes, and the NATS server takes "
                f"{self._bus.max_payload_bytes(message_id)}; send smaller images, or raise its max_payload"
            )
        headers, deadline = {"Nats-Msg-Id": message_id}, time.monotonic() + _KEEP_TIMEOUT_S
        while True:
            try:
                await self._js.publish(
                    self._subject(call.session), payload, timeout=_KEEP_TIMEOUT_S / 3, headers=headers
                )
            except BUS_ERRORS as error:
                why = describe(error)
                if getattr(error, "err_code", None) in _IS_FULL:
                    raise OverloadedError(
                        f"the call was not recorded, the recordings are full ({why}); read and delete some, or raise "
                        "router.openai.recordings_max_mb"
                    ) from None
                if time.monotonic() >= deadline:
                    raise UnavailableError(f"the call was not recorded: {why}") from None
                log.warning("call.keep_retried", session=call.session, error=why)
                await asyncio.sleep(_RETRY_S)
            else:
                return

    async def read(
        self, session: str, *, after: int = 0, limit: int = 100, max_bytes: int = _MAX_PAGE_BYTES
    ) -> RecordedPage:
        """A page of the session's calls; go on with `after` = the last one's number while it `has_more`.

        Args:
            session: Its name.
            after: Only calls with a higher number.
            limit: Most calls of the page.
            max_bytes: Most bytes of the page, as stored; one call is returned however large it is.

        Raises:
            UnavailableError: the server does not answer.
        """
        calls: list[tuple[int, RecordedCall]] = []
        subject, num_bytes = self._subject(session), 0
        try:
            while len(calls) < limit:
                message = await self._js.get_msg(self._stream.name, seq=after + 1, subject=subject, next=True)
                assert message.seq is not None
                payload = message.data or b""
                num_bytes += len(payload)
                if calls and num_bytes > max_bytes:
                    break
                calls.append((message.seq, decode(payload, RecordedCall)))
                after = message.seq
        except nats.js.errors.NotFoundError:
            return RecordedPage(calls=calls, has_more=False)
        except BUS_ERRORS as error:
            raise UnavailableError(f"the recordings cannot be read: {describe(error)}") from None
        return RecordedPage(calls=calls, has_more=True)

    async def remove(self, session: str) -> None:
        """Remove the session's calls.

        Raises:
            UnavailableError: the server does not answer.
        """
        try:
            await self._js.purge_stream(self._stream.name, subject=self._subject(session))
        except BUS_ERRORS as error:
            raise UnavailableError(f"the recordings cannot be removed: {describe(error)}") from None

    def _subject(self, session: str) -> str:
        """The session's subject; base64, because names may hold any character."""
        return f"{self._stream.subject}.{base64.urlsafe_b64encode(session.encode()).decode().rstrip('=')}"
