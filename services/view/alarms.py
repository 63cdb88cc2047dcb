"""What is wrong with a run, from its steps: each alarm with the remedy. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Final

Row = Mapping[str, Any]

_RECENT: Final = 5
"""Steps that must agree before an alarm about a share is raised, so that one odd batch raises none."""
_LONG_S: Final = 1800.0
"""Seconds of silence that are too long where no usual step says what is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One thing that is wrong."""

    kind: str
    """Name, for programs."""
    step: int
    """The last step that shows it."""
    text: str
    remedy: str


def find_step_alarms(rows: Sequence[Row]) -> list[Alarm]:
    """Return what the steps alone show to be wrong. It looks at all of them, which takes long for a long run."""
    return [alarm for rule in _RULES if rows and (alarm := rule(rows)) is not None]


def find_alarms(
    rows: Sequence[Row],
    *,
    step_alarms: Sequence[Alarm] | None = None,
    is_running: bool = False,
    silent_s: float = 0.0,
    is_evaluating: bool = False,
    is_validating: bool = False,
    has_stepped: bool = True,
) -> list[Alarm]:
    """Return what is wrong now, and what was wrong at any step and cannot be undone.

    Args:
        rows: The steps so far.
        step_alarms: What `find_step_alarms` found in these steps; None: it is called.
        is_running: Whether the run goes on.
        silent_s: Seconds since the last step or evaluation, or the last sign of the present evaluation or validation.
        is_evaluating: Whether an evaluation is being played that the run may wait for.
        is_validating: Whether supervised training is validated between the last step and the next one.
        has_stepped: Whether one of the steps was taken since the run was started, or started again.
    """
    found = find_step_alarms(rows) if step_alarms is None else list(step_alarms)
    if not is_running:
        return found
    stuck = _stuck(rows, silent_s, is_evaluating=is_evaluating, is_validating=is_validating, has_stepped=has_stepped)
    return found if stuck is None else [stuck, *found]


def _stuck(
    rows: Sequence[Row], silent_s: float, *, is_evaluating: bool, is_validating: bool, has_stepped: bool
) -> Alarm | None:
    last: Row = rows[-1] if rows else {"step": 0}
    limit_s = _LONG_S
    if is_evaluating:
        text = f"no step, and no answer in the running evaluation, for {silent_s:.0f} s"
    elif not rows:
        text = f"no first step, and no sign of what comes before it, for {silent_s:.0f} s"
    elif last["step"] >= last.get("num_steps", float("inf")):
        text = f"the last step is done, and for {silent_s:.0f} s the run has not ended"
    elif not has_stepped:  # a large model loads for as long as it did at first
        text = f"no step for {silent_s:.0f} s since the run was started again"
    elif is_validating:
        text = f"no step, and no progress of the validation before it, for {silent_s:.0f} s"
    else:
        usual_s = median(row.get("step_s", 0.0) for row in rows[-50:])
        limit_s = max(120.0, 10 * usual_s)
        text = f"no step for {silent_s:.0f} s; a step usually takes {usual_s:.1f} s"
    if silent_s < limit_s:
        return None
    return Alarm(
        kind="stuck",
        step=last["step"],
        text=text,
        remedy=(
            "look at logs/launcher.log"
            if is_supervised(rows)
            else "look at the trainer's log, and at the replicas with `penstock replicas`"
        ),
    )


def is_supervised(rows: Sequence[Row]) -> bool:
    """Return whether the steps are those of supervised training, which has no policy; false before the first one."""
    return bool(rows) and "policy_version" not in rows[-1]


def _not_finite(rows: Sequence[Row]) -> Alarm | None:
    skipped = [row["step"] for row in rows if row.get("skipped")]
    if not skipped:
        return None
    return Alarm(
        kind="skipped",
        step=skipped[-1],
        text=f"{len(skipped)} steps changed no weights because loss or gradient was not finite or rejected",
        remedy="lower trainer.optimizer.learning_rate, and look at the samples of these steps",
    )


def _no_gradient(rows: Sequence[Row]) -> Alarm | None:
    row = rows[-1]
    streak = row.get("num_steps_without_gradient", 0)
    if streak < 2 * _RECENT:
        return None
    return Alarm(
        kind="no gradient",
        step=row["step"],
        text=f"{streak:g} steps in a row without policy gradient",
        remedy="prompts are too easy or too hard: use data.pools or filters; or all tokens are rejected: they are "
        "dotted on the Group page",
    )


def _unjudged(rows: Sequence[Row]) -> Alarm | None:
    return _share(
        rows,
        "unjudged",
        lambda row: row.get("num_unjudged_samples", 0) / max(1, row.get("num_samples", 1)),
        0.05,
        "of samples have no verdict",
        "see error and status of such samples; the reward service may be overloaded (logs/reward.log)",
    )


def _no_spread(rows: Sequence[Row]) -> Alarm | None:
    return _share(
        rows,
        "no spread",
        lambda row: row.get("zero_std_fraction", 0.0),
        0.9,
        "of groups have equal rewards and teach nothing",
        "prompts are too easy or too hard for the policy: use data.pools, filters.zero_variance or other data",
    )


def _truncated(rows: Sequence[Row]) -> Alarm | None:
    return _share(
        rows,
        "truncated",
        lambda row: row.get("truncated_fraction", 0.0),
        0.3,
        "of samples end at sampling.max_new_tokens",
        "raise sampling.max_new_tokens, or add algorithm.advantage.length_penalty",
    )


def _idle(rows: Sequence[Row]) -> Alarm | None:
    return _share(
        rows,
        "trainer idle",
        lambda row: row.get("trainer_idle_fraction", 0.0),
        0.5,
        "of the time the trainer waits",
        "add replicas, or raise trainer.max_staleness; the timeline shows what it waits for",
    )


def _diverged(rows: Sequence[Row]) -> Alarm | None:
    values = [(row["step"], row["dlogp_mean_current"]) for row in rows if row.get("dlogp_mean_current") is not None]
    if len(values) < 2 * _RECENT:
        return None
    usual = median(value for _, value in values[:-_RECENT])
    step, last = values[-1][0], median(value for _, value in values[-_RECENT:])
    if last < max(10 * usual, 1e-3):
        return None
    return Alarm(
        kind="dlogp",
        step=step,
        text=f"trainer and engine differ by {last:.1e} nats a token, {last / usual if usual else 0:.0f} times as usual",
        remedy="the weights that engines serve may not be the trainer's: see pushes in the timeline, and dtype",
    )


def _pushes(rows: Sequence[Row]) -> Alarm | None:
    failed = [row["step"] for row in rows if row.get("push_failed_replicas")]
    if not failed or rows[-1]["step"] - failed[-1] > 2 * _RECENT:
        return None
    return Alarm(
        kind="push",
        step=failed[-1],
        text=f"{len(failed)} pushes did not reach all replicas",
        remedy="see logs/rollout-*.log for weights.* events; replicas that miss a push join the next one",
    )


def _growth(rows: Sequence[Row], kind: str, key: str, what: str, remedy: str) -> Alarm | None:
    before = rows[-_RECENT - 1].get(key, 0) if len(rows) > _RECENT else 0
    grown = rows[-1].get(key, 0) - before
    if grown <= 0:
        return None
    text = f"{grown:g} {what} in the last {min(len(rows), _RECENT)} steps, {rows[-1][key]:g} in all"
    return Alarm(kind=kind, step=rows[-1]["step"], text=text, remedy=remedy)


def _failed(rows: Sequence[Row]) -> Alarm | None:
    remedy = "the samples page lists failed groups with their reasons; `penstock bus` shows dead letters"
    return _growth(rows, "failed groups", "num_failed_groups", "groups failed", remedy)


def _stale(rows: Sequence[Row]) -> Alarm | None:
    remedy = "long answers are lost most: raise trainer.max_staleness, or add replicas"
    return _growth(rows, "stale groups", "num_stale_groups", "groups were stale and are sampled again", remedy)


def _not_kept(rows: Sequence[Row]) -> Alarm | None:
    remedy = "the disk is full or too slow for episodes.keep = 'all'; see episodes.not_kept in the trainer's log"
    return _growth(rows, "not kept", "num_episodes_dropped", "groups were not kept for reading", remedy)


def _died(rows: Sequence[Row]) -> Alarm | None:
    before = [{}, *rows]
    starts = [
        later["step"]
        for row, later in pairwise(before)
        if later.get("trainer_deaths", 0) > row.get("trainer_deaths", 0)
    ]
    if not starts:
        return None
    steps = ", ".join(map(str, starts[-3:]))
    return Alarm(
        kind="restarts",
        step=starts[-1],
        text=f"the trainer died {rows[-1]['trainer_deaths']} times; it went on with step {steps}",
        remedy="logs/ keeps the log of the process before; `penstock train` says why it ended",
    )


def _share(
    rows: Sequence[Row], kind: str, value: Callable[[Row], float], limit: float, what: str, remedy: str
) -> Alarm | None:
    """Return an alarm if the last steps agree that a share is above its limit."""
    recent = [value(row) for row in rows[-_RECENT:]]
    if len(recent) < _RECENT or min(recent) <= limit:
        return None
    return Alarm(kind=kind, step=rows[-1]["step"], text=f"{median(recent):.0%} {what}", remedy=remedy)


_RULES: Final[Sequence[Callable[[Sequence[Row]], Alarm | None]]] = (
    _not_finite,
    _no_gradient,
    _diverged,
    _unjudged,
    _failed,
    _stale,
    _no_spread,
    _truncated,
    _pushes,
    _idle,
    _not_kept,
    _died,
)
