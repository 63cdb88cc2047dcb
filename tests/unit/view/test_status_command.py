"""`penstock status`."""

import fcntl
import io
import json
import re
import sys
from pathlib import Path

import pytest

from services.cli.app import main
from tests.support.view_runs import make_run, step_row, write_rows


def test_it_says_where_a_run_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Time left only while the run goes on."""
    run = make_run(tmp_path / "run")
    assert main(["status", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["run: not running", "  step       30/200         after 60 s"]
    assert lines[2].startswith("  reward     0.420          ▁")
    assert lines[3:] == [
        "  held_out   0.500 ± 0.020  evaluation of step 15",
        "  staleness  0.50           versions; at most 1, 1 allowed",
        "  idle       40%            of 2.0 s; 1.2 s training, waiting 0.6 s for groups",
        "  replicas   2",
        "  push       0.20 s         version 31 to 2 replicas",
    ]
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        main(["status", str(run)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["run: running", "  step       30/200         after 60 s, about 6 min left"]


def test_a_run_has_a_name_from_within_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it is given as a dot."""
    monkeypatch.chdir(make_run(tmp_path / "run"))
    assert main(["status", "."]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "run: not running"


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_what_the_locale_cannot_encode_is_a_question_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """As the bars of the course with LANG=en_US; JSON has escapes."""
    run, written = make_run(tmp_path / "läuft"), io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    assert main(["status", str(run)]) == 0
    sys.stdout.flush()
    lines = written.getvalue().decode(encoding)
    assert re.search(r"^  reward +0\.420 +\?{20,}$", lines, re.MULTILINE)
    assert main(["status", str(run), "--json"]) == 0
    sys.stdout.flush()
    assert json.loads(written.getvalue().decode(encoding).removeprefix(lines))["folder"] == str(run)


def test_an_alarm_is_told_and_is_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So that a script can react; people read the remedy."""
    write_rows(make_run(tmp_path / "bad"), [step_row(31, num_failed_groups=3)])
    make_run(tmp_path / "good")
    assert main(["status", str(tmp_path), "--json"]) == 1
    found = {run["name"]: run for run in map(json.loads, capsys.readouterr().out.splitlines())}
    assert [alarm["kind"] for alarm in found["bad"]["alarms"]] == ["failed groups"]
    assert found["good"]["alarms"] == []
    assert (found["good"]["left_s"], found["good"]["groups"]["failed"]) == (None, None)
    main(["status", str(tmp_path / "bad")])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "ALARM" in line]
    assert line.startswith(
        "  ALARM failed groups at step 31: 3 groups failed in the last 5 steps, 3 in all; the samples"
    )


def test_a_run_that_has_not_begun_stands_at_step_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing else is known of it."""
    (tmp_path / "config.toml").write_text("")
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path.name}: not running\n  step  0/?\n"
