"""Writes a run's spans in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

A process of the run is a process there; its overlapping spans are on several threads, because slices of one thread must
nest. A span that has waited or decoded says so in its arguments.

Perfetto drops a slice that overlaps another of its thread, even by a nanosecond. So times are whole microseconds, and
threads are chosen by the times as written, not by those before rounding. It knows a thread by its number alone, and
takes a thread with its process's number for the main thread. So no number is used twice, for threads or processes.
"""

import itertools
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import IO, Any

import msgspec

from services.view.trace_reader import Span


def write_trace_events(spans: Sequence[Span], file: IO[bytes]) -> int:
    """Write `spans`, which are in order of their start, as one JSON object; return the number of its events."""
    num_events = 0
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    for event in _events(spans):
        file.write((b",\n" if num_events else b"") + msgspec.json.encode(event))
        num_events += 1
    file.write(b"\n]}\n")
    return num_events


def _events(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    numbers = itertools.count(1)
    processes: dict[str, int] = {}
    lanes: dict[tuple[str, str], _Lanes] = {}
    first = spans[0].start if spans else 0.0
    for span in spans:
        if span.process not in processes:
            processes[span.process] = pid = next(numbers)
            yield _named("process_name", pid, pid, span.process)
        pid = processes[span.process]
        start_us = round((span.start - first) * 1e6)
        length_us = max(0, round(span.seconds * 1e6))  # whoever has the run's token may send negative ones
        group = lanes.setdefault((span.process, span.name), _Lanes())
        lane = group.place(start_us, start_us + length_us)
        if lane == len(group.threads):
            group.threads.append(next(numbers))
            name = span.name if lane == 0 else f"{span.name} {lane + 1}"
            yield _named("thread_name", pid, group.threads[lane], name)
        yield {
            "name": span.name,
            "cat": span.name.partition(".")[0],
            "ph": "X",
            "ts": start_us,
            "dur": length_us,
            "pid": pid,
            "tid": group.threads[lane],
            "args": span.attributes,
        }


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


class _Lanes:
    """Lanes for spans of one name, of which those that overlap are in different ones."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        """The thread of each lane that was used."""
        self._free: list[int] = []
        self._busy: list[tuple[int, int]] = []
        self._num = 0

    def place(self, start_us: int, end_us: int) -> int:
        """Return the lowest lane that is free when the span begins; spans come in order of their start."""
        while self._busy and self._busy[0][0] <= start_us:
            heappush(self._free, heappop(self._busy)[1])
        if self._free:
            lane = heappop(self._free)
        else:
            lane, self._num = self._num, self._num + 1
        heappush(self._busy, (end_us, lane))
        return lane
