"""Writes the spans of all processes to the run folder, as they arrive from the bus.

A file begins at each start of the trainer, or of `penstock eval`, and whenever one is full:
`trace/spans-<milliseconds since 1970>.jsonl`. Each line holds one batch of one process. Above the bound, the oldest
files are deleted. No fault in it ends the run.
"""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import structlog

from penstock.bus.connection import Bus
from penstock.bus.failures import BUS_ERRORS, describe
from penstock.bus.span_stream import SpanReader, StoredBatch, ask_for_spans
from penstock.errors import PenstockError
from penstock.runtime.process import end_task
from penstock.telemetry import spans
from penstock.telemetry.json_lines import append_lines

log = structlog.get_logger()

PATTERN = "spans-*.jsonl"
_FILE_BYTES = 16 * 2**20
_READ_EVERY_S = 4.0
"""Seconds between two reads: batches that are read together cost less than one by one."""
_RETRY_S = 2.0
_MORE_S = 1.5
"""Seconds in which a trainer that ends goes on asking other processes for what they have, and reading it. It begins no
read after them, even if batches still come: processes that go on never stop sending."""
_LAST_S = _MORE_S + 3.0
"""Seconds that it spends on the last spans at most, with a read that hangs."""
_OLDEST_S = 600.0
"""Seconds before the first start of a run from which its spans are kept; older ones are of another run of its name."""


class SpanFiles:
    """The files of one start of the trainer. Its methods block."""

    def __init__(self, folder: Path, *, max_bytes: int, file_bytes: int = _FILE_BYTES) -> None:
        """Write to `trace` in the run folder, and keep it below `max_bytes`."""
        self._folder = folder / "trace"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._max_bytes = max_bytes
        self._file_bytes = min(file_bytes, max(1, max_bytes // 4))
        self._path: Path | None = None

    def last_sequence(self) -> int | None:
        """Return the number of the last batch in the files; None if there are none."""
        for path in reversed(self._paths()):
            lines = path.read_bytes().split(b"\n")[:-1]  # the last one may be cut off
            for line in reversed(lines):
                try:
                    return int(json.loads(line)["sequence"])
                except (ValueError, KeyError, TypeError):
                    continue
        return None

    def append(self, batches: Sequence[StoredBatch]) -> None:
        """Write the batches, all or none of them. Somebody may have deleted the files.

        Raises:
            OSError: the disk is full.
        """
        lines = [
            b'{"sequence":%d,"stored":%b,"batch":%b}\n'
            % (batch.sequence, b"null" if batch.stored_at is None else b"%.6f" % batch.stored_at, batch.payload)
            for batch in batches
        ]
        if self._path is None or not self._path.exists() or self._size() >= self._file_bytes:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._path = self._folder / f"spans-{time.time_ns() // 1_000_000:013d}.jsonl"
            self._make_room()
        append_lines(self._path, b"".join(lines))

    def _size(self) -> int:
        assert self._path is not None
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def _make_room(self) -> None:
        paths = self._paths()
        sizes = [path.stat().st_size for path in paths]
        while paths and sum(sizes) + self._file_bytes > self._max_bytes:
            paths.pop(0).unlink(missing_ok=True)
            sizes.pop(0)

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob(PATTERN))


@asynccontextmanager
async def collecting_spans(bus: Bus, folder: Path, *, max_bytes: int) -> AsyncIterator[None]:
    """Write the spans of the run's processes to its folder during the context."""
    ending = asyncio.Event()
    task = asyncio.create_task(_collect(bus, folder, max_bytes, ending))
    task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        ending.set()
        await asyncio.wait({task}, timeout=_LAST_S)
        await end_task(task)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("spans.collecting_failed", exc_info=error)


async def _collect(bus: Bus, folder: Path, max_bytes: int, ending: asyncio.Event) -> None:
    try:
        files = await asyncio.to_thread(SpanFiles, folder, max_bytes=max_bytes)
        last = await asyncio.to_thread(files.last_sequence)
    except OSError as error:
        log.warning("spans.not_kept", reason=str(error))
        return
    oldest = time.time() - _OLDEST_S if last is None else 0.0
    reader = SpanReader(bus, after=last or 0)
    unwritten: list[StoredBatch] = []
    is_written = True
    try:
        is_last, last_at = False, math.inf
        while not is_last:
            if is_ending := ending.is_set():
                last_at = min(last_at, time.monotonic() + _MORE_S)
                await ask_for_spans(bus)
            try:
                found: Sequence[StoredBatch] = ()
                if not unwritten:  # else the rest waits on the bus, which is bounded
                    found = await reader.read()
                    unwritten = [batch for batch in found if (batch.stored_at or 0.0) >= oldest]
                is_last = time.monotonic() >= last_at
            except (PenstockError, *BUS_ERRORS) as error:
                log.debug("spans.collect_failed", reason=describe(error))
                is_last = is_ending
                if not ending.is_set():
                    await asyncio.sleep(_RETRY_S)
            if is_last:
                unwritten += _own_batches(reader.last_sequence)
            if unwritten:
                try:
                    await asyncio.to_thread(files.append, unwritten)
                    unwritten, is_written = [], True
                except OSError as error:
                    if is_written:
                        log.warning(
                            "spans.not_written", reason=str(error), effect="they are written once there is room"
                        )
                    is_written = False
                    await asyncio.sleep(_RETRY_S)
            if not reader.is_behind and not is_ending:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_READ_EVERY_S):
                        await ending.wait()
    finally:
        await reader.close()


def _own_batches(sequence: int) -> list[StoredBatch]:
    """Take what this process would send after it has stopped to collect."""
    buffer = spans.buffer()
    if buffer is None or not len(buffer):
        return []
    payload, _ = buffer.take_batch(len(buffer))
    return [StoredBatch(sequence=sequence, stored_at=None, payload=payload)]
