"""`penstock status`."""

import fcntl
import json
from pathlib import Path

import pytest

from services.cli.app import main
from tests.support.view_runs import make_run, step_row, write_rows


def test_it_says_where_a_run_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Time left only while the run goes on."""
    run = make_run(tmp_path / "run")
    assert main(["status", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run: not running, step 30 of 200 after 60 s"
    assert lines[1].startswith("  reward      0.420  ▁")
    assert lines[2:] == [
        "  held_out    0.500 ± 0.020 at step 15",
        "  staleness   0.50, at most 1 of 1 allowed",
        "  trainer     idle 40%, 0 tokens/s",
    ]
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        main(["status", str(run)])
    assert capsys.readouterr().out.startswith("run: running, step 30 of 200 after 60 s, about 6 min left\n")


def test_an_alarm_is_told_and_is_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So that a script can react."""
    write_rows(make_run(tmp_path / "bad"), [step_row(31, num_failed_groups=3)])
    make_run(tmp_path / "good")
    assert main(["status", str(tmp_path), "--json"]) == 1
    found = {run["name"]: run for run in map(json.loads, capsys.readouterr().out.splitlines())}
    assert [alarm["kind"] for alarm in found["bad"]["alarms"]] == ["failed groups"]
    assert found["good"]["alarms"] == []
    assert (found["good"]["left_s"], found["good"]["groups"]["failed"]) == (None, None)


def test_a_run_that_has_not_begun_stands_at_step_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing else is known of it."""
    (tmp_path / "config.toml").write_text("")
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path.name}: not running, step 0 of ?\n"
