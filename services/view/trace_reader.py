"""Reads the spans in `trace` of a run folder, of all processes on one clock.

The clock is the NATS server's. It stores each batch of spans with its own time, and the smallest difference to the time
at which the process says that it sent the batch is how far its clock is off, together with the way of a message. Below
`_SKEW_S`, which a busy machine may need for that way, the process's own clock counts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.telemetry.json_lines import JsonLinesFollower

_SKEW_S: Final = 0.05
_LATE_S: Final = 120.0
"""Seconds after its end within which a span is expected in the files."""


class _Batch(msgspec.Struct):
    """See `penstock.telemetry.spans.SpanBuffer.take_batch`."""

    process: str
    host: str
    start: str
    number: int
    dropped: int
    sent: float
    spans: list[tuple[str, float, float, dict[str, Any]]]

    @property
    def source(self) -> tuple[str, str, str]:
        """What sent it: one start of one process."""
        return self.process, self.host, self.start


class _Row(msgspec.Struct):
    stored: float | None
    """None: it did not pass NATS."""
    batch: _Batch


_decoder: Final = msgspec.json.Decoder(_Row)


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
    """Batches between others that are not in the files."""


@dataclass(slots=True)
class _Source:
    delay_s: float | None = None
    num_dropped: int = 0
    numbers: set[int] = field(default_factory=set)

    @property
    def skew_s(self) -> float:
        return 0.0 if self.delay_s is None or abs(self.delay_s) < _SKEW_S else self.delay_s

    @property
    def num_lost_batches(self) -> int:
        return max(self.numbers) - min(self.numbers) + 1 - len(self.numbers)


class TraceReader:
    """The spans of a run. Use it from one thread at a time."""

    def __init__(self, folder: Path) -> None:
        """Read `trace` of the run folder `folder`."""
        self._folder = folder / "trace"
        self._steps = JsonLinesFollower(self._folder / "trainer.jsonl")

    def steps(self) -> list[dict[str, Any]]:
        """Return the parts of the trainer's steps, step by step."""
        self._steps.poll()
        return self._steps.rows

    def starts(self) -> list[Span]:
        """Return when the launcher started processes of the run, and when they ended, in the order of these moments."""
        spans = _spans(_rows(self._launcher_paths()), {})
        return sorted(spans, key=lambda span: span.start + span.seconds)

    def read(self, first: float = 0.0, last: float = float("inf")) -> Trace:
        """Return the spans that overlap the time from `first` to `last`, in seconds since 1970."""
        sources: dict[tuple[str, str, str], _Source] = {}
        spans = _spans(_rows(self._paths(first, last)), sources)
        spans += [
            Span(process="trainer", name=name, start=start, seconds=seconds, attributes={"step": step["step"]})
            for step in self.steps()
            for name, start, seconds in step["spans"]
        ]
        return Trace(
            spans=sorted(
                (span for span in spans if span.start <= last and span.start + span.seconds >= first),
                key=lambda span: span.start,
            ),
            num_dropped=sum(source.num_dropped for source in sources.values()),
            num_lost_batches=sum(source.num_lost_batches for source in sources.values()),
        )

    def _launcher_paths(self) -> list[Path]:
        return sorted(self._folder.glob("launcher-*.jsonl"))

    def _paths(self, first: float, last: float) -> Iterator[Path]:
        """Yield the files that may have spans of this time; their names are the times at which they begin."""
        yield from self._launcher_paths()
        paths = sorted(self._folder.glob("spans-*.jsonl"))
        ends = [*(_begin_of(path) for path in paths[1:]), float("inf")]
        for path, end in zip(paths, ends, strict=False):
            if _begin_of(path) <= last + _LATE_S and end >= first:
                yield path


def _rows(paths: Iterable[Path]) -> Iterator[_Row]:
    for path in paths:
        try:
            lines = path.read_bytes().split(b"\n")[:-1]  # the last one may be half written
        except FileNotFoundError:  # the trainer has made room meanwhile
            continue
        for line in lines:
            try:
                yield _decoder.decode(line)
            except msgspec.DecodeError:  # whoever has the run's token may send anything
                continue


def _spans(rows: Iterable[_Row], sources: dict[tuple[str, str, str], _Source]) -> list[Span]:
    """Return the spans of the rows on the server's clock, and note in `sources` what the rows say of theirs."""
    batches = list(_noted(rows, sources))
    return [
        Span(process=name, name=each, start=start + skew_s, seconds=seconds, attributes=attributes)
        for batch, name in _named(batches)
        for skew_s in (sources[batch.source].skew_s,)
        for each, start, seconds, attributes in batch.spans
    ]


def _begin_of(path: Path) -> float:
    digits = path.stem.rpartition("-")[2]
    return int(digits) / 1000 if digits.isdecimal() else 0.0


def _noted(rows: Iterable[_Row], sources: dict[tuple[str, str, str], _Source]) -> Iterator[_Batch]:
    """Yield each batch once, which a killed trainer may have written twice, and note what it says of its source."""
    for row in rows:
        batch = row.batch
        source = sources.setdefault(batch.source, _Source())
        if row.stored is not None:
            delay_s = row.stored - batch.sent
            source.delay_s = delay_s if source.delay_s is None else min(source.delay_s, delay_s)
        source.num_dropped = max(source.num_dropped, batch.dropped)
        if batch.number not in source.numbers:
            source.numbers.add(batch.number)
            yield batch


def _named(batches: list[_Batch]) -> Iterator[tuple[_Batch, str]]:
    """Yield the batches with the names of their processes, which say their host where several have one name."""
    hosts: dict[str, set[str]] = {}
    for batch in batches:
        hosts.setdefault(batch.process, set()).add(batch.host)
    for batch in batches:
        yield batch, f"{batch.process} {batch.host}" if len(hosts[batch.process]) > 1 else batch.process
