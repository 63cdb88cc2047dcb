"""`make test-nats-cluster`: a run with real SGLang on three nats-servers, each of them away once while it trains."""

import time
from pathlib import Path

import pytest

from penstock.testing.local_cluster import local_cluster
from penstock.testing.train_process import RECIPE, started
from tests.e2e.test_killed_processes import assert_nothing_was_lost, overrides

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.leaves_behind("a process that is killed with -9 has no time to remove its temporary files", "file"),
]

_FROZEN_S = 20.0
"""Longer than an election, leases and the time after which prompts are delivered again."""


def test_each_server_is_away_once_and_no_group_is_lost(tmp_path: Path) -> None:
    """The first is killed with -9 and comes back, the second is frozen, the trainer dies while the third is away."""
    num_steps = 16
    with local_cluster(tmp_path / "cluster") as cluster:
        settings = overrides(
            tmp_path,
            rollout__replicas=2,
            trainer__num_steps=num_steps,
            bus__url=cluster.url,
            bus__replicas=3,
        )
        with started(tmp_path, str(RECIPE), *settings) as train:
            train.wait_for_step(2, timeout_s=240)
            cluster.servers[0].kill()
            train.wait_for_step(5, timeout_s=240)
            cluster.servers[0].start()
            train.wait_for_step(7, timeout_s=240)
            cluster.servers[1].freeze()
            time.sleep(_FROZEN_S)
            cluster.servers[1].thaw()
            train.wait_for_step(10, timeout_s=240)
            cluster.servers[2].kill()
            train.kill("trainer")
            train.wait_for_step(12, timeout_s=240)
            cluster.servers[2].start()
            assert train.wait(400) == 0, train.tail()
            assert_nothing_was_lost(train.rows(), num_steps)
            assert train.left_behind() == []
