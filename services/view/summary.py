"""Where a run stands, in a few numbers."""

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

import msgspec

from services.view.alarms import find_alarms
from services.view.run_reader import RunReader

_RECENT: Final = 20
"""Steps whose median time gives the time that is left."""
_GROUPS: Final = ("trained", "stale", "failed", "filtered")


def alarms_of(run: RunReader) -> list[dict[str, Any]]:
    """Return what is wrong with a run."""
    _, rows = run.steps()
    found = find_alarms(rows, is_running=run.is_running, silent_s=time.time() - run.last_change)
    return [msgspec.to_builtins(alarm) for alarm in found]


def summarise(run: RunReader) -> dict[str, Any]:
    """Describe a run: its last step, how long it will take, the last evaluation, and what is wrong."""
    _, rows = run.steps()
    evaluations = run.evaluations()
    last = rows[-1] if rows else {}
    return {
        "name": run.name,
        "folder": str(run.folder),
        "is_running": run.is_running,
        "step": last.get("step", 0),
        "num_steps": last.get("num_steps", 0),
        "elapsed_s": last.get("elapsed_s"),
        "left_s": _left_s(rows) if run.is_running else None,
        "reward": last.get(reward_name(rows)),
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
        "alarms": alarms_of(run),
    }


def reward_name(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the metric of the policy's reward: filters keep the batch's own mean away from 0 and 1."""
    return "reward_mean_played" if any(row.get("num_filtered_groups") for row in rows) else "reward_mean"


def _left_s(rows: Sequence[Mapping[str, Any]]) -> float | None:
    times = [row["step_s"] for row in rows[-_RECENT:] if "step_s" in row]
    if not times:
        return None
    return float(median(times) * (rows[-1].get("num_steps", 0) - rows[-1]["step"]))
