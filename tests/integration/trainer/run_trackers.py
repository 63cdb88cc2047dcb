"""SwanLab and Trackio, the real packages, read back offline. Not collected by default: `make test-trackers`."""

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.runs.tracked_runs import ROWS, RUN_ID, log_rows, python

PACKAGES = Path(os.environ.get("PENSTOCK_TEST_CLIENTS", ".clients")).resolve() / "trackers"
# In front of all others: these trackers need older versions of some packages that are installed.
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))}

READ_SWANLAB = """
import json, sys
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.sdk.internal.core_python.store import DataStoreReader

reader, rows = DataStoreReader(), []
reader.open(sys.argv[1])
while (record := reader.scan()) is not None:
    scalar = Record.FromString(record).scalar
    if scalar.key in ("reward_mean", "eval/a/score"):
        rows.append((scalar.key, scalar.step, scalar.value.number))
print(json.dumps(rows))
"""


@pytest.fixture(autouse=True)
def _installed() -> None:
    if not PACKAGES.is_dir():
        pytest.skip(f"there is no {PACKAGES}; make test-trackers fetches it")


def log_to_swanlab(folder: Path, rows: list[dict[str, Any]], **options: Any) -> None:
    """Log offline."""
    log_rows("swanlab", folder, rows, **options, SWANLAB_MODE="offline", **ENVIRONMENT)


def read_swanlab(file: Path) -> list[list[Any]]:
    """Name, step and value of what is in a file, in its order."""
    rows: list[list[Any]] = json.loads(python(READ_SWANLAB, str(file), **ENVIRONMENT))
    return rows


def log_to_trackio(folder: Path, rows: list[dict[str, Any]], **options: Any) -> None:
    """Log to a database in the folder."""
    log_rows("trackio", folder, rows, **options, TRACKIO_DIR=str(folder / "trackio"), **ENVIRONMENT)


def read_trackio(folder: Path) -> tuple[list[tuple[Any, ...]], dict[str, Any]]:
    """Run, step and value of each row in order, and the settings of the only run."""
    with closing(sqlite3.connect(folder / "trackio" / "tests.db")) as database:
        rows = database.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        [(run_id, config)] = database.execute("SELECT run_id, config FROM configs").fetchall()
    assert {(row[0], row[1]) for row in rows} == {(run_id, RUN_ID)}
    values = [(step, metrics.get("reward_mean", metrics.get("eval/a/score"))) for step, metrics in parsed(rows)]
    return values, json.loads(config)


def parsed(rows: list[tuple[Any, ...]]) -> list[tuple[int, dict[str, float]]]:
    """Step and numbers of each row."""
    return [(step, json.loads(metrics)) for _, _, step, metrics in rows]


def test_swanlab_goes_on_under_the_runs_id(tmp_path: Path) -> None:
    """Offline, each part of the run is a folder of its own; both carry the run's id, under which `swanlab sync` sends
    them.
    """
    log_to_swanlab(tmp_path, ROWS[:2])
    log_to_swanlab(tmp_path, ROWS[2:], last_step=2)
    files = sorted(tmp_path.glob("swanlab/run-*/run-*.swanlab"))
    assert [RUN_ID.encode() in file.read_bytes() for file in files] == [True, True]
    assert [row for file in files for row in read_swanlab(file)] == [
        ["reward_mean", step, pytest.approx(step / 10)] for step in range(1, 5)
    ]


def test_swanlab_stores_the_settings_alone(tmp_path: Path) -> None:
    """Beside the name that accelerate gives itself."""
    log_to_swanlab(tmp_path, ROWS[:1])
    [file] = tmp_path.glob("swanlab/run-*/files/config.yaml")
    names = [line.rstrip(":\n") for line in file.read_text().splitlines() if not line.startswith(" ")]
    assert names == ["FRAMEWORK", "trainer.num_steps"]


def test_swanlab_keeps_an_evaluation_that_ends_after_later_steps(tmp_path: Path) -> None:
    """It has the step of its weights, and hides no row of a step."""
    log_to_swanlab(tmp_path, [*ROWS[:3], {"step": 2, "eval/a/score": 0.75}, ROWS[3]])
    [file] = tmp_path.glob("swanlab/run-*/run-*.swanlab")
    rows = [["reward_mean", step, pytest.approx(step / 10)] for step in range(1, 5)]
    assert read_swanlab(file) == [*rows[:3], ["eval/a/score", 2, 0.75], rows[3]]


def test_trackio_goes_on_in_the_same_run(tmp_path: Path) -> None:
    """Rows and the newest settings are one run's, and steps after the checkpoint stay beside their repetition."""
    log_to_trackio(tmp_path, ROWS[:3])
    log_to_trackio(tmp_path, [{"step": 3, "reward_mean": 0.75}, ROWS[3]], last_step=2)
    rows, settings = read_trackio(tmp_path)
    assert rows == [(1, 0.1), (2, 0.2), (3, pytest.approx(0.3)), (3, 0.75), (4, 0.4)]
    own = {name: value for name, value in settings.items() if not name.startswith("_")}
    assert own == {"trainer.num_steps": "6"}


def test_trackio_keeps_an_evaluation_that_ends_after_later_steps(tmp_path: Path) -> None:
    """It has the step of its weights, and hides no row of a step."""
    log_to_trackio(tmp_path, [*ROWS[:3], {"step": 2, "eval/a/score": 0.75}, ROWS[3]])
    rows, _ = read_trackio(tmp_path)
    assert rows == [(1, 0.1), (2, 0.2), (3, pytest.approx(0.3)), (2, 0.75), (4, 0.4)]


def test_swanlab_without_a_key_warns_and_training_goes_on(tmp_path: Path) -> None:
    """Where nobody can type one, it warns once at its start, and rows go nowhere."""
    home = {"HOME": str(tmp_path), "SWANLAB_SAVE_DIR": str(tmp_path)}
    with pytest.raises(AssertionError) as failure:  # log_rows accepts no warning
        log_rows("swanlab", tmp_path, ROWS, **ENVIRONMENT, **home)
    assert str(failure.value).count("'event': 'tracker.failed'") == 1
    assert "no TTY is available for interactive login" in str(failure.value)
