"""What engines and other processes do now, from the spans that they sent last. Pure.

A span is written when it ends, so a call that is still running does not count yet, and an engine that has answered
nothing for a while is known only by what it did before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from services.view.trace_reader import Span

WINDOW_S: Final = 60.0
"""Seconds over which loads and rates are measured, once the run is so old."""
MEMORY_S: Final = 180.0
"""Seconds for which a process is remembered after its last span; more would take long to read in a large run."""
_MOST_PUSHES: Final = 20
_OF_ENGINES: Final = ("call", "paused", "push.received")


def fleet_of(
    spans: Sequence[Span],
    rows: Sequence[Mapping[str, Any]],
    *,
    starts: Sequence[Sequence[Span]],
    now: float,
    has_launcher: bool,
) -> dict[str, Any]:
    """Describe the engines, the other processes and the pushes of a run.

    Args:
        spans: All spans of the last `MEMORY_S` seconds before `now`, by start.
        rows: The steps so far.
        starts: The spans of each launcher of the run, in their order.
        now: Seconds since 1970; of a run that has ended, its end.
        has_launcher: Whether the last launcher still works on the run.
    """
    last = rows[-1] if rows else {}
    began = max(now - WINDOW_S, min((span.start for span in spans), default=now))
    return {
        "now": now,
        "window_s": now - began,
        "num_replicas": last.get("num_replicas"),
        "published_version": last["policy_version"] + 1 if "policy_version" in last else None,
        "replicas": [_describe_replica(name, each, began, now) for name, each in sorted(_engines(spans).items())],
        "processes": _processes(spans, starts, now, has_launcher),
        "pushes": _pushes(rows),
    }


@dataclass(slots=True)
class _Engine:
    """The spans of one engine."""

    calls: list[Span] = field(default_factory=list)
    pauses: list[Span] = field(default_factory=list)
    version: int | None = None
    replica: str = ""
    last: float = 0.0


def _engines(spans: Sequence[Span]) -> dict[str, _Engine]:
    replicas = {
        span.attributes.get("request"): span.attributes.get("replica", "")
        for span in spans
        if span.name == "route.attempt"
    }
    found: dict[str, _Engine] = {}
    for span in spans:
        if span.name not in _OF_ENGINES:
            continue
        engine = found.setdefault(span.process, _Engine())
        engine.last = max(engine.last, span.start + span.seconds)
        if span.name == "call":
            engine.calls.append(span)
            engine.replica = replicas.get(span.attributes.get("request")) or engine.replica
        if span.name == "paused":
            engine.pauses.append(span)
        if (version := span.attributes.get("version")) is not None and _is_served(span):
            engine.version = version
    return found


def _is_served(span: Span) -> bool:
    """Return whether the engine served the span's version at its end."""
    if span.name == "paused":
        return span.attributes.get("then") == "READY"
    return span.name == "call"


def _describe_replica(name: str, engine: _Engine, began: float, now: float) -> dict[str, Any]:
    """Describe an engine between `began` and `now`."""
    window_s = max(now - began, 1e-9)
    calls = [span for span in engine.calls if span.start + span.seconds > began]
    waits = [span.attributes["first_token_s"] for span in calls if "first_token_s" in span.attributes]
    return {
        "process": name,
        "replica": engine.replica,
        "version": engine.version,
        "num_calls": len(calls),
        "num_failed_calls": sum("error" in span.attributes for span in calls),
        "mean_running": sum(_overlap(span, began, now) for span in calls) / window_s,
        "output_tokens_per_s": sum(_tokens_in(span, began, now) for span in calls) / window_s,
        "first_token_s": median(waits) if waits else None,
        "paused_s": sum(_overlap(span, began, now) for span in engine.pauses),
        "silent_s": max(0.0, now - engine.last),
    }


def _overlap(span: Span, first: float, last: float) -> float:
    return max(0.0, min(last, span.start + span.seconds) - max(first, span.start))


def _tokens_in(span: Span, first: float, last: float) -> float:
    """Return the span's tokens that were generated between `first` and `last`, as if each had taken the same time."""
    share = _overlap(span, first, last) / span.seconds if span.seconds else 1.0
    return float(span.attributes.get("num_tokens") or 0) * share


def _processes(
    spans: Sequence[Span], starts: Sequence[Sequence[Span]], now: float, has_launcher: bool
) -> list[dict[str, Any]]:
    """Describe every process: those that a launcher started, and others that have sent spans.

    A launcher that was killed has not written how its processes ended: they are lost.
    """
    heard: dict[str, float] = {}
    for span in spans:
        if span.process != "launcher":
            heard[span.process] = max(heard.get(span.process, 0.0), span.start + span.seconds)
    known: dict[str, dict[str, Any]] = {name: {"state": "", "num_starts": None, "exit_code": None} for name in heard}
    for is_last, span in ((each is starts[-1], span) for each in starts for span in each):
        name, number = str(span.attributes.get("service", "")), span.attributes.get("start", 1)
        if span.name == "process.starting":
            state = "up" if has_launcher and is_last else "lost"
            known[name] = {"state": state, "num_starts": number, "exit_code": None}
        elif span.name == "process":
            known[name] = {"state": "ended", "num_starts": number, "exit_code": span.attributes.get("exit_code")}
    return [
        {"process": name, **about, "silent_s": max(0.0, now - heard[name]) if name in heard else None}
        for name, about in sorted(known.items())
    ]


def longest_pause_s(row: Mapping[str, Any]) -> float:
    """Return how long a step's push paused the engine that it paused longest; 0 if it paused none.

    A mean would hide one slow engine among many; of runs of earlier releases only the mean is known.
    """
    return float(row.get("push_pause_max_s", row.get("push_pause_s")) or 0.0)


def _pushes(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the pushes that paused an engine longest, the longest first."""
    pushes = [row for row in rows if row.get("push_s") is not None]
    pushes.sort(key=lambda row: -longest_pause_s(row))
    keys = (
        "push_s", "push_pause_s", "push_pause_max_s", "push_pause_max_replica", "push_bytes", "push_replicas",
        "push_failed_replicas",
    )  # fmt: skip
    return [
        {"step": row["step"], "version": row.get("policy_version", 0) + 1, **{key: row.get(key) for key in keys}}
        for row in pushes[:_MOST_PUSHES]
    ]
