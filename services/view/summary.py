"""Where a run stands: a few numbers, what is wrong, and what its processes do."""

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

import msgspec

from services.view.alarms import Alarm, find_alarms, is_supervised
from services.view.evaluating import answered_at
from services.view.fleet import MEMORY_S, fleet_of
from services.view.run_reader import RunReader

_RECENT: Final = 20
"""Steps whose median time gives the time that is left."""
_GROUPS: Final = ("trained", "stale", "failed", "filtered")


def alarms_of(run: RunReader) -> list[dict[str, Any]]:
    """Return what is wrong with a run."""
    return list(summarise(run)["alarms"])


def describe_run(number: int, run: RunReader) -> dict[str, Any]:
    """Describe a run for the list of runs, in which it has `number`.

    An open page asks for the list again and again, and is drawn again when the list has changed what it shows.
    """
    found = summarise(run)
    return {
        "number": number,
        **{key: found[key] for key in ("name", "folder", "is_running", "step", "num_steps", "left_s")},
        "num_alarms": len(found["alarms"]),
        "alarm_kinds": [alarm["kind"] for alarm in found["alarms"]],
        "num_evaluations": len(run.evaluations()),
        "kept_bytes": run.kept_bytes,
    }


def fleet_now(run: RunReader) -> dict[str, Any]:
    """Describe what the processes of a run do; of a run that has ended, what they did at its end."""
    _, rows = run.steps()
    now, is_running = time.time(), run.is_running
    if not is_running:
        trained = max((start + length for step in run.trace()[-1:] for _, start, length in step["spans"]), default=now)
        evaluated = (span.start + span.seconds for span in run.spans(trained, now) if span.name == "evaluation")
        now = max(evaluated, default=trained)
    spans = sorted(run.spans(now - MEMORY_S, now), key=lambda span: span.start)
    return fleet_of(spans, rows, starts=run.starts(), now=now, has_launcher=run.has_launcher)


def summarise(run: RunReader) -> dict[str, Any]:
    """Describe a run: its last step, how long it will take, the last evaluation, and what is wrong."""
    _, rows = run.steps()
    is_running = run.is_running
    evaluations = run.evaluations()
    answered = answered_at(run.folder, rows, evaluations) if is_running else None
    return {
        "name": run.name,
        "folder": str(run.folder),
        **status_of(
            rows,
            evaluations,
            step_alarms=run.step_alarms(),
            is_running=is_running,
            silent_s=time.time() - max(run.last_change, answered or 0.0),
            is_evaluating=answered is not None,
            is_validating=is_running and is_supervised(rows) and _is_validated_after(rows[-1]["step"], run.settings()),
            has_stepped=run.has_stepped,
        ),
    }


def status_of(
    rows: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    *,
    step_alarms: Sequence[Alarm] | None = None,
    is_running: bool,
    silent_s: float,
    is_evaluating: bool = False,
    is_validating: bool = False,
    has_stepped: bool = True,
) -> dict[str, Any]:
    """Return where a run stands; `penstock train` and `penstock status` print these numbers.

    Args:
        rows: The steps so far.
        evaluations: The evaluations so far.
        step_alarms: What the steps alone show to be wrong, where that is known.
        is_running: Whether the run goes on.
        silent_s: Seconds since the last step or evaluation, or the last sign of the present evaluation or validation.
        is_evaluating: Whether an evaluation is being played that the run may wait for.
        is_validating: Whether supervised training is validated between the last step and the next one.
        has_stepped: Whether one of the steps was taken since the run was started, or started again.
    """
    last = rows[-1] if rows else {}
    alarms = find_alarms(
        rows,
        step_alarms=step_alarms,
        is_running=is_running,
        silent_s=silent_s,
        is_evaluating=is_evaluating,
        is_validating=is_validating,
        has_stepped=has_stepped,
    )
    return {
        "is_running": is_running,
        "step": last.get("step", 0),
        "num_steps": last.get("num_steps", 0),
        "elapsed_s": last.get("elapsed_s"),
        "left_s": _left_s(rows) if is_running else None,
        "reward": reward_of(last) if "reward_mean" in last else None,
        **{
            name: last.get(name)
            for name in (
                "staleness_mean",
                "staleness_max",
                "max_staleness",
                "trainer_idle_fraction",
                "output_tokens_per_s",
                "num_replicas",
                "dlogp_mean_current",
            )
        },
        "groups": {kind: last.get(f"num_{kind}_groups") for kind in _GROUPS},
        "evaluation": evaluations[-1] if evaluations else None,
        "alarms": [msgspec.to_builtins(alarm) for alarm in alarms],
    }


def _is_validated_after(step: int, settings: Mapping[str, Any]) -> bool:
    every: int = settings.get("sft.validate_every", 0)
    return every > 0 and step % every == 0


def reward_of(row: Mapping[str, Any]) -> float:
    """Return the policy's reward at a step: the mean over all played groups, if a filter drops some from the batch."""
    key = "reward_mean_played" if row.get("num_filtered_groups") and "reward_mean_played" in row else "reward_mean"
    return float(row[key])


def _left_s(rows: Sequence[Mapping[str, Any]]) -> float | None:
    times = [row["step_s"] for row in rows[-_RECENT:] if "step_s" in row]
    if not times:
        return None
    return float(median(times) * (rows[-1].get("num_steps", 0) - rows[-1]["step"]))
