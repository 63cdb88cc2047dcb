"""Reads the spans in `trace` of a run folder, of all processes on one clock.

The clock is the NATS server's. It stores each batch of spans with its own time, and the smallest difference to the time
at which the process says that it sent the batch is how far its clock is off, together with the way of a message. Below
`_SKEW_S`, which a busy machine may need for that way, the process's own clock counts. What the trainer and the launcher
write to files themselves is moved by the skew of the trainer's batches, and of any process on the launcher's host.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from penstock.telemetry.json_lines import JsonLinesFollower

_SKEW_S: Final = 0.05
_LATE_S: Final = 120.0
"""Seconds after a time for which a file is read in any case: within them, spans that ended in it are in the files."""


class _SentBatch(msgspec.Struct):
    """A batch without its spans; see `penstock.telemetry.spans.SpanBuffer.take_batch`."""

    process: str
    host: str
    start: str
    number: int
    dropped: int
    sent: float

    @property
    def source(self) -> tuple[str, str, str]:
        """What sent it: one start of one process."""
        return self.process, self.host, self.start


class _SentRow(msgspec.Struct):
    stored: float | None
    """None: it did not pass NATS."""
    batch: _SentBatch


class _Batch(_SentBatch):
    spans: list[tuple[str, float, float, dict[str, Any]]]


class _Row(msgspec.Struct):
    batch: _Batch


class _BegunBatch(msgspec.Struct):
    """A batch of whose spans only the starts are read."""

    start: str
    sent: float
    spans: list[tuple[msgspec.Raw, float, msgspec.Raw, msgspec.Raw]]


class _BegunRow(msgspec.Struct):
    stored: float | None
    batch: _BegunBatch


_AnyRow = TypeVar("_AnyRow", _SentRow, _Row)
_decoder: Final = msgspec.json.Decoder(_Row)
_sent_decoder: Final = msgspec.json.Decoder(_SentRow)
_begun_decoder: Final = msgspec.json.Decoder(_BegunRow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What a process did from when to when."""

    process: str
    name: str
    start: float
    """Seconds since 1970."""
    seconds: float
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The spans of a part of a run."""

    spans: list[Span]
    """By start."""
    num_dropped: int
    """Spans that processes dropped because their buffers were full."""
    num_lost_batches: int
    """Batches between others that are not in the files; of a part of a run, also those in files that were not read."""


@dataclass(slots=True)
class _Source:
    delay_s: float | None = None
    num_dropped: int = 0
    numbers: set[int] = field(default_factory=set)

    @property
    def skew_s(self) -> float:
        return _skew_of(self.delay_s)

    @property
    def num_lost_batches(self) -> int:
        return max(self.numbers) - min(self.numbers) + 1 - len(self.numbers)

    def add(self, row: _SentRow) -> None:
        """Count a batch."""
        if row.stored is not None:
            delay_s = row.stored - row.batch.sent
            self.delay_s = delay_s if self.delay_s is None else min(self.delay_s, delay_s)
        self.num_dropped = max(self.num_dropped, row.batch.dropped)
        self.numbers.add(row.batch.number)


@dataclass(slots=True)
class _Extent:
    """What each start of a process says in a file, as far as the file has been read."""

    num_read_bytes: int = 0
    delays: dict[str, float] = field(default_factory=dict)
    """The smallest delay."""
    begins: dict[str, float] = field(default_factory=dict)
    """When the earliest span began, by the process's clock."""

    @property
    def begin(self) -> float:
        """When the earliest span began."""
        return min(
            (begin + _skew_of(self.delays.get(start)) for start, begin in self.begins.items()), default=float("inf")
        )

    def add(self, row: _BegunRow) -> None:
        """Count a batch."""
        start = row.batch.start
        if row.stored is not None:
            delay_s = row.stored - row.batch.sent
            self.delays[start] = min(self.delays.get(start, delay_s), delay_s)
        for _, begin, _, _ in row.batch.spans:
            self.begins[start] = min(self.begins.get(start, begin), begin)


class TraceReader:
    """The spans of a run. Use it from one thread at a time."""

    def __init__(self, folder: Path) -> None:
        """Read `trace` of the run folder `folder`."""
        self._folder = folder / "trace"
        self._steps = JsonLinesFollower(self._folder / "trainer.jsonl")
        self._begins: dict[Path, float] = {}
        self._extents: dict[Path, _Extent] = {}

    def steps(self) -> list[dict[str, Any]]:
        """Return the parts of the trainer's steps, step by step."""
        self._steps.poll()
        skews: dict[str, float] = {}
        shifted = []
        for step in self._steps.rows:
            start, parts = step.get("start"), step["spans"]
            if isinstance(start, str) and start not in skews and parts:
                skews[start] = self._trainer_skew(start, began=min(begin for _, begin, _ in parts))
            skew_s = skews.get(start, 0.0) if isinstance(start, str) else 0.0
            if skew_s:
                step = {**step, "spans": [[name, begin + skew_s, seconds] for name, begin, seconds in parts]}
            shifted.append(step)
        return shifted

    def starts(self) -> list[list[Span]]:
        """Return when each launcher of the run started processes, and when they ended, in the order of these moments.

        The launchers are in the order in which they began.
        """
        return [
            sorted(_spans([path], {}), key=lambda span: span.start + span.seconds) for path in self._launcher_paths()
        ]

    def read(self, first: float = 0.0, last: float = float("inf")) -> Trace:
        """Return the spans that overlap the time from `first` to `last`, in seconds since 1970."""
        sources: dict[tuple[str, str, str], _Source] = {}
        return Trace(
            spans=sorted(self._spans(first, last, sources), key=lambda span: span.start),
            num_dropped=sum(source.num_dropped for source in sources.values()),
            num_lost_batches=sum(source.num_lost_batches for source in sources.values()),
        )

    def stream(self, first: float = 0.0, last: float = float("inf")) -> Iterator[Span]:
        """Return the spans that `read` returns, in no order, one after the other: those of a long run are gigabytes.

        What is returned may be used from another thread, also while the reader is.
        """
        return self._spans(first, last, {})

    def _spans(self, first: float, last: float, sources: dict[tuple[str, str, str], _Source]) -> Iterator[Span]:
        sent = (
            span
            for span in _spans(list(self._paths(first, last)), sources)
            if span.start <= last and span.start + span.seconds >= first
        )
        steps = (
            Span(process="trainer", name=name, start=start, seconds=seconds, attributes={"step": step["step"]})
            for step in self.steps()
            for name, start, seconds in step["spans"]
            if start <= last and start + seconds >= first  # few do, and a span takes much longer to make
        )
        return chain(sent, steps)

    def _trainer_skew(self, start: str, *, began: float) -> float:
        """Return how far the clock of this start of the trainer is off, whose first step began at `began` by it.

        The trainer begins a file when it starts, and names it by the same clock; its own batches are in it.
        """
        paths = self._span_paths()
        place = max(0, bisect_right(paths, began, key=_named_time) - 1)
        for path in paths[place : place + 2]:
            if (delay_s := self._extent_of(path).delays.get(start)) is not None:
                return _skew_of(delay_s)
        return 0.0

    def _extent_of(self, path: Path) -> _Extent:
        """Return the extent of a file, of which only what is new is read."""
        extent = self._extents.setdefault(path, _Extent())
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(extent.num_read_bytes)
            whole, newline, _ = file.read().rpartition(b"\n")  # the last line may be half written
            extent.num_read_bytes += len(whole) + len(newline)
            for line in whole.split(b"\n"):
                with suppress(msgspec.DecodeError):
                    extent.add(_begun_decoder.decode(line))
        return extent

    def _span_paths(self) -> list[Path]:
        return sorted(self._folder.glob("spans-*.jsonl"))

    def _launcher_paths(self) -> list[Path]:
        return sorted(self._folder.glob("launcher-*.jsonl"))

    def _paths(self, first: float, last: float) -> Iterator[Path]:
        """Yield the files that may have spans of this time."""
        yield from self._launcher_paths()
        paths = self._span_paths()
        begins = [self._begin_of(path) for path in paths]
        for path, begin, end in zip(paths, begins, [*begins[1:], float("inf")], strict=False):
            # A batch has what ended before it: later files may have what began long before them.
            if end >= first and (begin <= last + _LATE_S or self._extent_of(path).begin <= last):
                yield path

    def _begin_of(self, path: Path) -> float:
        """Return when the server got the first batch of a file; the time in its name if that is not known."""
        if path not in self._begins:
            with suppress(FileNotFoundError, msgspec.DecodeError), path.open("rb") as file:
                stored = _sent_decoder.decode(file.readline()).stored
                if stored is not None:
                    self._begins[path] = stored
        return self._begins.get(path, _named_time(path))


def _rows(paths: Iterable[Path], decoder: msgspec.json.Decoder[_AnyRow]) -> Iterator[_AnyRow]:
    for path in paths:
        try:
            lines = path.read_bytes().split(b"\n")[:-1]  # the last one may be half written
        except FileNotFoundError:  # the trainer has made room meanwhile
            continue
        for line in lines:
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError:  # anyone with the run's token may send anything
                continue


def _spans(paths: Sequence[Path], sources: dict[tuple[str, str, str], _Source]) -> Iterator[Span]:
    """Yield the spans in the files on the server's clock, and note in `sources` what their batches say of themselves.

    The files are read twice: all must have been seen to know how far a clock is off, and what bears the same name.
    """
    for row in _rows(paths, _sent_decoder):
        sources.setdefault(row.batch.source, _Source()).add(row)
    delays: dict[str, float] = {}
    hosts: dict[str, set[str]] = {}
    for (process, host, _), source in sources.items():
        hosts.setdefault(process, set()).add(host)
        if source.delay_s is not None:
            delays[host] = min(delays.get(host, source.delay_s), source.delay_s)
    for (_, host, _), source in sources.items():
        if source.delay_s is None:  # the launcher, which writes its spans itself
            source.delay_s = delays.get(host)
    seen: set[tuple[tuple[str, str, str], int]] = set()  # a killed trainer may have written a batch twice
    for batch in (row.batch for row in _rows(paths, _decoder)):
        if (batch.source, batch.number) in seen or batch.source not in sources:  # or it has come meanwhile
            continue
        seen.add((batch.source, batch.number))
        skew_s = sources[batch.source].skew_s
        process = f"{batch.process} {batch.host}" if len(hosts[batch.process]) > 1 else batch.process
        for name, start, seconds, attributes in batch.spans:
            yield Span(process=process, name=name, start=start + skew_s, seconds=seconds, attributes=attributes)


def _skew_of(delay_s: float | None) -> float:
    return 0.0 if delay_s is None or abs(delay_s) < _SKEW_S else delay_s


def _named_time(path: Path) -> float:
    """Return the time in the name of a file, by the clock of the trainer that began it."""
    digits = path.stem.rpartition("-")[2]
    return int(digits) / 1000 if digits.isdecimal() else 0.0
