"""bench_streaming: the loop takes what the benchmark gives it."""

from pathlib import Path

import pytest

from bench.async_loop.perfect_loop import Push
from bench.router import bench_streaming


@pytest.mark.parametrize("streams", [False, True])
async def test_a_run_has_a_row_for_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    """With its waits; checkpoints included. Durations are a hundredth of the benchmark's."""
    for name in ("GROUP_S", "CHUNK_S", "UPDATE_S", "CHECKPOINT_S"):
        monkeypatch.setattr(bench_streaming, name, getattr(bench_streaming, name) / 100)
    num_steps = bench_streaming.NUM_WARMUP + 4
    rows = await bench_streaming.run(
        tmp_path / "run",
        streams=streams,
        push=Push(total_s=0.005, rolls=True),
        max_staleness=1,
        mean_s=0.003,
        num_steps=num_steps,
    )
    assert [row["step"] for row in rows] == [*range(bench_streaming.NUM_WARMUP + 1, num_steps)]
    assert all({"step_s", "wait_s", "push_wait_s", "checkpoint_wait_s"} <= row.keys() for row in rows)
