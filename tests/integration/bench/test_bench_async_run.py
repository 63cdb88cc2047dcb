"""`make bench-async` on a few engines: the real loop trains, and everything ends."""

from pathlib import Path

import pytest

from bench.async_loop.measured_loop import run_loop
from bench.async_loop.workload import Scenario, Workload

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
        train_fixed_s=0.01,
    ),
)


@pytest.mark.slow
@pytest.mark.variant
async def test_the_real_loop_runs_around_simulated_engines(tmp_path: Path) -> None:
    """Every engine takes every push, nothing goes stale, and each process is accounted for."""
    run = await run_loop(_POOL, tmp_path / "run", max_staleness=1, num_warmup=1, num_steps=5, timeout_s=240.0)
    assert len(run.ends) == 5
    assert run.ends == sorted(run.ends)
    assert run.stale_groups == 0
    assert run.push_s > 0
    assert set(run.cpu_s) == {"nats-server", "engines (simulated)", "router", "worker", "trainer"}
    for log in (tmp_path / "run").glob("*.log"):
        assert "Traceback" not in log.read_text(), log.read_text()
