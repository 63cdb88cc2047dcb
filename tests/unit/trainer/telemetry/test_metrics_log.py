"""The metrics file of a run that goes on from a checkpoint."""

import json
from datetime import datetime, timedelta
from pathlib import Path

from services.trainer.telemetry.metrics_log import MetricsLog

TIMES = ("time", "trainer_start", "trainer_deaths", "elapsed_s")


def content(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Rows without what says when they were written."""
    return [{key: row[key] for key in row if key not in TIMES} for row in rows]


def test_what_was_written_after_the_checkpoint_is_moved_away(tmp_path: Path) -> None:
    """Also the line that a crash cut short; the rest stays as it is, and the file goes on from there."""
    log = MetricsLog(tmp_path, last_step=0)
    for step in range(1, 5):
        log.write({"step": step, "reward_mean": 1 / 3, "loss": 1 / 3})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 5, "rew']))
    again = MetricsLog(tmp_path, last_step=2)
    assert [row["step"] for row in again.rows()] == [1, 2]
    assert (tmp_path / "metrics-discarded.jsonl").read_text().splitlines() == [*lines[2:], '{"step": 5, "rew']
    again.write({"step": 3})
    assert [row["step"] for row in MetricsLog(tmp_path, last_step=3).rows()] == [1, 2, 3]


def test_a_line_without_its_end_is_a_line(tmp_path: Path) -> None:
    """A crash cut only the end of the line; the next one does not join it."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}')
    log = MetricsLog(tmp_path, last_step=1)
    log.write({"step": 2})
    assert content(log.rows()) == [{"step": 1}, {"step": 2}]
    assert not (tmp_path / "metrics-discarded.jsonl").exists()


def test_loss_and_gradient_norm_keep_all_digits(tmp_path: Path) -> None:
    """They are what a replay must reproduce; other floats are short, and a NaN is read back as one."""
    log = MetricsLog(tmp_path, last_step=0)
    log.write({"step": 1, "loss": 1 / 3, "grad_norm": 2 / 3, "reward_mean": 1 / 3, "weights_digest": "00ff"})
    log.write({"step": 2, "loss": float("nan")})
    first, second = content(log.rows())
    assert first == {"step": 1, "loss": 1 / 3, "grad_norm": 2 / 3, "reward_mean": 0.333333, "weights_digest": "00ff"}
    assert second["loss"] != second["loss"]


def test_counts_keep_all_digits(tmp_path: Path) -> None:
    """Those of backends are floats."""
    log = MetricsLog(tmp_path, last_step=0)
    log.write({"step": 1, "num_tokens": 2_097_149.0})
    assert content(log.rows()) == [{"step": 1, "num_tokens": 2_097_149.0}]


def test_a_long_run_is_resumed_in_one_pass(tmp_path: Path) -> None:
    """With work per line that grew with the lines, 200,000 of them would take longer than a test may."""
    lines = [json.dumps({"step": step}) + "\n" for step in range(1, 200_001)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    MetricsLog(tmp_path, last_step=199_999)
    assert (tmp_path / "metrics-discarded.jsonl").read_text() == lines[-1]
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:-1])


def test_a_row_that_was_not_written_comes_from_the_checkpoint(tmp_path: Path) -> None:
    """The trainer died after the checkpoint of step 2 and before its push was over; a row that is there stays.

    The log says whether it took the row, for those who have not seen it either.
    """
    log = MetricsLog(tmp_path, last_step=0)
    log.write({"step": 1, "push_s": 0.5})
    lost = {"step": 2, "loss": 1 / 3}
    assert [MetricsLog(tmp_path, last_step=2, last_row=lost).restored for _ in range(2)] == [lost, None]
    assert MetricsLog(tmp_path, last_step=1, last_row={"step": 1}).restored is None
    assert content(log.rows()) == [{"step": 1, "push_s": 0.5}]
    assert [row["step"] for row in MetricsLog(tmp_path, last_step=2, last_row={"step": 2}).rows()] == [1, 2]


def test_rows_say_when_and_by_which_trainer_they_were_written(tmp_path: Path) -> None:
    """Time goes on where the rows that are kept stopped, without the pause between two trainers."""
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "trainer_start": 1, "elapsed_s": 50.0}\n{"step": 2, "trainer_start": 2, "elapsed_s": 1000.0}\n'
    )
    log = MetricsLog(tmp_path, last_step=1)
    log.write({"step": 2})
    row = log.rows()[-1]
    assert row["trainer_start"] == 3
    assert 50.0 <= row["elapsed_s"] < 500.0
    assert datetime.fromisoformat(row["time"]).utcoffset() == timedelta(0)


def test_deaths_are_counted_and_ends_are_not(tmp_path: Path) -> None:
    """A trainer that dies says nothing: it is the next one that finds that it did not end."""
    deaths = []
    for step, ends in enumerate([True, False, True, False, False], start=1):
        log = MetricsLog(tmp_path, last_step=step - 1)
        log.write({"step": step})
        deaths.append(log.rows()[-1]["trainer_deaths"])
        if ends:
            log.end()
    assert deaths == [0, 0, 1, 1, 2]
    for _ in range(3):
        log = MetricsLog(tmp_path, last_step=4)  # it goes back by a step, and dies before its first one
    log.write({"step": 5})
    assert log.rows()[-1]["trainer_deaths"] == 5
    (tmp_path / "metrics-running").write_text("")  # the disk was full
    log = MetricsLog(tmp_path, last_step=5)
    log.write({"step": 6})
    assert log.rows()[-1]["trainer_deaths"] == 6


def test_a_line_that_ends_within_a_character_is_moved_away(tmp_path: Path) -> None:
    """A crash may cut a line anywhere."""
    (tmp_path / "metrics.jsonl").write_bytes('{"step": 1}\n{"step": 2, "text": "é'.encode()[:-1])
    MetricsLog(tmp_path, last_step=5).write({"step": 2})
    assert [row["step"] for row in MetricsLog(tmp_path, last_step=5).rows()] == [1, 2]


def test_what_is_moved_away_is_whole_however_often_a_trainer_dies_of_it(tmp_path: Path) -> None:
    """Killed while it moves lines, at any byte: the next one moves them again, and none joins half of another."""
    kept, moved = '{"step": 1}\n', '{"step": 2}\n{"step": 3}\n'
    discarded = tmp_path / "metrics-discarded.jsonl"
    for cut in range(len(moved) + 1):
        (tmp_path / "metrics.jsonl").write_text(kept + moved)
        discarded.write_text(moved[:cut])
        MetricsLog(tmp_path, last_step=1)
        assert {*moved.splitlines()} <= {*discarded.read_text().splitlines()}
        assert (tmp_path / "metrics.jsonl").read_text() == kept
