"""A trainer whose two ranks torchrun starts, with a real engine: ranks die, and no group is lost or trained twice."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.test_killed_processes import assert_nothing_was_lost, overrides
from tests.support.trainer.runs.torchrun_run import Host, torchrun_run

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.leaves_behind("a process that is killed with -9 has no time to remove its temporary files", "file"),
]

HERE = Host(address="127.0.0.1")


@pytest.mark.parametrize("hosts", [[HERE], pytest.param([HERE, HERE], marks=pytest.mark.variant)], ids=["1", "2"])
def test_ranks_that_torchrun_starts_die_and_lose_nothing(tmp_path: Path, hosts: Sequence[Host]) -> None:
    """By one torchrun, or by two with a rank each, which take this machine for two."""
    play_with_deaths(tmp_path, hosts)


def play_with_deaths(tmp_path: Path, hosts: Sequence[Host]) -> None:
    """Kill the rank that follows between two checkpoints, and then the first: each time all ranks go on from the last
    checkpoint, and the run ends at its last step."""
    num_steps = 8
    settings = overrides(tmp_path, trainer__num_steps=num_steps, trainer__checkpoint_every=2)
    with torchrun_run(tmp_path, *settings, hosts=hosts, ranks_per_host=2 // len(hosts), max_restarts=2) as run:
        for step, rank in ((3, 1), (5, 0)):
            run.train.wait_for_step(step, timeout_s=240)
            os.kill(run.pid_of_rank(rank), signal.SIGKILL)
        assert run.train.wait(240) == 0, run.train.tail()
        assert set(run.end()) == {0}, run.train.tail()
        rows = run.train.rows()
        assert_nothing_was_lost(rows, num_steps)
        assert rows[-1]["trainer_start"] == 3
        assert run.train.left_behind() == []
