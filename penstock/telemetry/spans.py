"""Spans: what this process did from when to when, kept in memory until they are sent.

    spans.record("turn", began, group=..., sample=0, turn=1)

As with the log, a process has one buffer, which its entry point opens; without it, `record` does nothing. A full buffer
drops new spans and counts them. `penstock.bus.span_stream` sends them, and docs/operation/tracing.md lists them all.
"""

import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias

import msgspec

from penstock.runtime.text import printable

MAX_WAITING: Final = 20_000
"""Spans that wait in memory, about 10 MB. Beyond that, new ones are dropped: NATS is away, or far too slow."""
SHORTEST_S: Final = 0.001
"""Seconds of the shortest waits that are kept; nobody can see shorter ones in a step."""
_MAX_CHARS: Final = 300
"""Longer errors are cut, and other longer texts in batches that have many: ids may come from outside."""
_USUAL_BYTES: Final = 500
"""Of a span; batches with more in the mean have long texts."""

_Waiting: TypeAlias = tuple[str, float, float, dict[str, Any]]
_Row: TypeAlias = tuple[str, float, float, dict[str, Any]]
"""Of a batch; see `SpanBuffer.take_batch`."""


class SpanBuffer:
    """Spans of this process that were not sent yet. `add` may be called from any thread."""

    def __init__(self, process: str, *, max_waiting: int = MAX_WAITING) -> None:
        """Start empty; `process` is the process's name in the run, for example worker-0."""
        self.num_dropped = 0
        """Spans that were not kept or not sent, since the process started."""
        self._about = {
            "process": process,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "start": uuid.uuid4().hex[:8],
        }
        self._max_waiting = max_waiting
        self._waiting: deque[_Waiting] = deque()
        self._num_batches = 0

    @property
    def start(self) -> str:
        """Identity of this start of the process."""
        return str(self._about["start"])

    def __len__(self) -> int:
        """Return how many spans wait."""
        return len(self._waiting)

    def add(self, name: str, began: float, ended: float, attributes: dict[str, Any]) -> None:
        """Keep a span, by times of `time.monotonic()`."""
        if len(self._waiting) >= self._max_waiting:
            self.num_dropped += 1
        else:
            self._waiting.append((name, began, ended, attributes))

    def take_batch(self, limit: int) -> tuple[bytes, int]:
        """Remove the oldest spans, at most `limit`; return them as one line of JSON without its end, and their number.

        The line has `process`, `host`, `pid`, `start` (another one for each start of a process), `number` (of the
        batch, from 1), `dropped` (so far), `sent` (seconds since 1970, this machine's clock), and `spans`: lists of
        name, start (seconds since 1970), seconds, and attributes.
        """
        taken = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
        now = time.time()
        shift = now - time.monotonic()
        self._num_batches += 1
        about = self._about | {"number": self._num_batches, "dropped": self.num_dropped, "sent": round(now, 6)}
        rows = [(name, began + shift, ended - began, attributes) for name, began, ended, attributes in taken]
        return _encode(about, rows), len(taken)

    def drop_batch(self, num_spans: int) -> None:
        """Count the spans of the batch that was taken last and could not be sent; the next one has its number."""
        self.num_dropped += num_spans
        self._num_batches -= 1


_buffer: SpanBuffer | None = None


def open_buffer(process: str, *, max_waiting: int = MAX_WAITING) -> SpanBuffer:
    """Begin to keep this process's spans; `process` is its name in the run."""
    global _buffer
    _buffer = SpanBuffer(process, max_waiting=max_waiting)
    return _buffer


def close_buffer() -> None:
    """Keep no more spans."""
    global _buffer
    _buffer = None


def buffer() -> SpanBuffer | None:
    """Return this process's buffer; None if it keeps no spans."""
    return _buffer


def record(name: str, began: float, ended: float | None = None, /, **attributes: Any) -> None:
    """Keep a span.

    Args:
        name: Its name in docs/operation/tracing.md.
        began: Time of `time.monotonic()` at which it began.
        ended: Time at which it ended; None: now.
        attributes: Numbers, texts or booleans; those that are None are left out. Of `error` 300 characters are kept.
    """
    if _buffer is not None:
        error = attributes.get("error")
        if error is not None:
            attributes["error"] = str(error)[:_MAX_CHARS]
        _buffer.add(name, began, time.monotonic() if ended is None else ended, attributes)


def recorded(name: str, /, **attributes: Any) -> AbstractContextManager[dict[str, Any]]:
    """Keep a span of the context, which may add to the yielded attributes; `error` is the error that ended it."""
    return _Recorded(name, attributes)


def recorded_unless_short(name: str, /, **attributes: Any) -> AbstractContextManager[dict[str, Any]]:
    """Do the same for what mostly takes no time: spans shorter than `SHORTEST_S` without an error are not kept."""
    return _Recorded(name, attributes, shortest_s=SHORTEST_S)


class _Recorded:
    """The context of a span; a generator would cost as much as the span itself."""

    __slots__ = ("_attributes", "_began", "_name", "_shortest_s")

    def __init__(self, name: str, attributes: dict[str, Any], *, shortest_s: float = 0.0) -> None:
        self._name = name
        self._attributes = attributes
        self._shortest_s = shortest_s
        self._began = 0.0

    def __enter__(self) -> dict[str, Any]:
        self._began = time.monotonic()
        return self._attributes

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        ended = time.monotonic()
        if error is not None:
            self._attributes["error"] = str(error) or type(error).__name__
        if error is not None or ended - self._began >= self._shortest_s:
            record(self._name, self._began, ended, **self._attributes)


def _encode(about: dict[str, Any], rows: Sequence[_Row]) -> bytes:
    """Return the batch as JSON; one that may need it is looked at value by value, which takes six times as long."""
    try:
        payload = _encoder.encode(about | {"spans": rows})
    except UnicodeEncodeError:  # half a character
        payload = b""
    if payload and len(payload) <= _USUAL_BYTES * len(rows) and b":null" not in payload:
        return payload
    kept = [(name, start, seconds, _kept(attributes)) for name, start, seconds, attributes in rows]
    return _encoder.encode(about | {"spans": kept})


def _kept(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that have a value, with texts short and printable."""
    return {
        key: printable(value[:_MAX_CHARS]) if isinstance(value, str) else value
        for key, value in attributes.items()
        if value is not None
    }


def _text(value: object) -> str:
    return printable(str(value))


_encoder: Final = msgspec.json.Encoder(enc_hook=_text)
