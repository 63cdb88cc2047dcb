"""Calls of clients, kept by session in a stream of the run, so that they can be trained on.

Invariant: what `keep` returned from is stored, in the order in which it was; it goes when it is too old, or when
somebody removes it, and never to make room: a stream that is full refuses.
"""

import asyncio
import base64
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


class Recordings:
    """The recorded calls of a run; any process of it may write and read them."""

    def __init__(self, bus: Bus) -> None:
        """Keep them on `bus`."""
        self._bus = bus
        self._js = bus.jetstream
        self._stream = bus.calls

    async def ensure(self, *, max_age_s: float, max_bytes: int) -> None:
        """Create the stream, or give the one that is there these bounds.

        Raises:
            SetupError: the server does not make it.
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
            InvalidRequestError: it is larger than the server takes.
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

    async def read(self, session: str, *, after: int = 0, limit: int = 100) -> Sequence[tuple[int, RecordedCall]]:
        """Calls of the session in their order, each with its number in the stream.

        Args:
            session: Its name.
            after: Only those with a higher number.
            limit: The most to return.

        Raises:
            UnavailableError: the server does not answer.
        """
        found: list[tuple[int, RecordedCall]] = []
        subject = self._subject(session)
        try:
            while len(found) < limit:
                message = await self._js.get_msg(self._stream.name, seq=after + 1, subject=subject, next=True)
                assert message.seq is not None
                found.append((message.seq, decode(message.data or b"", RecordedCall)))
                after = message.seq
        except nats.js.errors.NotFoundError:
            pass
        except BUS_ERRORS as error:
            raise UnavailableError(f"the recordings cannot be read: {describe(error)}") from None
        return found

    async def remove(self, session: str) -> None:
        """Forget the session's calls.

        Raises:
            UnavailableError: the server does not answer.
        """
        try:
            await self._js.purge_stream(self._stream.name, subject=self._subject(session))
        except BUS_ERRORS as error:
            raise UnavailableError(f"the recordings cannot be removed: {describe(error)}") from None

    def _subject(self, session: str) -> str:
        """A subject for each session, whatever characters its name has."""
        return f"{self._stream.subject}.{base64.urlsafe_b64encode(session.encode()).decode().rstrip('=')}"
