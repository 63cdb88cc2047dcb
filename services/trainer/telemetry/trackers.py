"""Sends the run's metrics to experiment trackers: Weights & Biases, TensorBoard, MLflow, SwanLab, Trackio.

It uses accelerate's trackers. Each has its own thread, so the training loop never waits for one, and one that hangs
delays no other. A tracker is imported only if the recipe uses it.

Invariants: no error of a tracker reaches the run; each warns once. A run that resumes from a checkpoint continues in
every tracker under the same id.
"""

import importlib.util
import json
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from penstock.config.base import leaves
from penstock.errors import ConfigError
from penstock.runtime.files import write_atomically
from services.trainer.config import TrackersConfig, TrainerSettings
from services.trainer.sft.config import SftSettings

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

log = structlog.get_logger()

_MAX_WAITING_ROWS = 1000
"""Most steps queued for a tracker that hangs; later ones are not sent to it."""
_CLOSE_TIMEOUT_S = 60.0
"""Longest wait for uploads at the end of a run, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The facts about a run that trackers need."""

    run_id: str
    """Identity of the run, the same before and after a resume."""
    name: str
    project: str
    last_step: int
    """Step of the checkpoint that the run resumes from; 0 in a new run."""
    folder: Path
    """Folder for the trackers' files."""
    settings: Mapping[str, str]
    """Settings of the recipe, by dotted name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerKind:
    """A tracker that a recipe can name."""

    package: str
    """Package that pip installs."""
    modules: Sequence[str]
    """Modules that must then be importable."""
    make: Callable[[TrackedRun], "GeneralTracker"]
    """Creates the tracker without starting it."""
    settings_can_change: bool
    """Whether settings may be stored again after a resume."""


class Trackers:
    """Sends every step's metrics to each tracker of the recipe."""

    def __init__(self, feeds: Sequence["Feed"]) -> None:
        """Use started trackers."""
        self._feeds = feeds

    @classmethod
    def open(cls, config: TrackersConfig, run: TrackedRun) -> "Trackers":
        """Start the trackers of the recipe; call `require_packages` first. Blocks while accelerate is imported."""
        if config.use:
            from accelerate.state import PartialState

            run.folder.mkdir(parents=True, exist_ok=True)
            PartialState(cpu=True)  # accelerate's trackers ask whether they are the main process
        feeds = [Feed(name, KINDS[name], run) for name in config.use]
        for feed in feeds:
            feed.start()
        return cls(feeds)

    def log(self, row: Mapping[str, Any]) -> None:
        """Send the numbers in one step's row of metrics.jsonl. Returns at once."""
        values = {
            name: value for name, value in row.items() if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for feed in self._feeds:
            feed.put(values)

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Wait until everything is sent, at most `timeout_s` in total. Blocks."""
        deadline = time.monotonic() + timeout_s
        for feed in self._feeds:
            feed.put(None)
        for feed in self._feeds:
            feed.join(max(0.0, deadline - time.monotonic()))
            if feed.is_alive():
                log.warning("tracker.unfinished", tracker=feed.name, waited_s=timeout_s)


class Feed(threading.Thread):
    """The thread of one tracker. It is a daemon, so that a tracker that hangs does not keep the process alive."""

    def __init__(self, name: str, kind: TrackerKind, run: TrackedRun) -> None:
        """Prepare the thread; `start` starts it."""
        super().__init__(name=name, daemon=True)
        self._kind = kind
        self._run = run
        self._rows: queue.SimpleQueue[dict[str, float] | None] = queue.SimpleQueue()
        self._has_failed = False

    def put(self, row: dict[str, float] | None) -> None:
        """Queue a row; None ends the thread once the queue is empty."""
        if row is not None and self._rows.qsize() >= _MAX_WAITING_ROWS:
            self._warn(f"{_MAX_WAITING_ROWS} steps wait for it; later ones are not sent")
        else:
            self._rows.put(row)

    def run(self) -> None:
        """Start the tracker, send it rows until None, and finish it."""
        tracker: Any = None

        def start() -> None:
            nonlocal tracker
            made = self._kind.make(self._run)
            made.start()
            tracker = made
            if self._run.last_step == 0 or self._kind.settings_can_change:
                tracker.store_init_configuration(dict(self._run.settings))

        self._attempt(start)
        while (row := self._rows.get()) is not None:
            if tracker is not None:
                self._attempt(partial(tracker.log, row, step=int(row["step"])))
        if tracker is not None:
            self._attempt(tracker.finish)

    def _attempt(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a boundary: trackers raise anything, and some exit
            self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, reason: str) -> None:
        if not self._has_failed:
            log.warning("tracker.failed", tracker=self.name, reason=reason, consequence="training goes on")
        self._has_failed = True


def require_packages(config: TrackersConfig) -> None:
    """Check that the trackers of the recipe are installed; accelerate would silently skip them.

    Raises:
        ConfigError: a tracker is not installed; names the command that installs it.
    """
    for name in config.use:
        kind = KINDS[name]
        if missing := [module for module in kind.modules if importlib.util.find_spec(module) is None]:
            raise ConfigError(
                f"trackers.use names {name!r}, but {missing[0]} is not installed; pip install {kind.package}, or leave "
                f"{name!r} out"
            )


def described(settings: TrainerSettings | SftSettings) -> dict[str, str]:
    """Return the settings that decide what is learned, by dotted name: not the addresses, which may hold secrets."""
    sections = ("run", "model", "data", "sampling", "algorithm", "filters", "demonstrations", "sft", "trainer")
    return {
        name: str(value)
        for section in sections
        if getattr(settings, section, None) is not None
        for name, value in leaves(section, getattr(settings, section).model_dump(mode="json")).items()
    }


def _tensorboard(run: TrackedRun) -> "GeneralTracker":
    from accelerate.tracking import TensorBoardTracker

    # TensorBoard hides earlier values of steps from purge_step on.
    return TensorBoardTracker(run.name, run.folder / "tensorboard", purge_step=run.last_step + 1)


def _wandb(run: TrackedRun) -> "GeneralTracker":
    from accelerate.tracking import WandBTracker

    class Tracker(WandBTracker):  # type: ignore[misc]  # accelerate is untyped
        """Plots over `step`, but numbers rows independently: W&B ignores a row with a number below the newest."""

        def start(self) -> None:
            super().start()
            self.run.define_metric("*", step_metric="step")
            self.next_number = self.run.starting_step

        def log(self, values: dict[str, float], step: int) -> None:
            number = max(step, self.next_number)
            super().log(values, step=number, commit=True)
            self.next_number = number + 1

    settings = {"console": "off", "silent": True}  # the trainer's log is its own
    return Tracker(run.project, id=run.run_id, name=run.name, dir=str(run.folder), resume="allow", settings=settings)


def _mlflow(run: TrackedRun) -> "GeneralTracker":
    import mlflow
    from accelerate.tracking import MLflowTracker

    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(f"sqlite:///{run.folder.absolute() / 'mlflow.db'}")

    class Tracker(MLflowTracker):  # type: ignore[misc]  # accelerate is untyped
        """Stores the id that MLflow assigns to the run, and gives values names that MLflow accepts."""

        def start(self) -> None:
            super().start()
            write_atomically(file, json.dumps({"run_id": run.run_id, "mlflow_run_id": self.active_run.info.run_id}))

        def store_init_configuration(self, values: dict[str, str]) -> None:
            super().store_init_configuration(_accepted_by_mlflow(values))

        def log(self, values: dict[str, float], step: int) -> None:
            super().log(_accepted_by_mlflow(values), step=step)

    file = run.folder / "mlflow-run.json"
    known = _known_to_mlflow(file, run.run_id)
    return Tracker(run.project, logging_dir=str(run.folder / "mlflow"), run_id=known, run_name=run.name)


def _known_to_mlflow(file: Path, run_id: str) -> str | None:
    """Return the id that MLflow assigned to the run; None if it has not, or the file was cut off."""
    try:
        known = json.loads(file.read_text())
        return str(known["mlflow_run_id"]) if known["run_id"] == run_id else None
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return None


def _accepted_by_mlflow(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by names without the characters for which MLflow rejects a whole row, as in `visual.*`."""
    return {re.sub(r"[^\w./: -]", "_", name): value for name, value in values.items()}


def _swanlab(run: TrackedRun) -> "GeneralTracker":
    import swanlab
    from accelerate.tracking import SwanLabTracker

    class Tracker(SwanLabTracker):  # type: ignore[misc]  # accelerate is untyped
        """Stores the run's settings only: accelerate adds one, `allow_val_change`."""

        def store_init_configuration(self, values: dict[str, str]) -> None:
            swanlab.config.update(values)

    return Tracker(run.project, id=run.run_id, name=run.name, resume="allow", log_dir=str(run.folder / "swanlab"))


def _trackio(run: TrackedRun) -> "GeneralTracker":
    import trackio
    from accelerate.tracking import TrackioTracker

    class Tracker(TrackioTracker):  # type: ignore[misc]  # accelerate is untyped
        """Stores the run's settings only: accelerate adds one, `allow_val_change`."""

        def store_init_configuration(self, values: dict[str, str]) -> None:
            trackio.config.update(values)

    return Tracker(run.project, name=run.run_id, resume="allow")  # it finds a run to resume by its name


KINDS: Mapping[str, TrackerKind] = {
    "tensorboard": TrackerKind(
        package="tensorboard", modules=["tensorboard"], make=_tensorboard, settings_can_change=False
    ),
    "wandb": TrackerKind(package="wandb", modules=["wandb"], make=_wandb, settings_can_change=True),
    "mlflow": TrackerKind(
        package="mlflow", modules=["mlflow", "sqlalchemy", "alembic"], make=_mlflow, settings_can_change=False
    ),
    "swanlab": TrackerKind(package="swanlab", modules=["swanlab"], make=_swanlab, settings_can_change=True),
    "trackio": TrackerKind(package="trackio", modules=["trackio"], make=_trackio, settings_can_change=True),
}
"""Every tracker by its name in a recipe."""
