"""Checkpoints: folders that are complete or absent.

    checkpoints/
      step-000010/
        model/           weights, configuration, tokenizer, processor: a model folder for transformers and SGLang
        optimizer.pt     AdamW's averages, number of updates, random state, settings
        state.json       what the controller must know beside the weights
        manifest.json    every file above with its size; written last
      latest             name of the newest checkpoint

Invariants: a folder named step-N was complete when it got that name: it is written under another name, flushed to
the disk, and renamed. Once there is a checkpoint, there is one at every moment: a step that is saved again has its old
checkpoint renamed aside, not deleted, until the new one has the name. What the disk loses afterwards (a truncated or
missing file) is found by the sizes in the manifest, and the checkpoint before it is taken.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from penstock.errors import SetupError

log = structlog.get_logger()

_NAME = re.compile(r"step-(\d{6,})")
_REPLACED = ".replaced"
"""Ends the name of a checkpoint that is being replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    path: Path
    state: Mapping[str, Any]
    """The state given to `CheckpointStore.save`."""

    @property
    def model_path(self) -> Path:
        """The model folder."""
        return self.path / "model"


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        """Use `folder`, which `save` makes; keep the newest `keep` checkpoints."""
        self.folder = folder
        self._keep = keep

    def save(self, step: int, state: Mapping[str, Any], write: Callable[[Path], None]) -> Checkpoint:
        """Write a checkpoint, make it the latest, and delete the oldest beyond `keep`. Blocks.

        Args:
            step: Optimizer steps taken. An existing checkpoint of this step is replaced.
            state: Plain data for JSON.
            write: Writes the other files into the folder it is given.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._restore_replaced()
        for partial in self.folder.glob(".*.partial"):  # left by a trainer that was killed
            shutil.rmtree(partial)
        final = self.folder / f"step-{step:06d}"
        partial = self.folder / f".{final.name}.partial"
        partial.mkdir()
        write(partial)
        (partial / "state.json").write_text(json.dumps(state))
        sizes = {str(path.relative_to(partial)): path.stat().st_size for path in sorted(_files(partial))}
        (partial / "manifest.json").write_text(json.dumps({"step": step, "sizes_bytes": sizes}, indent=1))
        for path in (*_files(partial), *(p for p in partial.rglob("*") if p.is_dir()), partial):
            _flush(path)
        replaced = self.folder / f".{final.name}{_REPLACED}"
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        _flush(self.folder)
        self._point_at(final.name)
        if replaced.exists():
            shutil.rmtree(replaced)
        self._delete_others(step)
        return Checkpoint(step=step, path=final, state=state)

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None if this folder never had one.

        Raises:
            SetupError: there are or were checkpoints, but none is complete.
        """
        self._restore_replaced()
        paths = self._paths()
        pointer = self.folder / "latest"
        newest = pointer.read_text().strip() if pointer.is_file() else ""
        if not paths and newest:
            raise SetupError(
                f"{pointer} names {newest}, but {self.folder} holds no checkpoint; restore one from a backup, or "
                "delete the folder to start the run anew"
            )
        if not paths:
            return None
        ordered = sorted(paths, key=lambda path: (path.name != newest, -_step(path)))
        problems = []
        for path in ordered:
            try:
                checkpoint = _read(path)
            except (OSError, ValueError, KeyError, TypeError) as error:
                problems.append(f"{path.name}: {error}")
                log.warning("checkpoint.refused", path=str(path), reason=str(error))
                continue
            return checkpoint
        raise SetupError(
            f"no checkpoint in {self.folder} is complete ({'; '.join(problems)}); restore one from a backup, or "
            "delete the folder to start the run anew"
        )

    def newest(self, *, before: int) -> Checkpoint | None:
        """Return the newest complete checkpoint of fewer than `before` steps; None where there is none."""
        for path in sorted(self._paths(), key=_step, reverse=True):
            if _step(path) >= before:
                continue
            try:
                return _read(path)
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("checkpoint.refused", path=str(path), reason=str(error))
        return None

    def _restore_replaced(self) -> None:
        """Finish what a trainer that was killed while it replaced a checkpoint had begun."""
        for replaced in self.folder.glob(f".step-*{_REPLACED}"):
            final = self.folder / replaced.name.removeprefix(".").removesuffix(_REPLACED)
            if final.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(final)

    def _paths(self) -> list[Path]:
        return [path for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name) and path.is_dir()]

    def _point_at(self, name: str) -> None:
        temporary = self.folder / ".latest.tmp"
        temporary.write_text(name + "\n")
        _flush(temporary)
        os.replace(temporary, self.folder / "latest")
        _flush(self.folder)

    def _delete_others(self, step: int) -> None:
        """Delete all but the newest `keep`, and later steps, which belong to an abandoned history."""
        paths = sorted(self._paths(), key=_step)
        later = [path for path in paths if _step(path) > step]
        for path in (*later, *paths[: len(paths) - len(later)][: -self._keep]):
            shutil.rmtree(path)


def _read(path: Path) -> Checkpoint:
    manifest = json.loads((path / "manifest.json").read_text())
    for name, size_bytes in manifest["sizes_bytes"].items():
        found_bytes = (path / name).stat().st_size
        if found_bytes != size_bytes:
            raise ValueError(f"{name} has {found_bytes} bytes instead of {size_bytes}")
    return Checkpoint(step=manifest["step"], path=path, state=json.loads((path / "state.json").read_text()))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
