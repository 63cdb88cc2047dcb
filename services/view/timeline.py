"""The spans that the timeline draws, each with the kept sample that it belongs to."""

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappush, heappushpop
from typing import Any, Final

from services.view.trace_reader import Span

_DRAWN: Final = (
    "call", "paused", "group.played", "episode", "tool", "route.queued", "judged", "verify", "group.queued",
    "group.held", "checkpoint", "evaluation", "process.starting", "session.call", "environment.call", "push.received",
)  # fmt: skip
_DRAWN_IF_FAILED: Final = ("push.stage",)
"""An engine's own spans show the same, unless it is dead or hangs."""
MOST_DRAWN: Final = 20_000
"""Spans drawn at once; of more, the longest."""
_SHORTEST_S: Final = 0.001
_KEPT: Final = (
    "replica", "turn", "num_tokens", "num_samples", "mean_reward", "first_token_s", "queued_s", "prefill_s", "version",
    "environment", "service", "stage", "error",
)  # fmt: skip


def timeline_of(spans: Iterable[Span], index: Sequence[Mapping[str, Any]], *, most: int = MOST_DRAWN) -> dict[str, Any]:
    """Return the spans for the timeline, and how many were left out for their number.

    Args:
        spans: All spans of a time; no more of them than are returned are kept.
        index: The index of kept groups.
        most: Spans to return at most; of more, the longest.
    """
    longest: list[tuple[float, int, Span]] = []  # a heap; of equally long ones the first
    num_all = 0
    for span in spans:
        if not _is_drawn(span) or span.seconds < _SHORTEST_S:
            continue
        num_all += 1
        put = heappush if len(longest) < most else heappushpop
        put(longest, (span.seconds, -num_all, span))
    drawn = [span for _, _, span in sorted(longest, key=lambda entry: (entry[2].start, -entry[1]))]
    numbers = {(entry["group"], entry["attempt"]): entry["number"] for entry in index}
    return {"num_left_out": num_all - len(drawn), "spans": [_describe(span, numbers) for span in drawn]}


def _is_drawn(span: Span) -> bool:
    return span.name in _DRAWN or (span.name in _DRAWN_IF_FAILED and bool(span.attributes.get("error")))


def _describe(span: Span, numbers: Mapping[tuple[str, int], int]) -> dict[str, Any]:
    group, sample = sample_of(span)
    return {
        "process": span.process,
        "name": span.name,
        "start": span.start,
        "length": span.seconds,
        "group": None if group is None else int(group[0].rpartition("/")[2]),
        "sample": sample,
        "number": None if group is None else numbers.get(group),
        **{key: span.attributes[key] for key in _KEPT if key in span.attributes},
    }


def sample_of(span: Span) -> tuple[tuple[str, int] | None, int | None]:
    """Return the span's group and its attempt, and the number of its sample; None where it has none.

    A call's request is the group, sample, turn and a random end; see docs/operation/tracing.md.
    """
    group = str(span.attributes.get("group", ""))
    words = group.split("/")
    if len(words) != 4 or not (words[1].isdecimal() and words[2].isdecimal()):
        return None, None
    sample = span.attributes.get("sample")
    request = str(span.attributes.get("request", ""))
    if sample is None and request.startswith(f"{group}/"):
        number = request[len(group) + 1 :].partition("/")[0]
        sample = int(number) if number.isdecimal() else None
    return (f"{words[0]}/{words[1]}", int(words[2])), sample if isinstance(sample, int) else None
