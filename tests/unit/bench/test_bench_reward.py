"""What `make bench-reward` reports of hostile items, and of items that a clone lacks."""

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from bench.reward import bench_reward, hostile, stored_items
from bench.reward.report import Report
from penstock.testing.hostile_answers import generated_items
from penstock.v1 import reward_pb2

LATE_S = 0.2


class LateService:
    """A client of a service that answers each item at once, and says that it took until after its deadline."""

    async def verify_batch(
        self, items: Sequence[reward_pb2.VerifyItem], *, timeout_s: float
    ) -> list[reward_pb2.Verdict]:
        """Return a verdict for each item."""
        late = reward_pb2.Verdict(score=1.0, status=reward_pb2.VERDICT_STATUS_TIMEOUT, elapsed_s=1.0 + LATE_S)
        return [late] * len(items)


def test_a_missed_bar_of_hostile_items_fails_the_command_and_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As any other bar is."""

    @contextlib.asynccontextmanager
    async def service(_num_workers: int) -> AsyncIterator[tuple[LateService, int]]:
        yield LateService(), 0

    async def watch_memory(_pid: int, peaks: list[float]) -> None:
        peaks.append(100.0)

    kept = tmp_path / "results.json"
    arguments = ["bench_reward.py", "--only", "hostile", "--hostile-seconds", "0.2", "--json", str(kept)]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setattr(stored_items, "STORED", tmp_path)
    monkeypatch.setattr(bench_reward, "exit_on_sigterm", lambda: None)
    monkeypatch.setattr(hostile, "_service", service)
    monkeypatch.setattr(hostile, "_watch_memory", watch_memory)
    assert bench_reward.main() == 1
    bars = {part["bar"]: part for part in json.loads(kept.read_text()) if "bar" in part}
    [late] = [bar for name, bar in bars.items() if "8 at once" in name]
    assert not late["holds"]
    assert late["measured"] == "p99 200 ms, max 200 ms"
    assert any("p99 of clean items" in name for name in bars)


def test_items_that_a_clone_lacks_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise numbers of fewer items pass for those of all."""
    monkeypatch.setattr(stored_items, "STORED", tmp_path)
    report = Report()
    num_generated = len(generated_items())
    assert len(stored_items.hostile_items(report)) == num_generated
    assert stored_items.stored_pairs(report) == []
    told = capsys.readouterr().out
    assert f"hostile items: {num_generated} generated and 0 stored, because {tmp_path / 'hostile.jsonl'}" in told
    assert f"{tmp_path / 'pairs.jsonl'} is missing" in told


def test_a_file_of_pairs_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is measured."""
    missing = tmp_path / "mine.jsonl"
    monkeypatch.setattr("sys.argv", ["bench_reward.py", "--pairs", str(missing)])
    with pytest.raises(SystemExit, match="2"):
        bench_reward.main()
    assert f"--pairs: no file {missing}" in capsys.readouterr().err
