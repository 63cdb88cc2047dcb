"""What the processes of a run do."""

import fcntl
import time
from pathlib import Path
from typing import Any

import pytest

from services.trainer.telemetry.step_metrics import describe_push
from services.trainer.weight_sync.push_report import PushReport
from services.view.fleet import fleet_of
from services.view.run_reader import RunReader
from services.view.summary import fleet_now
from services.view.trace_reader import Span
from tests.support.view_runs import add_end, add_spans, make_run

_NOW = 1000.0


def _span(process: str, name: str, start: float, seconds: float, /, **attributes: Any) -> Span:
    return Span(process=process, name=name, start=start, seconds=seconds, attributes=attributes)


def test_loads_and_rates_are_means_over_the_last_minute() -> None:
    """What began before counts from then on, with its share of the tokens; an older call counts no more."""
    spans = [
        _span("rollout-0", "call", 800.0, 30.0, num_tokens=900, version=1),
        _span("rollout-0", "call", 910.0, 60.0, num_tokens=600, first_token_s=2.0, version=3),
        _span("rollout-0", "call", 985.0, 15.0, num_tokens=300, first_token_s=4.0, version=4),
        _span("rollout-0", "call", 999.0, 0.0, error="the caller has left"),
        _span("rollout-0", "paused", 970.0, 3.0, version=4, then="READY"),
        _span("worker-0", "turn", 999.0, 1.0),
    ]
    (replica,) = fleet_of(spans, [], starts=[], now=_NOW, has_launcher=True)["replicas"]
    assert replica == {
        "process": "rollout-0",
        "replica": "",
        "version": 4,
        "num_calls": 3,
        "num_failed_calls": 1,
        "mean_running": pytest.approx((30 + 15) / 60),
        "output_tokens_per_s": pytest.approx((300 + 300) / 60),
        "first_token_s": 3.0,
        "paused_s": 3.0,
        "silent_s": 0.0,
    }


def test_a_run_that_has_just_begun_is_measured_since_then() -> None:
    """A minute of which most lies before the run would make its engines look idle."""
    spans = [
        _span("worker-0", "group.queued", 980.0, 1.0),
        _span("rollout-0", "call", 990.0, 10.0, num_tokens=100),
    ]
    fleet = fleet_of(spans, [], starts=[], now=_NOW, has_launcher=True)
    assert fleet["window_s"] == 20.0
    assert (fleet["replicas"][0]["mean_running"], fleet["replicas"][0]["output_tokens_per_s"]) == (0.5, 5.0)


def test_a_version_is_served_when_the_engine_is_ready_with_it() -> None:
    """Not as soon as its bytes arrive, nor if the push failed."""
    spans = [
        _span("rollout-0", "paused", 10.0, 1.0, version=5, then="READY"),
        _span("rollout-0", "push.received", 12.0, 1.0, version=6, stage="transfer"),
        _span("rollout-0", "paused", 12.0, 1.0, version=6, then="BROKEN"),
    ]
    assert fleet_of(spans, [], starts=[], now=20.0, has_launcher=True)["replicas"][0]["version"] == 5


def test_processes_are_those_that_were_started_and_those_that_are_heard_of() -> None:
    """A worker that somebody else started has spans only; a process that ended says how."""
    starts = [
        _span("launcher", "process.starting", 1.0, 2.0, service="reward", start=1),
        _span("launcher", "process", 1.0, 9.0, service="reward", start=1, exit_code=-9),
        _span("launcher", "process.starting", 11.0, 2.0, service="reward", start=2),
        _span("launcher", "process", 1.0, 30.0, service="router", start=1, exit_code=1),
    ]
    spans = [_span("worker", "turn", 990.0, 4.0), _span("reward", "judged", 999.0, 1.0), starts[0]]
    found = fleet_of(spans, [], starts=[starts], now=_NOW, has_launcher=True)["processes"]
    assert [
        (each["process"], each["state"], each["num_starts"], each["exit_code"], each["silent_s"]) for each in found
    ] == [
        ("reward", "up", 2, None, 0.0),
        ("router", "ended", 1, 1, None),
        ("worker", "", None, None, 6.0),
    ]


def test_processes_of_a_launcher_that_was_killed_are_lost() -> None:
    """Nobody has written how they ended. One that nobody but itself has spoken of has no state, as in a live run."""
    starts = [
        _span("launcher", "process.starting", 1.0, 2.0, service="trainer", start=1),
        _span("launcher", "process.starting", 1.0, 2.0, service="router", start=1),
        _span("launcher", "process", 1.0, 30.0, service="router", start=1, exit_code=1),
    ]
    spans = [_span("worker", "turn", 990.0, 4.0)]
    states = [
        {each["process"]: each["state"] for each in found["processes"]}
        for found in (
            fleet_of(spans, [], starts=[starts], now=_NOW, has_launcher=has_launcher) for has_launcher in (True, False)
        )
    ]
    assert [each.pop("trainer") for each in states] == ["up", "lost"]
    assert states == [{"router": "ended", "worker": ""}] * 2


def test_a_launcher_that_goes_on_with_a_run_does_not_raise_the_dead() -> None:
    """Until its own are ready they are lost; an engine that the run has no more stays lost."""
    names = ("rollout-0", "rollout-1")
    killed = [_span("launcher", "process.starting", 1.0, 2.0, service=name, start=1) for name in names]
    for own, states in ([], ["lost", "lost"]), (killed[:1], ["up", "lost"]):
        found = fleet_of([], [], starts=[killed, own], now=_NOW, has_launcher=True)
        assert [each["state"] for each in found["processes"]] == states


def test_the_push_that_paused_longest_comes_first() -> None:
    """With the version that it pushed, and a bound on how many there are. Earlier releases recorded the mean only."""
    rows: list[dict[str, Any]] = [
        {"step": step, "policy_version": step + 5, "push_s": 1.0, "push_pause_s": step % 7} for step in range(1, 99)
    ]
    rows.append({"step": 99})
    pushes = fleet_of([], rows, starts=[], now=_NOW, has_launcher=True)["pushes"]
    assert len(pushes) == 20
    assert [(each["step"], each["push_pause_s"], each["version"]) for each in pushes[:2]] == [(6, 6, 12), (13, 6, 19)]


def test_one_slow_engine_among_many_makes_a_push_the_longest() -> None:
    """Its pause says little in the mean over all; the page names the engine."""
    paused_s = [{f"engine-{number}": 1.0 for number in range(64)} for _ in range(3)]
    paused_s[1] = dict.fromkeys(paused_s[1], 0.5) | {"engine-7": 30.0}
    rows = []
    for step, each in enumerate(paused_s, start=1):
        report = PushReport(version=step, num_replicas=64, num_failed=0, num_bytes=1, push_s=31.0, paused_s=each)
        rows.append({"step": step, "policy_version": step} | describe_push(report, num_live_replicas=64))
    first, second, _ = fleet_of([], rows, starts=[], now=_NOW, has_launcher=True)["pushes"]
    assert (first["step"], first["push_pause_max_s"], first["push_pause_max_replica"]) == (2, 30.0, "engine-7")
    assert first["push_pause_s"] == pytest.approx((63 * 0.5 + 30.0) / 64)
    assert second["push_pause_s"] == 1.0, "a mean that is longer"


def test_a_run_that_has_ended_is_shown_as_it_was_at_its_end(tmp_path: Path) -> None:
    """From its files alone: the end is that of the last step."""
    run = make_run(tmp_path / "run")
    add_spans(run)
    fleet = fleet_now(RunReader(run))
    assert fleet["now"] == 1_700_000_000.0 + 2 * 30 + 2.0
    (replica,) = fleet["replicas"]
    assert (replica["process"], replica["replica"], replica["version"]) == ("rollout-0", "engine-5", 31)
    assert replica["mean_running"] == pytest.approx(30 * 1.2 / 60)
    states = {each["process"]: (each["state"], each["exit_code"]) for each in fleet["processes"]}
    assert states == {"rollout-0": ("lost", None), "router": ("", None), "trainer": ("", None), "x": ("ended", 1)}
    assert (fleet["num_replicas"], fleet["published_version"]) == (2, 31)


def test_a_trainer_without_a_launcher_keeps_the_fleet_at_the_present(tmp_path: Path) -> None:
    """What an earlier launcher has started stays lost."""
    run = make_run(tmp_path / "run")
    add_spans(run)
    began = time.time()
    with (run / ".trainer.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fleet = fleet_now(RunReader(run))
    assert fleet["now"] >= began
    states = {each["process"]: (each["state"], each["exit_code"]) for each in fleet["processes"]}
    assert states == {"rollout-0": ("lost", None), "x": ("ended", 1)}


def test_a_run_ends_with_its_last_evaluation(tmp_path: Path) -> None:
    """Which comes after the last step. How long the processes then take to end does not count."""
    run = make_run(tmp_path / "run")
    add_spans(run)
    add_end(run)
    fleet = fleet_now(RunReader(run))
    assert fleet["now"] == 1_700_000_000.0 + 2 * 30 + 22.5
    assert fleet["num_replicas"] == 2


def test_a_run_without_spans_has_no_engines(tmp_path: Path) -> None:
    """Its pushes are in the steps."""
    fleet = fleet_now(RunReader(make_run(tmp_path / "run")))
    assert (fleet["replicas"], len(fleet["pushes"])) == ([], 20)
