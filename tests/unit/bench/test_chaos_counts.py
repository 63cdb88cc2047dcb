"""What bench/chaos.py counts: every kill's time away, and no bar that holds without a measurement."""

import argparse
import signal
import subprocess
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from bench.chaos import GROUPS_PER_STEP, SERVICES, Faults, break_at_random, freeze, tell
from penstock.testing.local_cluster import LocalCluster


def test_one_that_is_killed_again_before_it_was_seen_is_counted_twice() -> None:
    """The look just before a kill sees that it was back; one that is killed twice under one number is away once."""
    faults = Faults()
    faults.add("router", 10, 1.0)
    faults.look({"router": 10}, 2.0)
    faults.look({"router": 11}, 5.0)
    faults.add("router", 11, 5.0)
    faults.look({}, 6.0)
    faults.add("router", 11, 7.0)
    faults.look({"router": 12}, 9.0)
    assert faults.away_s == {"router": [4.0, 4.0]}
    assert faults.by_service == {"router": 3}


def test_those_that_never_come_back_are_told() -> None:
    """Until the run's end at least they were away."""
    faults = Faults()
    faults.add("decode-0", 10, 1.0)
    faults.add("decode-1", 11, 2.0)
    faults.look({"decode-1": 12}, 3.0)
    faults.end(31.0)
    assert faults.away_s == {"decode": [1.0, 30.0]}
    assert faults.num_not_back == {"decode": 1}


def test_a_freeze_ends_early_rather_than_let_the_run_end_before_the_last_fault() -> None:
    """And goes on again in any case."""
    with subprocess.Popen(["sleep", "60"]) as victim:
        states = []
        looks = iter([False, True])

        def look() -> None:
            states.append(psutil.Process(victim.pid).status())

        assert freeze(victim.pid, 60.0, look, until=lambda: next(looks)) < 50.0
        assert states == [psutil.STATUS_STOPPED]
        assert psutil.Process(victim.pid).status() != psutil.STATUS_STOPPED
        victim.kill()


def test_a_rank_that_the_trainer_has_started_is_a_victim() -> None:
    """Under the name that it has among the run's processes."""
    with subprocess.Popen(["sleep", "60"]) as victim, subprocess.Popen(["sleep", "60"]) as next_one:

        def processes() -> dict[str, int]:
            return {"rank-1": victim.pid if victim.poll() is None else next_one.pid}

        def wait_until(holds: Any, *_: object) -> None:
            while not holds():
                victim.wait()

        train: Any = SimpleNamespace(
            rows=lambda: [{"step": 1}], processes=processes, wait_until=wait_until, process=next_one
        )
        arguments = argparse.Namespace(seed=0, kills=1, freezes=0, steps_between=1)
        faults = break_at_random(train, LocalCluster(), {*SERVICES}, arguments, num_steps=3)
        killed = victim.poll()
        victim.kill()
        next_one.kill()
    assert faults.by_service == {"rank": 1}
    assert killed == -signal.SIGKILL


@pytest.mark.parametrize(
    ("dlogp", "num_wanted_faults", "exit_code"),
    [([], 0, 1), ([1e-6], 0, 0), ([1e-6, 1.0], 0, 1), ([1e-6, float("nan")], 0, 1), ([1e-6], 1, 1)],
)
def test_no_bar_holds_without_what_it_measures(dlogp: list[float], num_wanted_faults: int, exit_code: int) -> None:
    """Steps without a token of the current version measure nothing, nor does a run that ended before its faults."""
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "groups": range(step * GROUPS_PER_STEP, (step + 1) * GROUPS_PER_STEP),
            "staleness_max": 0,
            "max_staleness": 1,
            "policy_version": step,
            "num_failed_groups": 0,
            "num_stale_groups": 0,
        }
        for step in range(3)
    ]
    for row, value in zip(rows, dlogp, strict=False):
        row["dlogp_max_current"] = value
    train: Any = SimpleNamespace(rows=lambda: rows, left_behind=lambda: [])
    assert tell(train, Faults(), 0, num_steps=3, num_wanted_faults=num_wanted_faults, wall_s=1.0) == exit_code
