"""What this process measures for Prometheus, and the page that shows it.

Counters and histograms are the process's own, created once at import. A reading is a value that a service has anyway:
its source is read when the page is requested. Every metric is declared here, so that docs/operation/prometheus.md
can be compared with them.

Invariant: a label takes few values, which the code or the recipe knows: never an id of a request, group or replica, and
nothing that a caller chose.
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal, TypeAlias, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
"""Buckets for durations from a call's milliseconds to a long turn."""

LabelsT = TypeVar("LabelsT", bound=tuple[str, ...])
Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Source: TypeAlias = Callable[[], Awaitable[Iterable[Metric]]]
"""Returns readings; it must not fail, and answer within a second or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One metric of a process."""

    name: str
    """As on the page; counters end in _total."""
    kind: Kind
    text: str
    """One sentence."""
    labels: tuple[str, ...]


class Reading:
    """A metric that is read when the page is asked for."""

    def __init__(self, declaration: Declaration) -> None:
        """Use `reading`."""
        self._declaration = declaration

    def of(self, value: float) -> Metric:
        """Return the metric, which has no labels, with this value."""
        return self.by({(): value})

    def by(self, values: Mapping[LabelsT, float]) -> Metric:
        """Return the metric with a value for each combination of its labels."""
        declared = self._declaration
        make = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
        family = make(declared.name, declared.text, labels=declared.labels)
        for labels, value in values.items():
            family.add_metric(labels, value)
        return family


disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the series, and process_start_time_seconds says the same
_REGISTRY = CollectorRegistry(auto_describe=False)
ProcessCollector(registry=_REGISTRY)
_DECLARED: dict[str, Declaration] = {}
_SOURCES: list[Source] = []


def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
    """Create a counter of this process; its name ends in _total."""
    _declare(name, "counter", text, labels)
    return Counter(name, text, labels, registry=_REGISTRY)


def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
    """Create a gauge of this process."""
    _declare(name, "gauge", text, labels)
    return Gauge(name, text, labels, registry=_REGISTRY)


def histogram(name: str, text: str, labels: Sequence[str] = (), *, buckets: Sequence[float] = SECONDS) -> Histogram:
    """Create a histogram of this process."""
    _declare(name, "histogram", text, labels)
    return Histogram(name, text, labels, buckets=buckets, registry=_REGISTRY)


def reading(
    name: str, text: str, labels: Sequence[str] = (), *, kind: Literal["counter", "gauge"] = "gauge"
) -> Reading:
    """Declare a metric whose values come from a source."""
    return Reading(_declare(name, kind, text, labels))


def declared() -> list[Declaration]:
    """Return the metrics of all modules that are imported, by name."""
    return [_DECLARED[name] for name in sorted(_DECLARED)]


@contextlib.contextmanager
def exposed(source: Source) -> Iterator[None]:
    """Show the readings of `source` on the page during the context."""
    _SOURCES.append(source)
    try:
        yield
    finally:
        _SOURCES.remove(source)


async def page() -> bytes:
    """Return all metrics in Prometheus' text format."""
    families = [*_REGISTRY.collect(), *_process.readings()]
    for source in tuple(_SOURCES):
        families += await source()
    return generate_latest(_Families(families))


class _Families(CollectorRegistry):
    """Metrics that were collected already."""

    def __init__(self, families: Sequence[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


@dataclass(slots=True)
class _Process:
    service: str = ""
    name: str = ""
    run: str = ""
    version: str = ""

    def readings(self) -> Iterator[Metric]:
        if self.service:
            yield _INFO.by({(self.service, self.name, self.run, self.version): 1.0})


def name_process(*, service: str, name: str, run: str) -> None:
    """Say what this process is: its service, its name among the run's processes, and its run."""
    _process.service, _process.name, _process.run, _process.version = service, name, run, version("penstock")


def process_labels() -> dict[str, str]:
    """Return what `name_process` said, as labels of a scrape."""
    return {"service": _process.service, "instance": _process.name}


def _declare(name: str, kind: Kind, text: str, labels: Sequence[str]) -> Declaration:
    if name in _DECLARED:
        raise ValueError(f"metric {name} is declared twice")
    if (kind == "counter") != name.endswith("_total"):
        raise ValueError(f"metric {name}: names of counters, and no others, end in _total")
    _DECLARED[name] = Declaration(name=name, kind=kind, text=text, labels=tuple(labels))
    return _DECLARED[name]


_INFO = reading(
    "penstock_process_info",
    "Always 1; the labels say what the process is.",
    ("service", "name", "run", "version"),
)
_process = _Process()
