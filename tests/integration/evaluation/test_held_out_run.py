"""Whole runs around simulated engines that hold a replica out for an evaluation: what dies, and what goes on."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.async_loop.workload import Scenario, Workload
from penstock.bus.connection import Bus
from tests.support.trainer.runs.simulated_run import WITHIN_S, SimulatedRun, simulated_run
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * WITHIN_S)]

NUM_EVALUATED = 60
POOL = Scenario(
    replicas=3,
    slots_per_replica=2,
    groups_per_step=2,
    workload=Workload(
        seed=0,
        samples_per_group=2,
        median_tokens=40.0,
        sigma=0.5,
        max_tokens=100,
        token_s=0.005,
        train_token_s=1e-5,
        train_fixed_s=0.01,
    ),
)


async def until_steps(run: SimulatedRun, num: int) -> None:
    """Wait for `num` more steps."""
    target = max(run.steps(), default=0) + num
    await run.until(lambda: max(run.steps(), default=0) >= target)


async def until_evaluated(run: SimulatedRun) -> dict[str, Any]:
    """Wait for the end of the evaluation, and return its line."""
    await run.until(lambda: bool(run.evaluations()))
    [row] = run.evaluations()
    return row


def assert_pure(samples: Sequence[dict[str, Any]], version: int, *, num: int = NUM_EVALUATED) -> None:
    """Each prompt has one outcome, with every token of the version."""
    assert sorted(each["row"] for each in samples) == list(range(num))
    assert {tuple(each["versions"]) for each in samples} == {(version, version)}


async def assert_catches_up(run: SimulatedRun, version: int) -> None:
    """Nothing is held out, nothing kept, and every replica gets newer versions."""

    async def is_current() -> bool:
        are_newer = all(each.policy_version > version for each in (await run.replicas()).values())
        return are_newer and (await run.held_out()).policy_version == 0

    await until(is_current, timeout_s=WITHIN_S)
    # The file goes last: until it has gone, a trainer that dies finds it.
    await until(lambda: not (run.folder / "run/evaluations/step-000000/weights").exists(), timeout_s=WITHIN_S)


@pytest.mark.variant
async def test_steps_go_on_whichever_replica_plays_an_evaluation(
    steady_bus: Bus, run_name: str, tmp_path: Path
) -> None:
    """It keeps its version and the others get newer ones; then it catches up. Nothing goes stale.

    If it is killed, another one is given the kept weights, although it has newer ones; the evaluation stays of one
    version.
    """
    async with simulated_run(steady_bus, run_name, tmp_path / "run", POOL, num_evaluated=NUM_EVALUATED) as run:
        held = await run.until_held_out()
        version = (await run.held_out()).policy_version
        await until_steps(run, 3)
        assert not run.evaluations()
        versions = {replica_id: each.policy_version for replica_id, each in (await run.replicas()).items()}
        assert versions.pop(held) == version
        assert all(each > version for each in versions.values())
        assert run.lines("metrics.jsonl")[-1]["num_stale_groups"] == 0
        await run.until(lambda: len(run.samples()) >= 2)
        before = run.samples()
        await run.kill_engine(held)
        heir = await run.until_held_out(besides=held)
        assert heir in run.engines
        row = await until_evaluated(run)
        assert (row["step"], row["policy_version"], row["num_held_out_replicas"]) == (0, version, 1)
        assert row["sets"]["set"]["num_failed_prompts"] == 0
        assert run.samples()[: len(before)] == before
        assert_pure(run.samples(), version)
        await assert_catches_up(run, version)
        await until_steps(run, 1)
        assert not run.events("evaluation.pauses_training")


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "num_held"), [pytest.param(3, 2, marks=pytest.mark.variant), (2, 0)])
async def test_as_many_replicas_are_held_out_as_the_recipe_says(
    steady_bus: Bus, run_name: str, tmp_path: Path, replicas: int, num_held: int
) -> None:
    """Two of three keep their version, and the third trains; with none held out, the first update waits, as asked."""
    pool = dataclasses.replace(POOL, replicas=replicas)
    num_evaluated = NUM_EVALUATED if num_held else NUM_EVALUATED // 8  # nothing trains beside the latter
    async with simulated_run(
        steady_bus, run_name, tmp_path / "run", pool, num_evaluated=num_evaluated, held_out_replicas=num_held
    ) as run:
        if num_held:

            async def are_held() -> bool:
                return len((await run.held_out()).replica_ids) == num_held

            await until(are_held, timeout_s=WITHIN_S)
            held, version = set((await run.held_out()).replica_ids), (await run.held_out()).policy_version
            await until_steps(run, 2)
            assert not run.evaluations()
            newer = {name: each.policy_version > version for name, each in (await run.replicas()).items()}
            assert newer == {name: name not in held for name in run.engines}
        row = await until_evaluated(run)
        assert row["num_held_out_replicas"] == num_held
        assert_pure(run.samples(), row["policy_version"], num=num_evaluated)
        await until_steps(run, 1)
        first = run.lines("metrics.jsonl")[0]
        if not num_held:
            assert (first["step"], first["policy_version"]) == (1, row["policy_version"])
            assert first["evaluation_wait_s"] > 0
        assert not run.events("evaluation.pauses_training")
        await assert_catches_up(run, row["policy_version"])


async def test_a_killed_trainer_goes_on_with_the_evaluation(steady_bus: Bus, run_name: str, tmp_path: Path) -> None:
    """At the same version, though its checkpoint is of a later step and the held-out replica is killed with it; what
    was played counts."""
    async with simulated_run(
        steady_bus, run_name, tmp_path / "run", POOL, num_evaluated=NUM_EVALUATED, checkpoint_every=2
    ) as run:
        held = await run.until_held_out()
        version = (await run.held_out()).policy_version
        checkpoints = run.folder / "run/checkpoints"
        await run.until(lambda: len(run.samples()) >= 2 and any(checkpoints.glob("step-*")))
        await run.kill_trainer()
        played = run.samples()
        assert not run.evaluations()
        await run.kill_engine(held)
        await run.start_trainer()
        row = await until_evaluated(run)
        assert (row["step"], row["policy_version"]) == (0, version)
        assert run.samples()[: len(played)] == played
        assert_pure(run.samples(), version)
        [_, again] = run.events("evaluation.began")
        assert (again["version"], again["num_played"]) == (version, len(played))
        await assert_catches_up(run, version)
        await until_steps(run, 1)


@pytest.mark.variant
async def test_with_one_replica_training_waits_and_says_so(steady_bus: Bus, run_name: str, tmp_path: Path) -> None:
    """The first update is after the evaluation's end."""
    pool = Scenario(replicas=1, slots_per_replica=2, groups_per_step=2, workload=POOL.workload)
    async with simulated_run(steady_bus, run_name, tmp_path / "run", pool, num_evaluated=12) as run:
        await run.until(lambda: bool(run.events("evaluation.pauses_training")))
        row = await until_evaluated(run)
        await until_steps(run, 1)
        assert row["num_held_out_replicas"] == 0
        assert_pure(run.samples(), row["policy_version"], num=12)
        [first, *_] = run.lines("metrics.jsonl")
        assert first["policy_version"] == row["policy_version"]
        assert first["evaluation_wait_s"] > 0
        [event] = run.events("evaluation.pauses_training")
        assert "no replica can be spared" in event["reason"]
