"""What a person sees of a run on a terminal while it trains."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from services.launch.metrics import SHOWN, SUMMED_UP, MetricsFollower, describe_run, describe_step
from services.launch.process.child import Child, State
from services.launch.run_follower import RunFollower
from services.launch.terminal.display import LiveDisplay, PlainDisplay
from services.launch.terminal.pace import Pace
from services.launch.terminal.status_lines import describe_status
from services.view.summary import status_of
from tests.support.view_runs import step_row, write_rows

_EVALUATION = {
    "step": 20,
    "sets": {"held_out": {"score": {"value": 0.75, "standard_error": 0.02}}, "hard": {"score": None}},
}


def full_row(step: int, **changes: Any) -> dict[str, Any]:
    """A step with all that the terminal shows."""
    about = {"output_tokens_per_s": 1234.5, "num_replicas": 3, "push_s": 0.5, "push_replicas": 2, "policy_version": 7}
    counts = {"num_trained_groups": 8 * step, "num_stale_groups": 0, "num_failed_groups": 0, "num_filtered_groups": 0}
    return step_row(step, dlogp_mean=1e-6, dlogp_max=9e-6, **about, **counts) | changes


def drawn(rows: list[dict[str, Any]], *, children: Sequence[Any] = (), height: int = 40, width: int = 120) -> list[str]:
    """The lines of the table that a terminal of this size shows."""
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=width, height=height, color_system=None)
    display = LiveDisplay(console, "run")
    found = status_of(rows, [_EVALUATION], is_running=True, silent_s=0.0)
    display.show(children, rows, rows[-1:], found)
    display.close()
    frames = re.split(r"\r?\x1b\[2K(?:\x1b\[1A\x1b\[2K)*", terminal.getvalue())
    return [line.rstrip() for line in re.sub(r"\x1b\[\?25[lh]", "", frames[-1]).strip().splitlines()]


def test_the_table_says_where_the_run_stands() -> None:
    """Step and time left, reward with its course, evaluations, staleness, idle share, speed, replicas, push."""
    lines = drawn([full_row(step) for step in range(1, 31)])
    found = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert found["step"].startswith("30/200")
    assert found["step"].endswith("after 60 s, about 6 min left")
    assert found["reward"].startswith("0.420 ▁")
    assert found["held_out"] == "0.750 ± 0.020 evaluation of step 20"
    assert found["hard"] == "not played evaluation of step 20"
    assert found["staleness"] == "0.50 versions; at most 1, 1 allowed"
    assert found["idle"] == "40% of 2.0 s; 1.2 s training, waiting 0.6 s for groups"
    assert found["throughput"] == "1,234 tokens/s"
    assert found["replicas"] == "3"
    assert found["push"] == "0.50 s version 8 to 2 replicas"
    assert found["groups"] == "240 trained, 0 stale, 0 failed, 0 filtered"
    assert "ALARM" not in found


def test_the_last_alarm_is_shown_and_the_others_are_counted() -> None:
    """With the remedy, as far as the line goes."""
    rows = [full_row(step, num_failed_groups=step) for step in range(1, 31)]
    rows[10]["skipped"] = 1
    (line,) = [line for line in drawn(rows, width=200) if line.startswith("ALARM")]
    assert line.startswith(
        "ALARM failed groups at step 30: 5 groups failed in the last 5 steps, 30 in all; the samples"
    )
    assert line.endswith("(1 more: penstock status)")


@pytest.mark.parametrize(("height", "width"), [(40, 120), (10, 120), (10, 40), (5, 30)])
def test_the_table_is_never_higher_than_the_terminal(height: int, width: int) -> None:
    """Whatever the number of processes: what matters least goes first, and long lines are cut, not wrapped."""
    children: list[Any] = [
        SimpleNamespace(spec=SimpleNamespace(name=f"rollout-{number}"), state=State.UP, age_s=9.0, num_starts=1)
        for number in range(200)
    ]
    children[7].state, children[7].num_starts = State.RESTARTING, 3
    rows = [full_row(step, num_failed_groups=step) for step in range(1, 31)]
    lines = drawn(rows, children=children, height=height, width=width)
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    assert any(line.startswith("step") for line in lines)
    if width > 60:
        assert lines[1] == "rollout-7 restarting 9 s (start 3)  199 others up"


def test_elsewhere_than_on_a_terminal_there_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """One for each step, and one for each alarm when it is raised."""
    display = PlainDisplay()
    nobody: list[Child] = []
    rows: list[dict[str, Any]] = []
    for step in range(1, 4):
        rows.append(full_row(step, skipped=int(step >= 2)))
        display.show(nobody, rows, rows[-1:], status_of(rows, [], is_running=True, silent_s=0.0))
        display.show(nobody, rows, [], status_of(rows, [], is_running=True, silent_s=0.0))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["step", "step", "ALARM", "step"]
    assert lines[0].startswith("step 1/200  reward 0.304")
    assert lines[0].endswith("  2.0 s  about 7 min left")
    assert lines[2].startswith("ALARM skipped at step 2: 1 steps changed no weights")


@pytest.mark.parametrize(("look_s", "num_looks"), [(0.0, 1000), (0.5, 10)])
def test_showing_a_run_takes_a_twentieth_of_its_time_at_most(look_s: float, num_looks: int) -> None:
    """The table of a hundred thousand steps takes half a second; a short run is shown as often as it can be."""
    now, looked = 0.0, 0

    def look() -> None:
        nonlocal now, looked
        now, looked = now + look_s, looked + 1

    pace = Pace(now=lambda: now)
    for _ in range(1000):
        pace.when_due(look)
        now += 0.1
    assert looked == num_looks
    assert looked * look_s <= now / 20


def test_a_terminal_that_stopped_is_written_to_within_half_a_minute() -> None:
    """A look that waited for it says nothing of the next one."""
    times = iter([0.0, 120.0, 150.0, 150.0, 150.0])
    looks: list[None] = []
    pace = Pace(now=lambda: next(times))
    for _ in range(2):
        pace.when_due(lambda: looks.append(None))
    assert len(looks) == 2


def test_supervised_training_has_a_loss_and_no_reward() -> None:
    """And the speed at which the trainer reads."""
    rows: list[dict[str, Any]] = [{"step": 1, "num_steps": 4, "loss": 1.5, "trained_tokens_per_s": 1000.4}]
    found = status_of(rows, [], is_running=True, silent_s=0.0)
    lines = [(line.label, line.value) for line in describe_status(found, rows, width=10)]
    assert lines == [("step", "1/4"), ("loss", "1.5000"), ("throughput", "1,000")]


class NotingRow(dict[str, Any]):
    """A step that notes the metrics that are asked for, whether it has them or not."""

    def __init__(self, row: dict[str, Any], asked: set[str]) -> None:
        super().__init__(row)
        self._asked = asked

    def get(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self._asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._asked.add(str(key))
        return super().__contains__(key)


def test_all_that_the_terminal_shows_is_kept() -> None:
    """Launcher and `penstock status` keep no other metrics of a step: a hundred thousand steps would take gigabytes."""
    asked = set[str]()
    rows = [NotingRow(full_row(step), asked) for step in range(1, 60)]
    losses = [NotingRow({"step": 1, "num_steps": 4, "loss": 1.5, "trained_tokens_per_s": 1.0}, asked)]
    for some in (rows, losses):
        found = status_of(some, [], is_running=True, silent_s=1e6)
        describe_status(found, some, width=10)
        describe_step(some[-1])
    assert asked <= SHOWN
    describe_run(rows)
    assert asked <= SUMMED_UP


def test_a_run_that_is_stuck_is_noticed_without_a_step(tmp_path: Path) -> None:
    """Silence counts from the last new step; what was there before this start is old, and says nothing of this one."""
    write_rows(tmp_path, [full_row(step) for step in range(1, 6)])
    now = 0.0
    metrics = MetricsFollower(tmp_path / "metrics.jsonl")
    metrics.poll()
    follower = RunFollower(tmp_path, metrics, MetricsFollower(tmp_path / "evaluations.jsonl"), now=lambda: now)
    assert follower.poll(print) == []
    assert follower.status(is_running=True)["alarms"] == []
    now = 200.0
    assert follower.status(is_running=True)["alarms"] == []
    now = 2000.0
    assert [alarm["kind"] for alarm in follower.status(is_running=True)["alarms"]] == ["stuck"]
    write_rows(tmp_path, [full_row(6)])
    assert [row["step"] for row in follower.poll(print)] == [6]
    found = follower.status(is_running=True)
    assert (found["step"], found["alarms"]) == (6, [])
    samples = tmp_path / "evaluations" / "step-000006" / "samples.jsonl"
    samples.parent.mkdir(parents=True)
    samples.touch()
    now = 2200.0  # the evaluation of step 6 holds up step 7
    assert follower.status(is_running=True)["alarms"] == []
    (tmp_path / "evaluations.jsonl").write_text('{"step": 6, "elapsed_s": 200.0, "sets": {}}\n')
    follower.poll(print)
    assert follower.status(is_running=True)["alarms"] == []
    now = 2400.0
    assert [alarm["kind"] for alarm in follower.status(is_running=True)["alarms"]] == ["stuck"]
