"""The bars of `make bench-zoom`."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.demo import bench_zoom
from bench.demo.bench_zoom import Measurement, measure

GOOD: dict[str, Any] = {
    "seed": 0,
    "num_steps": 100,
    "wall_s": 760.0,
    "last_evaluation_s": 40.0,
    "first_reward": 0.5,
    "last_reward": 0.75,
    "score_before": 0.25,
    "score_after": 0.5,
    "score_blank": 0.375,
    "tool_use_before": 0.6,
    "tool_use_after": 0.601,
}


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({"last_reward": 0.749}, ["the reward in training gained 0.249, less than 0.25"]),
        ({"score_blank": 0.376}, ["blank zooms took away 49.6% of the held-out gain, less than 50%"]),
        ({"score_after": 0.25}, ["the held-out score gained nothing that blank zooms could take away"]),
        ({"tool_use_after": 0.6}, ["tool use did not rise: 0.600 before, 0.600 after"]),
        ({"wall_s": 761.0}, ["training took 721 s, more than 720"]),
    ],
)
def test_each_bar_can_be_missed(changed: dict[str, Any], missed: list[str]) -> None:
    """By a little; a seed that just meets all of them misses none."""
    assert Measurement(**GOOD).misses() == []
    assert Measurement(**(GOOD | changed)).misses() == missed


def write_runs(folder: Path, *, score_after: float) -> tuple[Path, Path, float]:
    """The folders of a run of twenty steps and of the evaluation behind it, and how long the run took."""
    run, blank = folder / "run", folder / "blank"
    run.mkdir(parents=True)
    blank.mkdir()
    rows = [{"step": step, "reward_mean": 0.25 if step <= 10 else 0.75} for step in range(1, 21)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def result(score: float, tool_use: float) -> dict[str, Any]:
        held_out = {"score": {"value": score, "standard_error": 0.02}, "metrics": {"tool_use": tool_use}}
        return {"elapsed_s": 20.0, "sets": {"held_out": held_out}}

    evaluations = [result(0.25, 0.5), result(score_after, 0.75)]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(each) + "\n" for each in evaluations))
    (blank / "evaluation.json").write_text(json.dumps(result(0.125, 0.5)))
    return run, blank, 100.0


def test_a_run_is_read(tmp_path: Path) -> None:
    """Twice as much as was gained is lost where nothing is seen."""
    measured, cells = measure(3, *write_runs(tmp_path, score_after=0.375))
    assert (measured.gain, measured.lost) == (0.5, 2.0)
    assert len(cells) == len(bench_zoom.COLUMNS)
    assert measured.last_evaluation_s == 20.0
    assert cells[6:12] == ["+0.500", "0.250 ± 0.020", "0.375 ± 0.020", "+0.125", "0.125", "200%"]


@pytest.mark.parametrize(("score_after", "code"), [(0.375, 0), (0.25, 1)])
def test_a_missed_bar_is_the_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    score_after: float,
    code: int,
) -> None:
    """And is named behind the table, which is whole; a gain of nothing divides nothing."""
    monkeypatch.setattr("sys.argv", ["bench_zoom.py", "--seeds", "0"])
    monkeypatch.setattr(bench_zoom, "exit_on_sigterm", lambda: None)
    monkeypatch.setattr(bench_zoom, "play", lambda *_: write_runs(tmp_path, score_after=score_after))
    assert bench_zoom.main() == code
    printed = capsys.readouterr().out
    assert ("MISSED: seed 0: the held-out score gained nothing" in printed) == bool(code)
    assert len([line for line in printed.splitlines() if line.startswith("|")]) == 3
