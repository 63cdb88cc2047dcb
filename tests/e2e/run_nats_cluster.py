"""`make test-nats-cluster`: a run with real SGLang on three nats-servers, each of them away once while it trains; the
trainer's is also cut off from both others."""

import asyncio
import time
from pathlib import Path

import pytest

from penstock.testing.local_cluster import local_cluster
from penstock.testing.train_process import RECIPE, started
from tests.e2e.test_killed_processes import assert_nothing_was_lost, overrides
from tests.support.bus.cut_routes import Routes, server_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.leaves_behind("a process that is killed with -9 has no time to remove its temporary files", "file"),
]

_NUM_STEPS = 60
"""More than come before the last fault: a step takes half a second where nothing is away."""
_FROZEN_S = 20.0
"""Longer than an election, leases and the time after which prompts are delivered again."""
_CUT_OFF_S = 20.0
"""A server notices after 10 s that it is alone; 5 s later, half of `bus.ack_wait_s`, its clients leave it."""


async def test_each_server_is_away_once_and_no_group_is_lost(tmp_path: Path) -> None:
    """The first is killed with -9 and comes back, the second is frozen, the trainer's is cut off from both others, and
    the trainer dies while the third is away."""
    async with Routes.open(3) as routes:
        await asyncio.to_thread(_train, tmp_path, routes, asyncio.get_running_loop())


def _train(tmp_path: Path, routes: Routes, loop: asyncio.AbstractEventLoop) -> None:
    """Train through the faults; the routes are forwarded by `loop` meanwhile."""
    with local_cluster(tmp_path / "cluster", route_ports=routes.ports) as cluster:
        routes.lead(cluster)
        settings = overrides(
            tmp_path,
            rollout__replicas=2,
            trainer__num_steps=_NUM_STEPS,
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
            train.wait_for_step(len(train.rows()) + 3, timeout_s=240)
            log = train.folder / "logs" / "trainer.log"
            num_left = log.read_text().count("bus.server_left")
            loop.call_soon_threadsafe(routes.cut, server_of(train.pid_of("trainer"), cluster))
            time.sleep(_CUT_OFF_S)
            assert log.read_text().count("bus.server_left") > num_left, "the trainer's server was not cut off"
            loop.call_soon_threadsafe(routes.mend)
            train.wait_for_step(len(train.rows()) + 2, timeout_s=240)
            cluster.servers[2].kill()
            train.kill("trainer")
            assert len(train.rows()) < _NUM_STEPS, "the run ended before its faults"
            train.wait_for_step(len(train.rows()) + 2, timeout_s=240)
            cluster.servers[2].start()
            assert train.wait(400) == 0, train.tail()
            assert_nothing_was_lost(train.rows(), _NUM_STEPS)
            assert train.left_behind() == []
