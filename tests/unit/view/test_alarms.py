"""What is called wrong with a run."""

import fcntl
import json
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from services.view.alarms import find_alarms
from services.view.run_reader import RunReader
from services.view.summary import summarise
from tests.support.view_runs import make_run, step_row, write_rows


def rows(num: int = 20, **last: Any) -> list[dict[str, Any]]:
    """Steps of a healthy run, of which the last five are as given."""
    return [step_row(step, **(last if step > num - 5 else {})) for step in range(1, num + 1)]


def test_a_healthy_run_has_no_alarm() -> None:
    """Nor has one that has not begun."""
    assert find_alarms(rows(), is_running=True, silent_s=5.0) == []
    assert find_alarms([], is_running=True, silent_s=500.0) == []


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        ("skipped", {"skipped": 1.0}),
        ("no gradient", {"num_steps_without_gradient": 12.0}),
        ("unjudged", {"num_unjudged_samples": 4}),
        ("no spread", {"zero_std_fraction": 0.95}),
        ("truncated", {"truncated_fraction": 0.5}),
        ("trainer idle", {"trainer_idle_fraction": 0.8}),
        ("dlogp", {"dlogp_mean_current": 0.02}),
        ("push", {"push_failed_replicas": 1}),
        ("failed groups", {"num_failed_groups": 3}),
        ("stale groups", {"num_stale_groups": 3}),
        ("not kept", {"num_episodes_dropped": 2}),
        ("restarts", {"trainer_start": 2, "trainer_deaths": 1}),
    ],
)
def test_each_fault_is_an_alarm_of_its_own(kind: str, last: dict[str, Any]) -> None:
    """With the last step that shows it, and a remedy."""
    (alarm,) = find_alarms(rows(**last))
    assert alarm.kind == kind
    assert 16 <= alarm.step <= 20
    assert alarm.remedy


def test_one_odd_batch_is_no_alarm() -> None:
    """Shares must be wrong in five steps in a row."""
    odd = [*rows()[:-1], step_row(20, zero_std_fraction=1.0, truncated_fraction=1.0, trainer_idle_fraction=1.0)]
    assert find_alarms(odd) == []


def test_a_run_that_was_started_again_may_load_for_as_long_as_at_first(tmp_path: Path) -> None:
    """Its steps of before say nothing about that. They say when they were taken; the file is cut at the start."""
    assert find_alarms(rows(), is_running=True, silent_s=1700.0, has_stepped=False) == []
    (alarm,) = find_alarms(rows(), is_running=True, silent_s=1900.0, has_stepped=False)
    assert alarm.text == "no step for 1900 s since the run was started again"
    run = make_run(tmp_path)
    os.utime(run / "config.toml", (1_000_000_000,) * 2)
    for stepped_at, has_stepped in ((999_999_900, False), (1_000_000_100, True)):
        when = datetime.fromtimestamp(stepped_at, UTC).isoformat()
        (run / "metrics.jsonl").write_text(json.dumps(step_row(30, time=when)) + "\n")
        assert RunReader(run).has_stepped is has_stepped


def test_a_step_that_does_not_come_is_an_alarm_while_the_run_goes_on() -> None:
    """Ten times as long as usual, and at least two minutes."""
    [alarm] = find_alarms(rows(), is_running=True, silent_s=121.0)
    assert (alarm.kind, alarm.remedy) == (
        "stuck",
        "look at the trainer's log, and at the replicas with `penstock replicas`",  # in containers it is no file
    )
    assert find_alarms(rows(), is_running=False, silent_s=1e6) == []
    slow = rows(step_s=60.0)
    assert find_alarms(slow[-5:], is_running=True, silent_s=500.0) == []
    assert find_alarms(slow[-5:], is_running=True, silent_s=601.0) != []


def test_a_first_step_has_half_an_hour() -> None:
    """A large model takes long to load, and nothing says yet how long a step takes."""
    assert find_alarms([], is_running=True, silent_s=1799.0) == []
    (alarm,) = find_alarms([], is_running=True, silent_s=1801.0)
    assert (alarm.kind, alarm.step, alarm.text) == (
        "stuck",
        0,
        "no first step, and no sign of what comes before it, for 1801 s",
    )


def test_an_evaluation_that_holds_up_steps_is_no_alarm(tmp_path: Path) -> None:
    """Before the next step or after the last one, while answers come; nor is the time between its end and that step."""
    run = make_run(tmp_path / "run", num_steps=30)
    began = time.time() - 3600
    samples = run / "evaluations" / "step-000030" / "samples.jsonl"
    samples.parent.mkdir(parents=True)
    samples.touch()
    for name in ("metrics.jsonl", "evaluations.jsonl", "config.toml"):
        os.utime(run / name, (began, began))
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert summarise(RunReader(run))["alarms"] == []
        os.utime(samples, (began, began))
        (alarm,) = summarise(RunReader(run))["alarms"]
        assert re.fullmatch(r"no step, and no answer in the running evaluation, for 36\d\d s", alarm["text"])
        with (run / "evaluations.jsonl").open("a") as file:
            file.write('{"step": 30, "sets": {}}\n')
        assert summarise(RunReader(run))["alarms"] == []
        os.utime(run / "evaluations.jsonl", (began, began))
        assert "no step for 36" in summarise(RunReader(run))["alarms"][0]["text"]


@pytest.mark.parametrize(("num_steps", "every", "waits"), [(40, 10, True), (30, 20, True), (40, 20, False)])
def test_an_earlier_evaluation_may_hold_up_the_next_one(
    tmp_path: Path, num_steps: int, every: int, waits: bool
) -> None:
    """It has replicas of its own, and steps go on beside it until another evaluation is due, or there is none left."""
    run = make_run(tmp_path / "run")
    row = json.dumps(step_row(30, num_steps=num_steps))
    (run / "metrics.jsonl").write_text(f"{row}\n")
    (run / "config.toml").write_text(f"[evaluation]\nevery = {every}\n")
    samples = run / "evaluations" / "step-000020" / "samples.jsonl"
    samples.parent.mkdir(parents=True)
    samples.touch()
    began = time.time() - 3600
    for name in ("metrics.jsonl", "evaluations.jsonl", "config.toml"):
        os.utime(run / name, (began, began))
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        alarms = summarise(RunReader(run))["alarms"]
        assert [alarm["kind"] for alarm in alarms] == ([] if waits else ["stuck"])
        os.utime(samples, (began, began))
        (alarm,) = summarise(RunReader(run))["alarms"]
        assert ("no answer in the running evaluation" in alarm["text"]) == waits
        with (run / "evaluations.jsonl").open("a") as file:
            file.write('{"step": 20, "sets": {}}\n')
        assert summarise(RunReader(run))["alarms"] == []


def test_a_validation_of_supervised_training_is_no_alarm(tmp_path: Path) -> None:
    """It comes before the next step and may be silent for half an hour; its end counts as a step's does."""
    (tmp_path / "config.toml").write_text("[sft]\nvalidate_every = 20\n")
    steps = [{"step": step, "num_steps": 100, "loss": 1.0, "step_s": 2.0} for step in range(1, 42)]
    write_rows(tmp_path, steps[:40])

    def alarms(*, silent_s: float) -> list[dict[str, Any]]:
        for file in (*tmp_path.glob("*.jsonl"), tmp_path / "config.toml"):
            os.utime(file, (time.time() - silent_s,) * 2)
        return list(summarise(RunReader(tmp_path))["alarms"])

    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert alarms(silent_s=1700.0) == []
        (alarm,) = alarms(silent_s=1900.0)
        assert (alarm["kind"], alarm["remedy"]) == ("stuck", "look at logs/launcher.log")
        assert re.fullmatch("no step, and no progress of the validation before it, for 19.. s", alarm["text"])
        (tmp_path / "validation.jsonl").write_text('{"step": 40}\n')
        assert summarise(RunReader(tmp_path))["alarms"] == []
        write_rows(tmp_path, steps[40:])
        assert [alarm["kind"] for alarm in alarms(silent_s=200.0)] == ["stuck"]


def test_after_its_last_step_a_run_may_take_half_an_hour_to_end() -> None:
    """It writes a checkpoint, and no further step is missed."""
    over = [step_row(step, num_steps=20) for step in range(1, 21)]
    assert find_alarms(over, is_running=True, silent_s=1700.0) == []
    assert [alarm.kind for alarm in find_alarms(over, is_running=True, silent_s=1900.0)] == ["stuck"]
