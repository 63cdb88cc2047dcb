"""Keeps clients' calls by session in a stream of the run, for training.

Invariants: a call for which `keep` has returned is stored, in order. It is removed when it is too old or on request,
never to make room: a full stream rejects new calls. A page is bounded in bytes, because every call repeats the images
of its conversation.
"""

import base64
import dataclasses
from collections.abc import Sequence

from penstock.bus.connection import Bus
from penstock.bus.kept_stream import KeptStream, Wording
from penstock.records import RecordedCall
from penstock.records.codec import decode, encode

_WORDING = Wording(
    record="the call",
    stream="the recordings",
    when_large="send smaller images",
    when_full="read and delete some, or raise router.openai.recordings_max_mb",
)
_MAX_PAGE_BYTES = 16 * 2**20
"""A page ends before it exceeds this many bytes, unless its first call alone does."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPage:
    """Consecutive calls of a session."""

    calls: Sequence[tuple[int, RecordedCall]]
    """Each call with its number in the stream."""
    has_more: bool
    """Whether there may be further calls."""


class Recordings:
    """The recorded calls of a run; any of its processes may write and read them."""

    def __init__(self, bus: Bus) -> None:
        """Keep the calls on `bus`."""
        self._stream = KeptStream(bus, bus.calls, _WORDING)

    async def ensure(self, *, max_age_s: float, max_bytes: int) -> None:
        """Create the stream, or give an existing one these bounds.

        Raises:
            SetupError: the server does not create it.
        """
        await self._stream.ensure("*", max_age_s=max_age_s, max_bytes=max_bytes)

    async def keep(self, call: RecordedCall) -> None:
        """Store the call.

        Raises:
            InvalidRequestError: it is larger than the server accepts.
            OverloadedError: the recordings are full.
            UnavailableError: the server did not store it in time.
        """
        message_id = f"{call.request_id}/{call.choice}"
        await self._stream.publish(_subject(call.session), encode(call), message_id=message_id)

    async def read(
        self, session: str, *, after: int = 0, limit: int = 100, max_bytes: int = _MAX_PAGE_BYTES
    ) -> RecordedPage:
        """Return a page of the session's calls; while it `has_more`, continue with `after` = its last call's number.

        Args:
            session: The session's name.
            after: Only calls with a higher number.
            limit: The most calls in the page.
            max_bytes: The most bytes in the page, as stored; the first call is returned however large it is.

        Raises:
            UnavailableError: the server does not answer.
        """
        calls: list[tuple[int, RecordedCall]] = []
        num_bytes = 0
        while len(calls) < limit:
            found = await self._stream.next(_subject(session), after=after)
            if found is None:
                return RecordedPage(calls=calls, has_more=False)
            after, payload = found
            num_bytes += len(payload)
            if calls and num_bytes > max_bytes:
                break
            calls.append((after, decode(payload, RecordedCall)))
        return RecordedPage(calls=calls, has_more=True)

    async def remove(self, session: str) -> None:
        """Remove the session's calls.

        Raises:
            UnavailableError: the server does not answer.
        """
        await self._stream.remove(_subject(session))


def _subject(session: str) -> str:
    """Return the session's subject; base64, because names may hold any character."""
    return base64.urlsafe_b64encode(session.encode()).decode().rstrip("=")
