"""`make test-nats-cluster`: a run with simulated engines on three nats-servers, one killed and one frozen meanwhile.

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
from tests.support.waiting import until

_STEP_AT_KILL, _STEP_AT_FREEZE, _NUM_STEPS = 3, 12, 30
_FROZEN_S = 8.0
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
        train_fixed_s=0.1,
    ),
)


async def test_a_killed_and_a_frozen_server_cost_no_group(tmp_path: Path) -> None:
    """Each group is trained once, no version is used twice, and no process gives up."""
    workload, steps, metrics = (tmp_path / name for name in ("workload.json", "steps.jsonl", "run/metrics.jsonl"))
    _POOL.workload.write(workload)
    steps.touch()

    def rows() -> list[dict[str, Any]]:
        return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []

    async with contextlib.AsyncExitStack() as stack:
        cluster = stack.enter_context(local_cluster(tmp_path / "cluster"))
        settings = recipe_of(_POOL, tmp_path, BusConfig(url=cluster.url, replicas=3), max_staleness=1)
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
        await until(lambda: len(rows()) >= _STEP_AT_KILL or trainer.returncode is not None)
        cluster.servers[0].kill()
        await until(lambda: len(rows()) >= _STEP_AT_FREEZE or trainer.returncode is not None)
        cluster.servers[0].start()
        cluster.servers[1].freeze()
        await asyncio.sleep(_FROZEN_S)
        cluster.servers[1].thaw()
        assert await asyncio.wait_for(trainer.wait(), 120.0) == 0, (tmp_path / "trainer.log").read_text()[-3000:]
        assert all(part.returncode is None for part in (engines, *parts))
    trained = [index for row in rows() for index in row["groups"]]
    assert sorted(trained) == list(range(_NUM_STEPS * _POOL.groups_per_step)), "a group was lost or trained twice"
    versions = [row["policy_version"] for row in rows()]
    assert versions == sorted(set(versions)), "a policy version was used twice"
    assert rows()[-1]["num_failed_groups"] == 0
