"""Reads the spans in `trace` of a run folder, of all processes on one clock.

The clock is the NATS server's. The server stores each batch of spans with its own time, and the batch says when its
process sent it. The smallest difference between the two is how far the process's clock is off, plus the time that a
message takes. Below `_SKEW_S`, which a message may take on a busy machine, the process's own clock counts. What the
trainer writes to files itself is moved by the skew of its batches; what the launcher writes, by that of any process on
its host.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

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
    def source(self) -> "_SourceName":
        """What sent it."""
        return self.process, self.host, self.start


class _SentRow(msgspec.Struct):
    stored: float | None
    """None: it did not pass NATS."""
    batch: _SentBatch

    @property
    def time(self) -> float:
        """When it was stored, in seconds since 1970; by the process's clock if it did not pass NATS."""
        return self.batch.sent if self.stored is None else self.stored


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


_SourceName: TypeAlias = tuple[str, str, str]
"""One start of one process: its name, its host, and the identity of the start."""
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
class Loss:
    """Spans of a process that are not in the files, between two batches that are."""

    process: str
    start: float
    """When the batch before them was stored, in seconds since 1970."""
    end: float
    """When the batch after them was stored."""
    num_dropped: int
    """Spans that the process dropped because its buffer was full, or because they could not be sent."""
    num_batches: int
    """Batches that are missing; how many spans they had is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The spans of a part of a run."""

    spans: list[Span]
    """By start."""
    num_dropped: int
    """Spans that processes dropped; see `Loss`."""
    num_lost_batches: int
    """Batches between others that are not in the files."""


@dataclass(slots=True)
class _Source:
    delay_s: float | None = None
    gaps: list[tuple[float, float, int, int]] = field(default_factory=list)
    """Of each `Loss` its start, its end, `num_dropped` and `num_batches`."""
    last: _SentRow | None = None

    @property
    def skew_s(self) -> float:
        return _skew_of(self.delay_s)

    def add(self, row: _SentRow) -> None:
        """Count a batch; a source's come in their order."""
        if row.stored is not None:
            delay_s = row.stored - row.batch.sent
            self.delay_s = delay_s if self.delay_s is None else min(self.delay_s, delay_s)
        before = self.last.batch if self.last else None
        if before is not None and row.batch.number <= before.number:
            return  # a killed trainer may have written it twice
        if before is not None or row.batch.number == 1:  # else what came before it has been deleted
            num_dropped = row.batch.dropped - (before.dropped if before else 0)
            num_batches = row.batch.number - (before.number if before else 0) - 1
            if num_dropped > 0 or num_batches > 0:
                self.gaps.append(((self.last or row).time, row.time, max(0, num_dropped), num_batches))
        self.last = row


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


class SpanStream:
    """The spans of a time in no order, one after the other: those of a long run are gigabytes."""

    def __init__(
        self,
        spans: Iterator[Span],
        sources: Mapping[_SourceName, _Source],
        *,
        first: float,
        last: float,
        passed_over: float,
    ) -> None:
        """Stream `spans`, which notes in `sources` what is missing from `first` to `last`.

        A file that begins at `passed_over` is not read: what seems to be missing later may be there.
        """
        self._spans = spans
        self._sources = sources
        self._first = first
        self._last = last
        self._passed_over = passed_over

    def __iter__(self) -> Iterator[Span]:
        """Return the spans that were not taken yet."""
        return self._spans

    def losses(self) -> list[Loss]:
        """Return what is missing, once all spans were taken."""
        names = _names_of(self._sources)
        return [
            Loss(process=names[name], start=start, end=end, num_dropped=num_dropped, num_batches=num_batches)
            for name, source in self._sources.items()
            for start, end, num_dropped, num_batches in source.gaps
            if start <= self._last and self._first <= end <= self._passed_over
        ]


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
        stream = self.stream(first, last)
        spans = sorted(stream, key=lambda span: span.start)
        losses = stream.losses()
        return Trace(
            spans=spans,
            num_dropped=sum(loss.num_dropped for loss in losses),
            num_lost_batches=sum(loss.num_batches for loss in losses),
        )

    def stream(self, first: float = 0.0, last: float = float("inf")) -> SpanStream:
        """Return the spans that `read` returns, in no order, one after the other.

        What is returned may be used from another thread, also while the reader is.
        """
        sources: dict[_SourceName, _Source] = {}
        paths, passed_over = self._paths(first, last)
        spans = self._spans(first, last, _spans(paths, sources))
        return SpanStream(spans, sources, first=first, last=last, passed_over=passed_over)

    def _spans(self, first: float, last: float, stored: Iterator[Span]) -> Iterator[Span]:
        sent = (span for span in stored if span.start <= last and span.start + span.seconds >= first)
        steps = (
            Span(process="trainer", name=name, start=start, seconds=seconds, attributes={"step": step["step"]})
            for step in self.steps()
            for name, start, seconds in step["spans"]
            if start <= last and start + seconds >= first  # few do, and a span takes much longer to make
        )
        return chain(sent, steps)

    def _trainer_skew(self, start: str, *, began: float) -> float:
        """Return how far the trainer's clock is off, in the start whose first step began at `began` by that clock.

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

    def _paths(self, first: float, last: float) -> tuple[list[Path], float]:
        """Return the files that may have spans of this time, and when the first one begins that is passed over."""
        taken, passed_over = self._launcher_paths(), float("inf")
        paths = self._span_paths()
        begins = [self._begin_of(path) for path in paths]
        # A file may begin with batches of the one before it, which were read again.
        ends = [*map(max, begins[1:], map(_named_time, paths[1:])), float("inf")]
        for path, begin, end in zip(paths, begins, ends, strict=False):
            if end < first:
                continue
            # A batch has what ended before it: later files may have what began long before them.
            if begin <= last + _LATE_S or self._extent_of(path).begin <= last:
                taken.append(path)
            else:
                passed_over = min(passed_over, begin)
        return taken, passed_over

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


def _spans(paths: Sequence[Path], sources: dict[_SourceName, _Source]) -> Iterator[Span]:
    """Yield the spans in the files on the server's clock, and note in `sources` what their batches say of themselves.

    The files are read twice: all must have been seen to know how far a clock is off, and what bears the same name.
    """
    for row in _rows(paths, _sent_decoder):
        sources.setdefault(row.batch.source, _Source()).add(row)
    delays: dict[str, float] = {}
    names = _names_of(sources)
    for (_, host, _), source in sources.items():
        if source.delay_s is not None:
            delays[host] = min(delays.get(host, source.delay_s), source.delay_s)
    for (_, host, _), source in sources.items():
        if source.delay_s is None:  # the launcher, which writes its spans itself
            source.delay_s = delays.get(host)
    seen: set[tuple[_SourceName, int]] = set()  # a killed trainer may have written a batch twice
    for batch in (row.batch for row in _rows(paths, _decoder)):
        if (batch.source, batch.number) in seen or batch.source not in sources:  # or it has come meanwhile
            continue
        seen.add((batch.source, batch.number))
        skew_s = sources[batch.source].skew_s
        process = names[batch.source]
        for name, start, seconds, attributes in batch.spans:
            yield Span(process=process, name=name, start=start + skew_s, seconds=seconds, attributes=attributes)


def _names_of(sources: Iterable[_SourceName]) -> dict[_SourceName, str]:
    """Return the name of each source's process, with its host if there are processes of that name on several."""
    hosts: dict[str, set[str]] = {}
    for process, host, _ in sources:
        hosts.setdefault(process, set()).add(host)
    return {source: " ".join(source[: 2 if len(hosts[source[0]]) > 1 else 1]) for source in sources}


def _skew_of(delay_s: float | None) -> float:
    return 0.0 if delay_s is None or abs(delay_s) < _SKEW_S else delay_s


def _named_time(path: Path) -> float:
    """Return the time in the name of a file, by the clock of the trainer that began it."""
    digits = path.stem.rpartition("-")[2]
    return int(digits) / 1000 if digits.isdecimal() else 0.0
