"""Says on a terminal where a run stands: the same numbers while it trains as in `penstock status`. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.launch.metrics import StepRow, describe_score, describe_waits, sparkline
from services.view.summary import reward_of

_MOST_SETS: Final = 3
"""Evaluation sets with a line of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line: what, how much, and what else there is to say."""

    label: str
    value: str
    note: str = ""


def describe_status(found: Mapping[str, Any], rows: Sequence[StepRow], *, width: int) -> list[Line]:
    """Return the lines about a run, the most important ones first, without its alarms.

    Args:
        found: Where it stands, as `services.view.summary.status_of` returns it.
        rows: The steps so far.
        width: Characters of a sparkline.
    """
    last = rows[-1] if rows else {}
    return [
        Line(label="step", value=f"{found['step']}/{found['num_steps'] or '?'}", note=_describe_time(found)),
        *_course(rows, width),
        *_evaluation(found["evaluation"]),
        *_flow(found, last),
        *_exchange(last),
        *_groups(found, last),
    ]


def describe_alarm(alarm: Mapping[str, Any]) -> str:
    """Describe an alarm with its remedy in one line."""
    return f"{alarm['kind']} at step {alarm['step']}: {alarm['text']}; {alarm['remedy']}"


def describe_duration(seconds: float) -> str:
    """Describe a time as people say it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def describe_left(found: Mapping[str, Any]) -> str:
    """Describe how long the run will take; empty if that is not known."""
    return f"about {describe_duration(found['left_s'])} left" if found["left_s"] else ""


def _describe_time(found: Mapping[str, Any]) -> str:
    elapsed = "" if found["elapsed_s"] is None else f"after {describe_duration(found['elapsed_s'])}"
    return ", ".join(filter(None, (elapsed, describe_left(found))))


def _course(rows: Sequence[StepRow], width: int) -> Iterator[Line]:
    if rewards := [reward_of(row) for row in rows if "reward_mean" in row]:
        yield Line(label="reward", value=f"{rewards[-1]:.3f}", note=sparkline(rewards, width=width))
    elif losses := [row["loss"] for row in rows if "loss" in row]:
        yield Line(label="loss", value=f"{losses[-1]:.4f}", note=sparkline(losses, width=width))


def _evaluation(evaluation: Mapping[str, Any] | None) -> Iterator[Line]:
    if evaluation is None:
        return
    sets = list(evaluation["sets"].items())
    for number, (name, each) in enumerate(sets[:_MOST_SETS]):
        more = len(sets) - _MOST_SETS if number == _MOST_SETS - 1 else 0
        note = f"evaluation of step {evaluation['step']}" + (f", {more} more sets" if more > 0 else "")
        yield Line(label=name, value=describe_score(each["score"]), note=note)


def _flow(found: Mapping[str, Any], last: StepRow) -> Iterator[Line]:
    if found["staleness_mean"] is not None:
        bound = "?" if found["max_staleness"] is None else found["max_staleness"]
        note = f"versions; at most {found['staleness_max'] or 0:g}, {bound} allowed"
        yield Line(label="staleness", value=f"{found['staleness_mean']:.2f}", note=note)
    if found["trainer_idle_fraction"] is not None:
        note = f"of {last.get('step_s', 0.0):.1f} s; {describe_waits(last)}"
        yield Line(label="idle", value=f"{found['trainer_idle_fraction']:.0%}", note=note)
    if found["output_tokens_per_s"] is not None:
        yield Line(label="throughput", value=f"{found['output_tokens_per_s']:,.0f}", note="tokens/s")
    elif "trained_tokens_per_s" in last:
        note = "tokens/s, those that are only read included"
        yield Line(label="throughput", value=f"{last['trained_tokens_per_s']:,.0f}", note=note)
    if found["num_replicas"] is not None:
        yield Line(label="replicas", value=f"{found['num_replicas']:g}")


def _exchange(last: StepRow) -> Iterator[Line]:
    if "push_s" in last:
        missed = f", {last['push_failed_replicas']} missed it" if last.get("push_failed_replicas") else ""
        note = f"version {last.get('policy_version', 0) + 1} to {last.get('push_replicas', '-')} replicas{missed}"
        yield Line(label="push", value=f"{last['push_s']:.2f} s", note=note)
    if "dlogp_mean" in last:
        note = f"max {last.get('dlogp_max', 0):.1e}, trainer against engine"
        yield Line(label="|dlogp|", value=f"{last['dlogp_mean']:.1e}", note=note)


def _groups(found: Mapping[str, Any], last: StepRow) -> Iterator[Line]:
    counts = {kind: count for kind, count in found["groups"].items() if count is not None}
    if not counts:
        return
    others = ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if kind != "trained")
    share = last.get("filtered_group_fraction")
    now = f"; {share:.0%} of those that arrived for the last step were filtered" if share else ""
    yield Line(label="groups", value=f"{counts.get('trained', 0):,}", note=f"trained, {others}{now}")
