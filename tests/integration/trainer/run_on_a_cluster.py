"""`make test-nats-cluster`: a run with simulated engines on three nats-servers, of which one is killed, one frozen and
one cut off from the others meanwhile.

Not collected: a group that was on its way to the trainer comes again after a minute.
"""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

from bench.async_loop.measured_loop import recipe_of, serving, until_serving
from bench.async_loop.workload import Scenario, Workload
from penstock import config as configuration
from penstock.config import BusConfig
from penstock.testing.local_cluster import local_cluster
from tests.support.bus.cut_routes import Routes, server_of
from tests.support.waiting import until

_STEP_AT_KILL, _STEP_AT_FREEZE = 3, 12
_FROZEN_S = 8.0
_CUT_OFF_S = 16.0
"""The trainer leaves its server after 3 s, half of the ack wait, or up to 3 s later if that does not answer. The others
elect leaders after 4 to 9 s."""
_ACK_WAIT_S = 6.0
_NUM_STEPS = 90
"""The faults end before step 80, because each step takes at least 0.4 s."""
_GOES_ON_S = 120.0
"""More than the minute after which a group comes again that was on its way to the trainer."""
_POOL = Scenario(
    replicas=3,
    slots_per_replica=2,
    groups_per_step=2,
    workload=Workload(
        seed=0,
        samples_per_group=3,
        median_tokens=40.0,
        sigma=1.0,
        max_tokens=200,
        token_s=0.001,
        train_token_s=1e-5,
        train_fixed_s=0.4,
    ),
)


async def test_a_killed_a_frozen_and_a_cut_off_server_cost_no_group(tmp_path: Path) -> None:
    """Each group is trained once, no version is used twice, and no process gives up. The server that is cut off is the
    trainer's."""
    names = ("workload.json", "steps.jsonl", "run/metrics.jsonl", "trainer.log")
    workload, steps, metrics, log = (tmp_path / name for name in names)
    _POOL.workload.write(workload)
    steps.touch()

    def rows() -> list[dict[str, Any]]:
        return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []

    async with contextlib.AsyncExitStack() as stack:
        routes = await stack.enter_async_context(Routes.open(3))
        cluster = stack.enter_context(local_cluster(tmp_path / "cluster", route_ports=routes.ports))
        routes.lead(cluster)
        bus = BusConfig(url=cluster.url, replicas=3, ack_wait_s=_ACK_WAIT_S)
        settings = recipe_of(_POOL, tmp_path, bus, max_staleness=1)
        settings = settings.model_copy(
            update={"trainer": settings.trainer.model_copy(update={"num_steps": _NUM_STEPS})}
        )
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(configuration.dump(settings))
        config, simulated = ("--config", recipe), ("--workload", workload)
        size = ("--replicas", _POOL.replicas, "--slots", _POOL.slots_per_replica)
        engines = await stack.enter_async_context(
            serving(tmp_path, "engines", "bench.async_loop.engines_process", *config, *simulated, *size)
        )
        parts = [
            await stack.enter_async_context(serving(tmp_path, name, "services.cli", "serve", name, *config))
            for name in ("router", "worker")
        ]
        await until_serving(engines, tmp_path)
        module = "bench.async_loop.trainer_process"
        trainer = await stack.enter_async_context(
            serving(tmp_path, "trainer", module, *config, *simulated, "--steps-file", steps)
        )

        async def until_step(number: int) -> None:
            await until(lambda: len(rows()) >= number or trainer.returncode is not None, _GOES_ON_S)

        await until_step(_STEP_AT_KILL)
        cluster.servers[0].kill()
        await until_step(_STEP_AT_FREEZE)
        cluster.servers[0].start()
        cluster.servers[1].freeze()
        await asyncio.sleep(_FROZEN_S)
        cluster.servers[1].thaw()
        await until_step(len(rows()) + 3)
        num_left = log.read_text().count("bus.server_left")
        routes.cut(server_of(trainer.pid, cluster))
        await asyncio.sleep(_CUT_OFF_S)
        assert log.read_text().count("bus.server_left") > num_left, "the trainer's server was not cut off"
        assert len(rows()) < _NUM_STEPS, "the run ended before the server was back"
        routes.mend()
        assert await asyncio.wait_for(trainer.wait(), _GOES_ON_S) == 0, log.read_text()[-3000:]
        assert all(part.returncode is None for part in (engines, *parts))
    trained = [index for row in rows() for index in row["groups"]]
    assert sorted(trained) == list(range(_NUM_STEPS * _POOL.groups_per_step)), "a group was lost or trained twice"
    versions = [row["policy_version"] for row in rows()]
    assert versions == sorted(set(versions)), "a policy version was used twice"
    assert rows()[-1]["num_failed_groups"] == 0
