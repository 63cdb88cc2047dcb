"""`make bench-scale` on a few engines: the real processes play, every engine stays listed, and everything ends."""

from pathlib import Path

import pytest

from bench.scale.bench_scale import report
from bench.scale.measured_run import run
from bench.scale.workload import Load


@pytest.mark.slow
async def test_control_processes_are_measured_around_engines_of_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight engines in two processes, each with a lease and a connection of its own; two workers; pushes reach all."""
    load = Load(replicas=8, tokens=600, samples_per_s=32.0, groups_per_step=4, num_workers=2, num_engine_processes=2)
    measured = await run(load, tmp_path / "run", idle_s=1.0, num_warmup=1, num_steps=3)
    assert 0 < measured.groups_per_s < 1.1 * measured.offered_groups_per_s
    assert measured.tokens_per_s == pytest.approx(measured.groups_per_s * 8 * 600, rel=0.15)
    assert measured.fewest_replicas == 8
    assert measured.push_s > 0
    assert measured.bus_read_mb_per_s > 8 * measured.tokens_per_s / 1e6, "ids and log-probabilities pass the bus"
    assert {name: use.num_processes for name, use in measured.uses.items()} == {
        "nats-server": 1,
        "engines (simulated)": 2,
        "router": 1,
        "workers": 2,
        "trainer": 1,
    }
    assert all(use.cores > 0 for use in measured.uses.values())
    assert all(mib > 1 for mib in measured.memory_mib.values())
    for log in (tmp_path / "run").glob("*.log"):
        assert "Traceback" not in log.read_text(), log.read_text()
    report([measured])
    assert "| 8 | 3 |" in capsys.readouterr().out
