"""A whole trainer that learns demonstrations, around simulated engines, killed with kill -9."""

from pathlib import Path

import pytest

from bench.async_loop.workload import Scenario, Workload
from penstock.bus.connection import Bus
from services.trainer.demonstrations.config import DemonstrationsConfig
from tests.support.trainer.runs.simulated_run import WITHIN_S, simulated_run

pytestmark = [pytest.mark.slow, pytest.mark.variant, pytest.mark.timeout(4 * WITHIN_S)]

POOL = Scenario(
    replicas=1,
    slots_per_replica=4,
    groups_per_step=2,
    workload=Workload(
        seed=0,
        samples_per_group=2,
        median_tokens=40.0,
        sigma=0.5,
        max_tokens=100,
        token_s=0.005,
        train_token_s=1e-5,
        train_fixed_s=0.05,
    ),
)


async def test_a_killed_trainer_goes_on_with_the_demonstrations_of_its_checkpoint(
    bus: Bus, run_name: str, tmp_path: Path
) -> None:
    """Every step of the surviving history learned those behind the step before, none twice and none left out."""
    learned = DemonstrationsConfig.model_validate({"sources": {"a": {}}, "samples_per_step": 3})
    async with simulated_run(
        bus, run_name, tmp_path / "run", POOL, num_evaluated=0, demonstrations=learned, checkpoint_every=3
    ) as run:
        checkpoints = run.folder / "run/checkpoints"
        await run.until(lambda: max(run.steps(), default=0) >= 5 and any(checkpoints.glob("step-*")))
        await run.kill_trainer()
        await run.start_trainer()
        await run.until(lambda: max(run.steps(), default=0) >= 9)
        rows = run.lines("metrics.jsonl")
    [new, resumed] = [event["step"] for event in run.events("run.opened")]
    assert (new, resumed >= 3) == (0, True)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert [row["demonstration_epoch"] for row in rows] == pytest.approx([3 * row["step"] / 10_000 for row in rows])
