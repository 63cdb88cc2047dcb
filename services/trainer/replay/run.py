"""A recorded run on disk: its checkpoints, recorded steps and metrics, as a run folder or as one file.

The file is a tar of a run folder with a single step: config.toml, the recording, the checkpoint before it, and the
step's line of metrics.jsonl. It is replayed like any run folder.
"""

import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.errors import SetupError
from penstock.runtime.disk_space import disk_full_reported
from penstock.telemetry.json_lines import read_object
from services.trainer.checkpoint.store import Checkpoint, CheckpointStore
from services.trainer.replay.recording import Recording, describe_steps, read_recording, recorded_steps, step_folder

GROUPS_FOLDER = "groups"
_CHECKPOINTS_FOLDER = "checkpoints"
_METRICS_FILE = "metrics.jsonl"
_CONFIG_FILE = "config.toml"
TEMPORARY_ROOM = "make room there, or set TMPDIR to another folder"
"""The remedy where a replay's temporary files find no room."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The run folder `path`."""

    path: Path

    @property
    def groups(self) -> Path:
        """Folder of the recordings."""
        return self.path / GROUPS_FOLDER

    def only_step(self) -> int:
        """Return the only recorded step.

        Raises:
            SetupError: no step is recorded, or several are.
        """
        steps = recorded_steps(self.groups)
        if len(steps) != 1:
            raise SetupError(f"{self.path}: give --step N; {describe_steps(steps)}")
        return steps[0]

    def recording(self, step: int, overrides: Sequence[str] = ()) -> Recording:
        """Read the recording of `step`; raises what `read_recording` does."""
        return read_recording(self.groups, step, overrides)

    def checkpoint_before(self, step: int) -> Checkpoint | None:
        """Return the newest complete checkpoint before `step`, or None to start from the base model.

        Raises:
            SetupError: a step between the nearest checkpoint and `step` is not recorded.
        """
        checkpoint = CheckpointStore(self.path / _CHECKPOINTS_FOLDER, keep=1).newest(before=step)
        first = 1 if checkpoint is None else checkpoint.step + 1
        missing = sorted(set(range(first, step)) - set(recorded_steps(self.groups)))
        if missing:
            start = (
                "no checkpoint before it is kept"
                if checkpoint is None
                else f"the nearest checkpoint is of step {first - 1}"
            )
            raise SetupError(
                f"step {step} needs a checkpoint of step {step - 1}, or recorded steps that lead to it: {start}, and "
                f"step {missing[0]} is not recorded in {self.groups}; replay another step, or train with "
                "--trainer.record_groups=true and a larger --trainer.keep_checkpoints"
            )
        return checkpoint

    def metrics(self, step: int) -> Mapping[str, Any]:
        """Return the step's line of metrics.jsonl; empty if there is none, for example because the step failed."""
        path = self.path / _METRICS_FILE
        for line in path.read_text().splitlines() if path.is_file() else []:
            row = read_object(line)
            if row.get("step") == step:
                return row
        return {}


@contextmanager
def opened_run(path: Path) -> Iterator[RecordedRun]:
    """Open a run folder, or a file that `export_step` wrote, which is unpacked into a temporary folder.

    Raises:
        SetupError: `path` is neither, or there is no room to unpack it.
    """
    if path.is_dir():
        yield RecordedRun(path)
        return
    with TemporaryDirectory(prefix="penstock-replay-") as folder:
        try:
            full = disk_full_reported(Path(folder).parent, f"to unpack {path}, {TEMPORARY_ROOM}")
            with full, tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
        except (OSError, tarfile.TarError) as error:
            raise SetupError(
                f"{path} is neither a run folder nor a file that `penstock replay --export` wrote: {error}"
            ) from None
        yield RecordedRun(Path(folder))


def require_new(file: Path) -> None:
    """Check that `export_step` can make `file`, before a replay that takes long.

    Raises:
        SetupError: it exists, or its folder does not.
    """
    if file.exists():
        raise SetupError(f"--export {file} exists already; give another name")
    if not file.parent.is_dir():
        raise SetupError(f"--export {file}: there is no folder {file.parent}; make it, or give another place")


def export_step(run: RecordedRun, step: int, checkpoint: Checkpoint, file: Path) -> None:
    """Write `step` of `run` and everything its replay needs to `file`, an uncompressed tar.

    Args:
        run: The run.
        step: A recorded step of it.
        checkpoint: Of the step before.
        file: Where to write; see `require_new`.

    Raises:
        SetupError: `file` cannot be written.
    """
    partial = file.with_name(f".{file.name}.partial")
    try:
        with TemporaryDirectory(prefix="penstock-replay-") as folder, tarfile.open(partial, "w") as archive:
            metrics = Path(folder) / _METRICS_FILE
            row = run.metrics(step)
            metrics.write_text(json.dumps(row) + "\n" if row else "")
            config = run.path / _CONFIG_FILE
            if config.is_file():
                archive.add(config, _CONFIG_FILE)
            archive.add(metrics, _METRICS_FILE)
            archive.add(step_folder(run.groups, step), f"{GROUPS_FOLDER}/{step_folder(run.groups, step).name}")
            archive.add(checkpoint.path, f"{_CHECKPOINTS_FOLDER}/{checkpoint.path.name}")
        os.replace(partial, file)
    except OSError as error:
        raise SetupError(f"--export {file} cannot be written: {error.strerror}; choose another place") from None
    finally:
        partial.unlink(missing_ok=True)
