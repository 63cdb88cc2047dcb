"""Where a step waits for messages, calls and pushes, from the trace of a run.

Between one step's samples and the next ones' lie, one after the other: the last group of the batch travels to the
trainer, is computed, the weights are pushed, and the groups that they admit reach engines. All but the computing takes
no time in `perfect_loop`, so these parts say where the loop is slower.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from penstock.records.prompt import GroupId
from services.view.trace_reader import Span, TraceReader


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPath:
    """Medians over steps, in seconds; None where the trace has none."""

    delivered_s: float | None
    """From the end of the last sample of a batch until the trainer computes its group; where it waited for that."""
    pushed_s: float | None
    """From the end of the computing to the end of the push."""
    begun_s: float | None
    """From the admission of a group until an engine has its first sample; waiting for a slot included."""


def step_path(folder: Path, steps: range) -> StepPath:
    """Return the parts of these steps of the run in `folder`."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    spans = TraceReader(folder).read().spans
    played, queued = _of_groups(spans, "route.attempt"), _of_groups(spans, "group.queued")
    busy = _of_steps(spans, "train_s")
    computed = {step: max(end for _, end in laps) for step, laps in busy.items()}
    delivered_s, pushed_s, begun_s = [], [], []
    for row in rows:
        if (step := row["step"]) not in steps or step not in computed:
            continue
        last = max((played[group][1] for group in row["groups"] if group in played), default=math.inf)
        if not any(start < last < end for laps in busy.values() for start, end in laps):
            delivered_s += [start - last for start, _ in busy[step] if start >= last][:1]
        pushed_s += [end - computed[step] for _, end in _of_steps(spans, "push").get(step, ())]
        until = computed.get(step + 1, math.inf)
        following = [group for group, (at, _) in queued.items() if computed[step] <= at < until and group in played]
        begun_s += [played[group][0] - queued[group][0] for group in following]
    return StepPath(delivered_s=_median(delivered_s), pushed_s=_median(pushed_s), begun_s=_median(begun_s))


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _of_steps(spans: Sequence[Span], name: str) -> dict[int, list[tuple[float, float]]]:
    """Return beginning and end of each part of this name of the trainer's steps."""
    found: dict[int, list[tuple[float, float]]] = {}
    for span in spans:
        if span.name == name:
            found.setdefault(span.attributes["step"], []).append((span.start, span.start + span.seconds))
    return found


def _of_groups(spans: Sequence[Span], name: str) -> dict[int, tuple[float, float]]:
    """Return when the first span of this name began and the last one ended, by the group's index."""
    found: dict[int, tuple[float, float]] = {}
    for span in spans:
        if span.name == name:
            start, end = found.get(index := _index(span), (math.inf, -math.inf))
            found[index] = min(start, span.start), max(end, span.start + span.seconds)
    return found


def _index(span: Span) -> int:
    group = GroupId.parse(span.attributes["group"])
    assert group is not None
    return group.index
