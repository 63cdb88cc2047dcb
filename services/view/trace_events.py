"""Writes a run's spans in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

A process of the run is a process there; its overlapping spans are on several threads, because slices of one thread must
nest. A span that has waited or decoded says so in its arguments.
"""

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
    processes: dict[str, int] = {}
    lanes: dict[tuple[str, str], _Lanes] = {}
    first = spans[0].start if spans else 0.0
    num_threads: dict[str, int] = {}
    for span in spans:
        if span.process not in processes:
            processes[span.process] = len(processes) + 1
            yield _named("process_name", processes[span.process], 0, span.process)
        pid = processes[span.process]
        group = lanes.setdefault((span.process, span.name), _Lanes())
        lane = group.place(span)
        if lane == len(group.threads):
            thread = num_threads[span.process] = num_threads.get(span.process, 0) + 1
            group.threads.append(thread)
            yield _named("thread_name", pid, thread, span.name if lane == 0 else f"{span.name} {lane + 1}")
        yield {
            "name": span.name,
            "cat": span.name.partition(".")[0],
            "ph": "X",
            "ts": round((span.start - first) * 1e6, 1),
            "dur": round(span.seconds * 1e6, 1),
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
        self._busy: list[tuple[float, int]] = []
        self._num = 0

    def place(self, span: Span) -> int:
        """Return the lowest lane that is free when the span begins; spans come in order of their start."""
        while self._busy and self._busy[0][0] <= span.start:
            heappush(self._free, heappop(self._busy)[1])
        if self._free:
            lane = heappop(self._free)
        else:
            lane, self._num = self._num, self._num + 1
        heappush(self._busy, (span.start + span.seconds, lane))
        return lane
