"""Reads a file in the Trace Event Format as strictly as Perfetto's JSON importer.

That importer shows what it can place and only counts the rest: a slice that overlaps another of its thread without
nesting, an end without its beginning, a flow that begins in no slice. Here each of these is a fault. The rules are
those of its json_trace_parser, slice_tracker, flow_tracker and process_tracker.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_MAX_NUMBER = 2**32
_NAMES = ("process_name", "thread_name")


def find_faults(data: bytes) -> list[str]:
    """Return what Perfetto would drop or misplace; empty if all of the file is shown as it is."""
    trace = json.loads(data, parse_constant=_refuse)
    if not isinstance(trace, dict) or list(trace) != ["displayTimeUnit", "traceEvents"]:
        return ["the file must be an object of displayTimeUnit, which is read before events, and traceEvents"]
    if trace["displayTimeUnit"] not in ("ms", "ns"):
        return [f"displayTimeUnit = {trace['displayTimeUnit']!r}"]
    events = trace["traceEvents"]
    faults = [f"event {number}: {fault}" for number, event in enumerate(events) for fault in _of_event(event)]
    return faults or [*_of_names(events), *_of_tracks(events), *_of_flows(events)]


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def to_ns(us: float) -> int:
    """Return nanoseconds as the importer computes them from JSON's microseconds: it cuts off, it does not round."""
    return us * 1000 if isinstance(us, int) else int(us * 1000)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and to_ns(value) >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MAX_NUMBER


def _of_event(event: Any) -> Iterator[str]:
    phase = event.get("ph")
    if phase not in ("X", "B", "E", "s", "f", "M"):
        yield f"ph = {phase!r}"
    if not isinstance(event.get("name"), str) or not event["name"]:
        yield f"name = {event.get('name')!r}"
    for key in ("pid", "tid"):  # 0 is the idle thread's
        if not _is_number(event.get(key)):
            yield f"{key} = {event.get(key)!r}"
    if not isinstance(event.get("args", {}), dict):
        yield f"args = {event['args']!r}"
    if phase == "M":
        if event["name"] not in _NAMES:
            yield f"metadata {event['name']!r} is ignored"
        if not isinstance(event.get("args", {}).get("name"), str) or not event["args"]["name"]:
            yield f"{event['name']} = {event.get('args')!r}"
    elif not _is_time(event.get("ts")):
        yield f"ts = {event.get('ts')!r}"
    if phase == "X" and not _is_time(event.get("dur")):
        yield f"dur = {event.get('dur')!r}"
    if phase in "sf" and not isinstance(event.get("id"), int | str):
        yield f"flow without an id: {event!r}"


def _of_names(events: list[dict[str, Any]]) -> Iterator[str]:
    """Each process and thread has one name, before its first event, and no number means two of them."""
    processes: set[int] = set()
    threads: dict[int, int] = {}
    for number, event in enumerate(events):
        pid, tid = event["pid"], event["tid"]
        if event["ph"] != "M":
            if pid not in processes or threads.get(tid) != pid:
                yield f"event {number}: process {pid} or its thread {tid} has no name yet"
        elif event["name"] == "process_name":
            if pid in processes or pid in threads:
                yield f"event {number}: number {pid} has a name already"
            processes.add(pid)
        else:
            if tid in threads or tid in processes:
                yield f"event {number}: number {tid} has a name already"
            threads[tid] = pid


@dataclass
class _Slice:
    name: str
    start: int
    end: int | None
    """None: its end has not come."""


@dataclass
class _Track:
    faults: list[str] = field(default_factory=list)
    open: list[_Slice] = field(default_factory=list)

    def close_before(self, start: int, length: int | None) -> None:
        """Close the slices that end before a slice of this length begins; instants at one time stack up."""
        while self.open and (end := self.open[-1].end) is not None:
            both_instants = self.open[-1].start == end and length == 0
            if end > start or (end == start and both_instants):
                return
            self.open.pop()

    def begin(self, event: dict[str, Any]) -> None:
        start = to_ns(event["ts"])
        length = to_ns(event["dur"]) if event["ph"] == "X" else None
        self.close_before(start, length)
        end = None if length is None else start + length
        for each in self.open:
            if end is not None and each.end is not None and start < each.end < end:
                self.faults.append(f"{event['name']} at {start} to {end} overlaps {each}")
                return
        self.open.append(_Slice(event["name"], start, end))

    def end(self, event: dict[str, Any]) -> None:
        self.close_before(to_ns(event["ts"]), None)
        if not self.open or self.open[-1].end is not None or self.open[-1].name != event["name"]:
            self.faults.append(f"{event} ends no slice that is open: {self.open[-1:]}")
        else:
            self.open.pop()


def _sorted(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events with a time in the order in which the importer takes them."""
    return sorted((each for each in events if each["ph"] != "M"), key=lambda each: to_ns(each["ts"]))


def _of_tracks(events: list[dict[str, Any]]) -> Iterator[str]:
    tracks: dict[int, _Track] = {}
    for event in _sorted(events):
        track = tracks.setdefault(event["tid"], _Track())
        if event["ph"] in "XB":
            track.begin(event)
        elif event["ph"] == "E":
            track.end(event)
    for tid, track in tracks.items():
        yield from track.faults
        yield from (f"thread {tid}: {each.name} never ends" for each in track.open if each.end is None)


def _of_flows(events: list[dict[str, Any]]) -> Iterator[str]:
    """A flow begins and ends in slices, and has one beginning, before its end."""
    tracks: dict[int, _Track] = {}
    begun: set[tuple[Any, ...]] = set()
    ended: set[tuple[Any, ...]] = set()
    for event in _sorted(events):
        track, flow = tracks.setdefault(event["tid"], _Track()), (event.get("cat"), event["name"], event.get("id"))
        if event["ph"] in "XB":
            track.begin(event)
        elif event["ph"] == "E":
            track.end(event)
        else:
            track.close_before(to_ns(event["ts"]), None)
            if not track.open:
                yield f"flow {flow} is in no slice of thread {event['tid']}"
            if event["ph"] == "s":
                if flow in begun:
                    yield f"flow {flow} begins twice"
                begun.add(flow)
            elif flow not in begun:
                yield f"flow {flow} ends before it begins"
            else:
                ended.add(flow)
                if event.get("bp") != "e":
                    yield f"flow {flow} has no bp = e: it would end in the next slice, not in this one"
    yield from (f"flow {flow} has no end" for flow in begun - ended)
