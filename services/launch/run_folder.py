"""The folder of one run: its recipe, logs, metrics, checkpoints and the store of its nats-server."""

import dataclasses
import fcntl
import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TextIO

from penstock import config as configuration
from penstock.config import RunConfig
from penstock.errors import SetupError
from penstock.runtime.files import write_atomically
from penstock.telemetry.serving import targets_folder
from services.recipe import Recipe

_CONTENTS = (
    ("config.toml", "the resolved recipe; `penstock train <folder>/config.toml` starts a run like it"),
    ("live.toml", "the same with this launch's addresses; `penstock serve X --config` it adds a process to the run"),
    ("logs/", "one file for each process, and its predecessor"),
    ("metrics.jsonl", "one line for each optimizer step"),
    ("evaluations.jsonl, evaluations/", "one line for each evaluation, and its answers"),
    ("episodes/", "what the policy wrote, token by token, for `penstock view`"),
    ("checkpoints/, curves.png", "written by the trainer"),
    ("nats/", "the store of the run's own nats-server"),
)

TRAIN: Final = "penstock train"
"""The command whose runs have a launcher."""
_LOOKED_AT_S: Final = 1.0
"""Longer than `penstock status` and the like hold the lock to see whether it is free."""
_TRY_EVERY_S: Final = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder `path` of one run; at most one launcher works in it at a time."""

    path: Path

    @classmethod
    def create(cls, run: RunConfig) -> "RunFolder":
        """Create <run.dir>/<run.name>-<YYYYmmdd-HHMMSS>, or use `run.folder` if it is given.

        Raises:
            SetupError: it cannot be created, or `run.folder` holds a run already.
        """
        started = time.strftime("%Y%m%d-%H%M%S")
        names = [f"{run.name}-{started}", *(f"{run.name}-{started}-{number}" for number in range(2, 100))]
        try:
            if run.folder is not None:
                run.folder.mkdir(parents=True, exist_ok=True)
                folder = cls(run.folder)
                if folder.config_file.exists():
                    raise SetupError(f"run.folder = {str(run.folder)!r} holds a run already; use --resume {run.folder}")
            else:
                run.dir.mkdir(parents=True, exist_ok=True)
                folder = cls(next(run.dir / name for name in names if _made(run.dir / name)))
        except OSError as error:
            raise _cannot_be_made(run, error) from None
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Return the folder of an earlier run.

        Raises:
            SetupError: it holds no run.
        """
        folder = cls(path)
        if not folder.config_file.is_file():
            raise SetupError(
                f"--resume {path}: no config.toml in it; give the folder of an earlier run, runs/<name>-<start>"
            )
        return folder

    @staticmethod
    def place(run: RunConfig) -> Path:
        """Return the folder that is already there and in which `create` would make the run's, or its parents.

        Raises:
            SetupError: it cannot be written to.
        """
        wanted = (run.folder or run.dir).absolute()
        try:
            place = next(path for path in (wanted, *wanted.parents) if path.exists())
            with tempfile.TemporaryFile(dir=place):
                return place
        except OSError as error:
            raise _cannot_be_made(run, error) from None

    @staticmethod
    def pattern(run: RunConfig) -> str:
        """Return the path that `create` would give the folder, for display."""
        return str(run.folder or run.dir / f"{run.name}-<start>")

    @staticmethod
    def describe(path: str) -> list[str]:
        """Describe the contents of the folder at `path`, in lines."""
        width = max(len(name) for name, _ in _CONTENTS)
        return [f"run folder {path}", *(f"  {name.ljust(width)}  {meaning}" for name, meaning in _CONTENTS)]

    @property
    def config_file(self) -> Path:
        """The resolved recipe."""
        return self.path / "config.toml"

    @property
    def live_file(self) -> Path:
        """The resolved recipe with the addresses of this launch."""
        return self.path / "live.toml"

    @property
    def logs(self) -> Path:
        """Folder of the processes' logs."""
        return self.path / "logs"

    @property
    def launcher_log(self) -> Path:
        """The launcher's own log, because the terminal is for the display."""
        return self.logs / "launcher.log"

    @property
    def metrics_file(self) -> Path:
        """One JSON object for each optimizer step, written by the trainer."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations_file(self) -> Path:
        """One JSON object for each evaluation, written by the trainer."""
        return self.path / "evaluations.jsonl"

    @property
    def nats(self) -> Path:
        """Folder of the run's own nats-server."""
        return self.path / "nats"

    @property
    def had_launcher(self) -> bool:
        """Whether a launcher has ever worked in the folder: its lock stays."""
        return self._lock_file.exists()

    @property
    def command(self) -> str:
        """The command that works in the folder, or was the last one to, such as `penstock sft`; empty: unknown."""
        with suppress(OSError):
            return self._lock_file.read_text()
        return ""

    def note_command(self, command: str) -> None:
        """Write down which command has locked the folder.

        Raises:
            OSError: the disk is full.
        """
        self._lock_file.write_text(command)

    @property
    def _lock_file(self) -> Path:
        return self.path / ".lock"

    def forget_targets(self) -> None:
        """Remove the addresses for Prometheus that killed processes left."""
        folder, name = targets_folder(self.path), self.path.absolute().name
        for file in folder.glob(f"{glob.escape(name)}.*.json"):
            if _run_of_target(file) == name:  # and not a neighbour with a dot in its name
                file.unlink(missing_ok=True)
        with suppress(OSError):  # it is another run's too
            folder.rmdir()

    def write_config(self, recipe: Recipe) -> None:
        """Store the recipe, so that the run can be continued and repeated; the file is complete at any moment."""
        self._write_config(dump_repeatable(recipe).encode())

    def write_live(self, recipe: Recipe) -> None:
        """Store the recipe with the addresses of this launch; the file is complete at any moment."""
        write_atomically(self.live_file, configuration.dump(recipe))

    def renew_config(self) -> None:
        """Store the recipe that is there: viewers take the file's time for that of the last start."""
        self._write_config(self.config_file.read_bytes())

    def _write_config(self, content: bytes) -> None:
        self.logs.mkdir(exist_ok=True)
        write_atomically(self.config_file, content)

    def discard_unused(self) -> bool:
        """Remove the folder if it holds only files from before a run begins; return whether it is gone.

        Those are the recipe, the launcher's log, empty files and folders. If there are logs of processes, results or
        foreign files, the whole folder stays. Not to be called within `locked`, or while this process
        logs to the folder: NFS keeps the name of a file that is open.
        """
        with suppress(OSError, SetupError):
            with self.locked():
                own = {self.config_file, self.live_file, self.launcher_log, self._lock_file}
                files = [path for path in self.path.rglob("*") if path.is_symlink() or not path.is_dir()]
                if not all(path in own or not path.lstat().st_size for path in files):
                    return False
                self.clear()
            self.remove_cleared()
        return not self.path.exists()

    def clear(self) -> None:
        """Remove all but the lock; the recipe goes last, so that what cannot be removed is in a run folder still.

        Raises:
            OSError: a file cannot be removed.
        """
        inside = [path for path in self.path.iterdir() if path != self._lock_file]
        for path in sorted(inside, key=lambda path: path == self.config_file):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def remove_cleared(self) -> None:
        """Remove the folder that was cleared, after `locked` has ended, because its file is open.

        Raises:
            OSError: it cannot be removed, or has a file again.
        """
        self._lock_file.unlink(missing_ok=True)
        self.path.rmdir()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other launchers out; the lock ends with the process.

        Raises:
            SetupError: another launcher uses the folder, or it cannot be written or locked.
        """
        try:
            file = self._lock_file.open("a")  # its content is the holder's
        except OSError as error:
            raise SetupError(
                f"the run folder {self.path} cannot be written: {error.strerror}; change its owner or rights"
            ) from None
        with file:
            self._take(file)
            yield

    def _take(self, lock: TextIO) -> None:
        """Lock the open file; wait for those that only look whether a launcher works in the folder."""
        give_up_at = time.monotonic() + _LOOKED_AT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= give_up_at:
                    raise SetupError(f"another `penstock` command is running in {self.path}; stop it first") from None
            except OSError as error:
                raise SetupError(
                    f"the run folder {self.path} cannot be locked: {error.strerror}; mount its file system with locks "
                    "(Lustre: option flock; NFS: with lockd), or set run.dir to a folder on another one"
                ) from None
            else:
                if not self._is_lock(lock):
                    raise SetupError(f"the run folder {self.path} has just been deleted")
                return
            time.sleep(_TRY_EVERY_S)

    def _is_lock(self, file: TextIO) -> bool:
        """Return whether this open file is the folder's lock; it may have been removed while this process waited."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._lock_file.stat())
        except FileNotFoundError:
            return False


def dump_repeatable(recipe: Recipe) -> str:
    """Return the recipe as TOML without `run.folder`: a run that is started from it needs a folder of its own."""
    run = recipe.run.model_copy(update={"folder": None})
    return configuration.dump(recipe.model_copy(update={"run": run}))


def _cannot_be_made(run: RunConfig, error: OSError) -> SetupError:
    key, path = ("run.dir", run.dir) if run.folder is None else ("run.folder", run.folder)
    return SetupError(f"{key} = {str(path)!r} cannot be made: {error.strerror}; choose another")


def _made(path: Path) -> bool:
    try:
        path.mkdir()
    except FileExistsError:
        return False
    return True


def _run_of_target(file: Path) -> str:
    """Return the run whose process Prometheus finds by the file; empty if it is gone or foreign."""
    try:
        [target] = json.loads(file.read_text())
        return str(target["labels"]["run"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""
