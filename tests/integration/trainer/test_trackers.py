"""Trackers: what was logged can be read back, a resume goes on in the same run, and no failure reaches the trainer."""

import json
import math
import sqlite3
import sys
import threading
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import structlog

from penstock.bus.connection import Bus
from penstock.config import load
from penstock.errors import ConfigError
from services.launch.settings.service_settings import for_trainer
from services.recipe import Recipe
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.config import TrackersConfig
from services.trainer.run_logs import open_run_logs
from services.trainer.starting_point import find_starting_point
from services.trainer.telemetry.trackers import (
    Feed,
    TrackedRun,
    TrackerKind,
    Trackers,
    described,
    require_packages,
)
from tests.support.trainer.runs.tracked_runs import ROWS, RUN_ID, log_a_run, log_rows, python, run_in

READ_WANDB = """
import json, sys
from wandb.proto.wandb_internal_pb2 import Record

content, record, rows = open(sys.argv[1], "rb").read(), b"", []
position = 7  # the file's header; then LevelDB's log format: checksum, length and type before each part of a record
while position + 7 <= len(content):
    left = 32768 - position % 32768
    length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
    if left < 7 or kind == 0:
        position += left
        continue
    record += content[position + 7 : position + 7 + length]
    position += 7 + length
    if kind in (1, 4):  # a whole record, or the last part of one
        parsed, record = Record.FromString(record), b""
        if parsed.HasField("history"):
            history = parsed.history
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in history.item}
            rows.append((items["step"], items.get("reward_mean", items.get("eval/a/score"))))
print(json.dumps(rows))
"""


@pytest.mark.slow
def test_tensorboard_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    """Four steps, then a resume from step 2 with another value: each step once, with its newest value."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_rows("tensorboard", tmp_path, ROWS)
    log_rows("tensorboard", tmp_path, [{"step": 3, "reward_mean": 0.75}], last_step=2)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "tiny"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("reward_mean")] == [
        (1, pytest.approx(0.1)),
        (2, pytest.approx(0.2)),
        (3, 0.75),
    ]
    assert set(events.Tags()["scalars"]) == {"step", "reward_mean"}


@pytest.mark.slow
def test_a_step_whose_push_was_interrupted_reaches_trackers_after_the_resume(tmp_path: Path) -> None:
    """The trainer died between the checkpoint of step 2 and the end of its push, and dies once more: still one row."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_a_run("tensorboard", tmp_path, [(None, ROWS[:1]), (ROWS[1], []), (ROWS[1], ROWS[2:])])
    events = EventAccumulator(str(tmp_path / "trackers" / "tensorboard" / RUN_ID))
    events.Reload()
    assert [each.step for each in events.Scalars("reward_mean")] == [1, 2, 3, 4]
    written = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == [1, 2, 3, 4]


@pytest.mark.slow
def test_mlflow_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its id is kept in the run's folder; a new run in the same folder gets another one."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    log_rows("mlflow", tmp_path, ROWS[:2])
    rest = [row | {"learning_rate_visual.*": 1e-6} for row in ROWS[2:]]
    log_rows("mlflow", tmp_path, rest, last_step=2, of_another_run=ROWS[:1])
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        values_of: dict[str, list[tuple[int, float]]] = {}
        for run, step, value in database.execute(
            "SELECT run_uuid, step, value FROM metrics WHERE key = 'reward_mean' ORDER BY step"
        ):
            values_of.setdefault(run, []).append((step, value))
        runs = database.execute("SELECT name, status FROM runs").fetchall()
        parameters = database.execute("SELECT DISTINCT key, value FROM params").fetchall()
        rates = database.execute("SELECT step FROM metrics WHERE key = 'learning_rate_visual._'").fetchall()
    assert sorted(values_of.values(), key=len) == [
        [(step, pytest.approx(step / 10)) for step in range(1, num_steps + 1)] for num_steps in (1, 4)
    ]
    assert rates == [(3,), (4,)], "MLflow takes no asterisk"
    assert runs == [("tiny", "FINISHED")] * 2
    assert parameters == [("trainer.num_steps", "4")]


@pytest.mark.slow
def test_mlflow_gets_the_steps_of_a_run_whose_id_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a new id, as the one that MLflow assigned is lost."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "mlflow-run.json").write_text('{"run_id": "ti')
    log_rows("mlflow", tmp_path, ROWS[2:], last_step=2)
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        steps = database.execute("SELECT step FROM metrics WHERE key = 'reward_mean' ORDER BY step").fetchall()
    assert steps == [(3,), (4,)]


@pytest.mark.slow
def test_wandb_goes_on_under_the_runs_id(tmp_path: Path) -> None:
    """Offline, each part of the run is a file of its own; both carry the run's id, by which `wandb sync` joins them."""
    log_rows("wandb", tmp_path, ROWS[:2], WANDB_MODE="offline")
    log_rows("wandb", tmp_path, ROWS[2:], last_step=2, WANDB_MODE="offline")
    files = sorted(tmp_path.glob(f"wandb/offline-run-*/run-{RUN_ID}.wandb"))
    assert len(files) == 2
    rows = [tuple(row) for file in files for row in json.loads(python(READ_WANDB, str(file)))]
    assert rows == [(step, pytest.approx(step / 10)) for step in range(1, 5)]


@pytest.mark.slow
def test_wandb_keeps_an_evaluation_that_ends_after_later_steps(tmp_path: Path) -> None:
    """It has the step of its weights, and neither replaces nor hides a step's row."""
    evaluation = {"step": 2, "eval/a/score": 0.75}
    log_rows("wandb", tmp_path, [*ROWS[:3], evaluation, ROWS[3]], WANDB_MODE="offline")
    (file,) = tmp_path.glob(f"wandb/offline-run-*/run-{RUN_ID}.wandb")
    assert json.loads(python(READ_WANDB, str(file))) == [
        [1, pytest.approx(0.1)],
        [2, pytest.approx(0.2)],
        [3, pytest.approx(0.3)],
        [2, 0.75],
        [4, pytest.approx(0.4)],
    ]


@pytest.mark.slow
def test_tensorboard_keeps_an_evaluation_that_ends_after_later_steps(tmp_path: Path) -> None:
    """It has the step of its weights, and hides no row of a step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_rows("tensorboard", tmp_path, [*ROWS[:3], {"step": 2, "eval/a/score": 0.75}, ROWS[3]])
    events = EventAccumulator(str(tmp_path / "tensorboard" / "tiny"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("eval/a/score")] == [(2, 0.75)]
    assert [each.step for each in events.Scalars("reward_mean")] == [1, 2, 3, 4]


def test_a_failing_tracker_warns_once_and_delays_no_other(tmp_path: Path) -> None:
    """One fails at every row, one at its start, one exits; a fourth gets all rows, numbers only."""
    got: list[tuple[int, dict[str, float]]] = []
    failing = Feed("failing", kind_of(log=fail), run_in(tmp_path))
    unreachable = Feed("unreachable", kind_of(start=fail), run_in(tmp_path))
    leaving = Feed("leaving", kind_of(start=sys.exit), run_in(tmp_path))
    working = Feed("working", kind_of(log=lambda values, step: got.append((step, values))), run_in(tmp_path))
    with structlog.testing.capture_logs() as logs:
        trackers = Trackers([failing, unreachable, leaving, working])
        for feed in (failing, unreachable, leaving, working):
            feed.start()
        for row in [*ROWS, {"step": 5, "loss": math.inf, "done": True}]:
            trackers.log(row)
        trackers.close()
    assert [(step, values) for step, values in got] == [
        *((step, {"step": step, "reward_mean": step / 10}) for step in range(1, 5)),
        (5, {"step": 5, "loss": math.inf}),
    ]
    assert sorted((entry["event"], entry["tracker"], entry["reason"]) for entry in logs) == [
        ("tracker.failed", "failing", "OSError: no route"),
        ("tracker.failed", "leaving", "SystemExit: "),
        ("tracker.failed", "unreachable", "OSError: no route"),
    ]


def test_a_tracker_that_hangs_holds_nothing_up(tmp_path: Path) -> None:
    """Rows wait for it up to a bound, more are counted off with one warning, and closing gives up on it."""
    release = threading.Event()
    feed = Feed("hanging", kind_of(log=lambda values, step: release.wait()), run_in(tmp_path))
    with structlog.testing.capture_logs() as logs:
        feed.start()
        trackers = Trackers([feed])
        for step in range(1, 1100):
            trackers.log({"step": step})
        trackers.close(timeout_s=0.0)
    assert [entry["event"] for entry in logs] == ["tracker.failed", "tracker.unfinished"]
    assert "1000 steps wait for it" in logs[0]["reason"]
    release.set()
    feed.join()


def test_trackers_are_told_what_decides_what_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The filters included; no address."""
    monkeypatch.chdir(Path(__file__).parents[3])
    recipe = load(Recipe, [Path("recipes/tiny-cpu.toml")], ["--filters.zero_variance=true"])
    settings = described(for_trainer(recipe))
    assert settings["filters.zero_variance"] == "True"
    assert settings["trainer.optimizer.learning_rate"] == "0.0001"
    assert not [name for name in settings if name.startswith(("network.", "bus."))]


def test_a_missing_package_is_named() -> None:
    """Before anything starts, with what to do; accelerate would say nothing."""
    with pytest.raises(ConfigError, match=r"trackers\.use names 'swanlab', .* pip install swanlab"):
        require_packages(TrackersConfig.model_validate({"use": ["tensorboard", "swanlab"]}))
    with pytest.raises(ConfigError, match=r"trackers\.use\.0 = 'tensorbord'"):
        load(Recipe, [], ['--trackers.use=["tensorbord"]'])


def test_nothing_is_imported_that_is_not_used() -> None:
    """A run without trackers loads none of them, and starts no thread."""
    program = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from services.trainer.config import TrackersConfig\n"
        "from services.trainer.telemetry.trackers import TrackedRun, Trackers, require_packages\n"
        "config = TrackersConfig()\n"
        "require_packages(config)\n"
        "run = TrackedRun(run_id='a', name='a', project='a', last_step=0, folder=Path('nowhere'), settings={})\n"
        "trackers = Trackers.open(config, run)\n"
        "trackers.log({'step': 1})\n"
        "trackers.close()\n"
        "assert threading.active_count() == 1\n"
        "assert not Path('nowhere').exists()\n"
        "assert not {'accelerate', 'tensorboard', 'wandb', 'mlflow', 'torch'} & set(sys.modules)\n"
    )
    python(program)


async def test_a_resumed_trainer_hands_trackers_the_id_of_its_checkpoint(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the step from which they go on; a run in a new folder has an id of its own."""
    opened: list[TrackedRun] = []
    monkeypatch.setattr(Trackers, "open", lambda _config, run: opened.append(run) or Trackers([]))
    for folder in ("old", "new"):
        (tmp_path / folder).mkdir()
    state = {"run_id": RUN_ID, "version": 3, "ledger": {}}
    CheckpointStore(tmp_path / "old" / "checkpoints", keep=1).save(2, state, lambda path: (path / "model").mkdir())
    for folder in ("old", "new"):
        at = [f"--run.name={folder}", f"--run.dir={tmp_path}"]
        settings = for_trainer(load(Recipe, [], ["--model.path=builtin:tiny-qwen3-vl", "--episodes.keep=off", *at]))
        start = await find_starting_point(settings, bus)
        nothing: Any = None
        async with AsyncExitStack() as stack:
            await open_run_logs(settings, start, nothing, nothing, nothing, stack)
    resumed, new = opened
    assert (resumed.run_id, resumed.name, resumed.last_step) == (RUN_ID, RUN_ID, 2)
    assert (new.run_id.startswith("new-"), new.last_step) == (True, 0)


class Tracker:
    """Calls what a test gives it, with the methods of accelerate's trackers."""

    def __init__(self, start: Any, log: Any) -> None:
        self._start, self._log = start, log

    def start(self) -> None:
        self._start()

    def store_init_configuration(self, values: dict[str, str]) -> None:
        pass

    def log(self, values: dict[str, float], step: int) -> None:
        self._log(values, step)

    def finish(self) -> None:
        pass


def kind_of(start: Any = lambda: None, log: Any = lambda values, step: None) -> TrackerKind:
    """A kind whose trackers do this."""
    return TrackerKind(package="none", modules=[], make=lambda run: Tracker(start, log), settings_can_change=True)


def fail(*args: Any) -> None:
    """What a tracker does whose server is gone."""
    raise OSError("no route")
