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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from penstock.runtime.text import printable

MAX_WAITING: Final = 20_000
"""Spans that wait in memory, about 10 MB. Beyond that, new ones are dropped: NATS is away, or far too slow."""
_MAX_CHARS: Final = 300
"""Longer texts are cut: ids and errors may come from outside."""

_Waiting = tuple[str, float, float, dict[str, Any]]


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
        batch = self._about | {
            "number": self._num_batches,
            "dropped": self.num_dropped,
            "sent": round(now, 6),
            "spans": [
                (name, _to_microseconds(began + shift), _to_microseconds(max(0.0, ended - began)), _kept(attributes))
                for name, began, ended, attributes in taken
            ],
        }
        return _encoder.encode(batch), len(taken)

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
        attributes: Numbers, texts or booleans; those that are None are left out.
    """
    if _buffer is not None:
        _buffer.add(name, began, time.monotonic() if ended is None else ended, attributes)


@contextmanager
def recorded(name: str, /, **attributes: Any) -> Iterator[dict[str, Any]]:
    """Keep a span of the context, which may add to the yielded attributes; `error` is the error that ended it."""
    began = time.monotonic()
    try:
        yield attributes
    except BaseException as error:
        attributes["error"] = str(error) or type(error).__name__
        raise
    finally:
        record(name, began, **attributes)


def _to_microseconds(seconds: float) -> float:
    """Round to whole microseconds, of which a clock of this century has fewer than a float can tell apart.

    `round`, which goes by the decimal digits, takes several times as long.
    """
    return (seconds * 1e6 + 0.5) // 1 / 1e6


def _kept(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that have a value: numbers without digits that nobody reads, texts short and printable."""
    kept: dict[str, Any] = {}
    for key, value in attributes.items():
        if isinstance(value, str):
            kept[key] = value if len(value) <= _MAX_CHARS and value.isascii() else printable(value[:_MAX_CHARS])
        elif isinstance(value, float):
            kept[key] = round(value, 6)
        elif value is not None:
            kept[key] = value
    return kept


def _text(value: object) -> str:
    return printable(str(value))


_encoder: Final = msgspec.json.Encoder(enc_hook=_text)
