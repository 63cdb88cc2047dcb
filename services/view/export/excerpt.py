"""Takes from a run what fits into an exported page, and says what it leaves out."""

import base64
import math
import mimetypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from services.view.export.group_choice import order_of_groups
from services.view.fleet import longest_pause_s
from services.view.run_reader import NotThereError, RunReader, without_groups
from services.view.summary import alarms_of, describe_run, fleet_now
from services.view.timeline import timeline_of
from services.view.trace_reader import Loss

MAX_ROWS: Final = 2_000
"""Steps in a page; of more, every second, third and so on."""
MAX_GROUPS: Final = 1_000
_TIMED_STEPS: Final = 12
"""Last steps with a timeline: as many as its page shows at first."""
_MAX_SPANS: Final = 4_000
_SPAN_BYTES: Final = 256
"""Of a span in a page, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """The part of a run that is in a page."""

    data: dict[str, Any]
    """As `static/exported.js` reads it."""
    left_out: list[str]
    """What is not in it, for people."""


def excerpt_of(number: int, run: RunReader, *, max_bytes: int) -> Excerpt:
    """Return the part of `run`, which has this number in the page, that fits into about `max_bytes`.

    Steps, evaluations, settings, alarms and the last steps' timeline come first, kept groups fill what is left. Steps
    take about a half at most, and spans of the timeline about a quarter.
    """
    _, rows = run.steps()
    index = run.episodes()
    num_steps, steps = _steps(rows, max_bytes=max_bytes // 2)
    trace, timed = _timed_steps(run, rows)
    data: dict[str, Any] = {
        "about": describe_run(number, run),
        "steps": steps,
        "evaluations": run.evaluations(),
        "settings": run.settings(),
        "alarms": alarms_of(run),
        "fleet": fleet_now(run),
        "trace": trace,
        "num_kept": len(index),
    }
    stretches = list(_stretches(trace, last_step=rows[-1]["step"] if rows else 0))
    spans, losses, num_short = _spans(run, index, stretches, most=min(_MAX_SPANS, max_bytes // 4 // _SPAN_BYTES))
    used = len(msgspec.json.encode([data, spans, losses]))
    groups, images = _groups(run, index, max_bytes=max_bytes - used)
    for span in spans:
        if span["number"] not in groups:
            span["number"] = None
    data |= {
        "processes": spans,
        "losses": losses,
        "index": [entry for entry in index if entry["number"] in groups],
        "episodes": {str(number): msgspec.Raw(groups[number]) for number in groups},
        "images": images,
    }
    left_out = []
    if num_steps < len(rows):
        left_out.append(f"{len(rows) - num_steps:,} of {len(rows):,} steps")
    if len(groups) < len(index):
        left_out.append(f"{len(index) - len(groups):,} of {len(index):,} kept groups")
    if rows and len(timed) < len(rows):
        left_out.append(f"the timeline but of steps {_ranges(timed)}" if timed else "the timeline")
    if num_short:
        left_out.append(f"{num_short:,} short spans of the timeline")
    return Excerpt(data=data, left_out=left_out)


def _steps(rows: Sequence[dict[str, Any]], *, max_bytes: int) -> tuple[int, dict[str, list[Any]]]:
    """Return how many steps fit into `max_bytes`, at equal distances up to the last, and these as columns."""
    stride = max(1, -(-len(rows) // MAX_ROWS))
    while True:
        kept = rows[::-1][::stride][::-1]
        columns = _columns([without_groups(row) for row in kept])
        size = len(msgspec.json.encode(columns))
        if size <= max_bytes or len(kept) == 1:
            return len(kept), columns
        stride = max(stride + 1, stride * size // max_bytes)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the rows as one list a metric, which is much shorter; null where a row has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _timed_steps(run: RunReader, rows: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the parts and the numbers of the last steps, and of the one whose push paused an engine longest."""
    chosen = {row["step"] for row in rows[-_TIMED_STEPS:]}
    pauses = [(longest_pause_s(row), row["step"]) for row in rows if row.get("push_s") is not None]
    if pauses:
        chosen.add(max(pauses)[1])
    trace = [step for step in run.trace() if step["step"] in chosen]
    return trace, [step["step"] for step in trace]


def _spans(
    run: RunReader, index: Sequence[Mapping[str, Any]], stretches: Sequence[tuple[float, float]], *, most: int
) -> tuple[list[dict[str, Any]], list[Loss], int]:
    """Return at most `most` spans of what processes did in these times, what the run lost, and how many were left
    out."""
    found: list[dict[str, Any]] = []
    losses: dict[Loss, None] = {}
    num_left_out = 0
    for num_others, (first, last) in zip(range(len(stretches))[::-1], reversed(stretches), strict=True):
        stream = run.spans(first, last)
        spans = (span for span in stream if last < math.inf or span.start > first)
        drawn = timeline_of(spans, index, most=(most - len(found)) // (num_others + 1))
        found += drawn["spans"]
        losses |= dict.fromkeys(stream.losses())
        num_left_out += drawn["num_left_out"]
    return sorted(found, key=lambda span: span["start"]), list(losses), num_left_out


def _stretches(trace: Sequence[Mapping[str, Any]], *, last_step: int) -> Iterator[tuple[float, float]]:
    """Yield begin and end of each row of consecutive steps, and of what began after the run's last step."""
    stretch: list[Mapping[str, Any]] = []
    for step in [*trace, None]:
        if stretch and (step is None or step["step"] != stretch[-1]["step"] + 1):
            times = [(start, start + length) for each in stretch for _, start, length in each["spans"]]
            if times:
                last = max(end for _, end in times)
                yield min(start for start, _ in times), last
                if stretch[-1]["step"] == last_step:
                    yield last, math.inf
            stretch = []
        if step is not None:
            stretch.append(step)


def _groups(
    run: RunReader, index: Sequence[Mapping[str, Any]], *, max_bytes: int
) -> tuple[dict[int, bytes], dict[str, str]]:
    """Return descriptions of kept groups by their numbers in the index, and their pictures as data URLs by name."""
    groups: dict[int, bytes] = {}
    images: dict[str, str] = {}
    for place in order_of_groups(index):
        if len(groups) == MAX_GROUPS:
            break
        entry = index[place]
        size = entry["size"] + len(msgspec.json.encode(entry))
        if size > max_bytes:
            continue
        try:
            whole = run.episode(entry["number"])
        except NotThereError:
            continue
        new = {name: url for name in _images(whole) if name not in images and (url := _data_url(run, name))}
        size += sum(map(len, new.values()))
        if size <= max_bytes:
            max_bytes -= size
            groups[entry["number"]] = whole.rstrip()
            images |= new
    return groups, images


def _images(whole: bytes) -> list[str]:
    group = msgspec.json.decode(whole)
    found = [
        *group["images"],
        *(name for each in group["samples"] for one in each["sequences"] for name in one["images"]),
    ]
    return [name for name in dict.fromkeys(found) if name]


def _data_url(run: RunReader, name: str) -> str:
    """Return a picture as a data URL; empty if it is not kept."""
    try:
        data = run.image(name)
    except NotThereError:
        return ""
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _ranges(steps: Sequence[int]) -> str:
    """Return ascending numbers as people write them: 5, 9 to 12."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in found)
