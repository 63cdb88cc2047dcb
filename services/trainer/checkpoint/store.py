"""Checkpoints: folders that are complete or absent.

    checkpoints/
      step-000010/
        model/           weights, configuration, tokenizer, processor: a model folder for transformers and SGLang
        adapter/         in its place where only adapters are trained: a folder of the PEFT library
        optimizer/       AdamW's averages
        reference/       the reference policy, where algorithm.kl is on
        trainer.pt       number of updates, random state, settings
        state.json       what the controller must know beside the weights
        manifest.json    every file above with its size and digest; written last
      latest             name of the newest checkpoint
      .writer-<id>/      what the store that may write has taken out of the way, or is about to put in place

Invariants: a folder named step-N was complete when it got that name: it is written under another name, flushed to
the disk, and renamed. Once there is a checkpoint, there is one at every moment: a step that is saved again has its old
checkpoint renamed aside, not deleted, until the new one has the name. What the disk loses afterwards (a missing,
truncated or changed file) is found by the sizes and digests in the manifest, and the checkpoint before it is taken.

One store may write at a time. Every change of a checkpoint goes through a rename from or into the writer's folder,
which the next writer renames away. So a trainer that was replaced while it was saving changes nothing of its
successor's: its next rename fails.
"""

import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from penstock.errors import SetupError, SupersededError
from penstock.runtime.disk_space import flush, is_disk_full
from penstock.runtime.file_digest import file_digest
from services.trainer.checkpoint.holding import MANIFEST, taken

log = structlog.get_logger()

_NAME = re.compile(r"step-(\d{6,})")
_WRITER = ".writer-"
"""Begins the name of a writer's folder."""
_MAX_READERS = 8
"""Files that are read at once to compare their digests."""
_MAX_LISTINGS = 5
"""Times that `latest` lists the checkpoints of a live run, which deletes old ones meanwhile."""
_MISSING = (FileNotFoundError, NotADirectoryError)
"""Any other failure says nothing about what the disk holds: EIO is a bad sector, or a network disk's timeout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    path: Path
    state: Mapping[str, Any]
    """The state given to `CheckpointStore.save`."""

    @property
    def model_path(self) -> Path:
        """The model folder. A run that trains adapters alone has none."""
        return self.path / "model"


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int, room_remedy: str | None = None) -> None:
        """Use the checkpoints in a folder.

        Args:
            folder: The folder, which `save` makes.
            keep: How many of the newest checkpoints are kept.
            room_remedy: What a person must do if there is no room; None: make some and start the run again.
        """
        self.folder = folder
        self._room_remedy = room_remedy
        self._keep = keep
        self._writer = folder / f"{_WRITER}{uuid.uuid4().hex}"
        self._is_claimed = False

    @property
    def had_writer(self) -> bool:
        """Whether a store, this one or an earlier one, has ever claimed the folder: the last one's own folder stays."""
        return any(self.folder.glob(f"{_WRITER}*"))

    def claim(self) -> None:
        """Become the only store that may write here, and finish what an earlier one had begun. Blocks.

        `save` claims a folder that this store never claimed.
        """
        self._writer.mkdir(parents=True)
        for number, other in enumerate(self.folder.glob(f"{_WRITER}*")):
            if other == self._writer:
                continue
            taken = self._writer / f"earlier-{number}"
            other.rename(taken)
            for aside in taken.rglob("step-*.aside"):
                final = self.folder / aside.name.removesuffix(".aside")
                if not final.exists():
                    aside.rename(final)
            self._discard(taken)
        for partial in self.folder.glob(".*.partial"):
            shutil.rmtree(partial, ignore_errors=True)  # a trainer that was replaced may still be writing it
        self._is_claimed = True

    def save(
        self, step: int, state: Mapping[str, Any], write: Callable[[Path], Mapping[str, str] | None]
    ) -> Checkpoint:
        """Write a checkpoint, make it the latest, and delete the oldest beyond `keep`. Blocks.

        Args:
            step: Optimizer steps taken. An existing checkpoint of this step is replaced.
            state: Plain data for JSON.
            write: Writes the other files into the folder it is given, and may return the digest (`file_digest`) of
                each that is on the disk, by its path in the folder: other machines flush what they have written.

        Raises:
            SupersededError: another store has claimed the folder; nothing of its checkpoints is changed.
            SetupError: there is no room for the checkpoint. What was written of it is removed.
        """
        if not self._is_claimed:
            self.claim()
        name = f"step-{step:06d}"
        partial = self.folder / f".{name}.{self._writer.name.removeprefix(_WRITER)}.partial"
        if partial.exists():
            shutil.rmtree(partial)
        try:
            partial.mkdir()
            digests = dict(write(partial) or {})
            (partial / "state.json").write_text(json.dumps(state))
            for path in _files(partial):
                if str(path.relative_to(partial)) not in digests:
                    flush(path)
                    digests[str(path.relative_to(partial))] = file_digest(path)
            files = {
                file: {"size_bytes": (partial / file).stat().st_size, "xxh3": digest}
                for file, digest in sorted(digests.items())
            }
            manifest = partial / MANIFEST
            manifest.write_text(json.dumps({"step": step, "files": files}, indent=1))
            for path in (manifest, *(p for p in partial.rglob("*") if p.is_dir()), partial):
                flush(path)
            self._rename_into_place(partial, self.folder / name)
            self._point_at(name)
            self._delete_others(step)
        except Exception as error:  # also what the libraries raise whose folder is removed under them
            is_superseded = not self._writer.exists()
            problem = ""
            if is_disk_full(error) and not is_superseded:
                problem = self._describe_lack_of_room(error, step, partial)
            shutil.rmtree(partial, ignore_errors=True)
            if is_superseded:
                raise SupersededError(
                    f"another trainer has taken over {self.folder} while this one was saving step {step}; let that one "
                    "go on, or stop it and start this one again"
                ) from None
            if problem:
                raise SetupError(problem) from None
            raise
        return Checkpoint(step=step, path=self.folder / name, state=state)

    def _describe_lack_of_room(self, error: OSError, step: int, partial: Path) -> str:
        """Say why there was no room for the checkpoint of `step`, of which `partial` is what was written."""
        paths, _ = self._listed()
        room_mib = (_size_bytes(partial) + shutil.disk_usage(self.folder).free) / 2**20
        room = f"it had {room_mib:,.0f} MiB" if error.errno == errno.ENOSPC else ""  # says nothing about a quota
        needed = f"{paths[0].name} takes {_size_bytes(paths[0]) / 2**20:,.0f} MiB" if paths else ""
        sizes = ", and ".join(filter(None, (room, needed)))
        remedy = self._room_remedy or _describe_restart(paths)
        reason = "; ".join(filter(None, (error.strerror, sizes, remedy)))
        return f"no room for the checkpoint of step {step} in {self.folder}: {reason}"

    def _rename_into_place(self, partial: Path, final: Path) -> None:
        """Give a complete folder its name; the one that has it goes aside first."""
        ready, aside = self._writer / final.name, self._writer / f"{final.name}.aside"
        partial.rename(ready)
        if final.exists():
            final.rename(aside)
        ready.rename(final)
        flush(self.folder)
        if aside.exists():
            self._discard(self._rename_away(aside))

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, or None if this folder never had one.

        The run may be live: if checkpoints come or go meanwhile, this looks again.

        Raises:
            SetupError: there are or were checkpoints, but none is complete; or a file cannot be read.
        """
        listed = self._listed()
        for _ in range(_MAX_LISTINGS - 1):
            try:
                return self._latest(*listed)
            except SetupError:
                found = self._listed()
                if found == listed:
                    raise
                listed = found
        return self._latest(*listed)

    def _latest(self, paths: Sequence[Path], pointed: str) -> Checkpoint | None:
        """Do as `latest` with what `_listed` returned."""
        if not paths and pointed:
            raise SetupError(
                f"{self.folder / 'latest'} names {pointed}, but {self.folder} holds no checkpoint; restore one from a "
                "backup, or delete the folder to start the run anew"
            )
        if not paths:
            return None
        checkpoint, problems = _first_complete(paths)
        if checkpoint is not None:
            return checkpoint
        raise SetupError(
            f"no checkpoint in {self.folder} is complete ({'; '.join(problems)}); restore one from a backup, or "
            "delete the folder to start the run anew"
        )

    def newest(self, *, before: int) -> Checkpoint | None:
        """Return the newest complete checkpoint of fewer than `before` steps; None where there is none.

        Raises:
            SetupError: a file cannot be read.
        """
        paths = (path for path in self._paths() if _step(path) < before)
        return _first_complete(sorted(paths, key=_step, reverse=True))[0]

    def steps(self) -> list[int]:
        """Steps of which there is a checkpoint, complete or not, in order."""
        return sorted(map(_step, self._paths()))

    def _paths(self) -> list[Path]:
        try:
            paths = [self.folder / name for name in os.listdir(self.folder) if _NAME.fullmatch(name)]
            return [path for path in paths if path.is_dir()]
        except _MISSING:
            return []
        except OSError as error:
            raise _unreadable(error, self.folder) from None

    def _pointed(self) -> str:
        """Return what `latest` names; empty if there is none."""
        pointer = self.folder / "latest"
        try:
            return pointer.read_text().strip()
        except _MISSING:
            return ""
        except OSError as error:
            raise _unreadable(error, pointer) from None

    def _listed(self) -> tuple[list[Path], str]:
        """Return the checkpoints as a run prefers to continue from them, and what `latest` names, which comes first."""
        pointed = self._pointed()
        return sorted(self._paths(), key=lambda path: (path.name != pointed, -_step(path))), pointed

    def _point_at(self, name: str) -> None:
        temporary = self._writer / "latest"
        temporary.write_text(name + "\n")
        flush(temporary)
        os.replace(temporary, self.folder / "latest")
        flush(self.folder)

    def _delete_others(self, step: int) -> None:
        """Delete all but the newest `keep`, and later steps, which belong to an abandoned history.

        Those that others read (`holding`) stay until the next save.
        """
        paths = sorted(self._paths(), key=_step)
        later = [path for path in paths if _step(path) > step]
        for path in (*later, *paths[: len(paths) - len(later)][: -self._keep]):
            with taken(path) as is_free:
                unwanted = self._rename_away(path) if is_free else None
            if unwanted is not None:  # after the lock: NFS keeps the name of a file that is open
                self._discard(unwanted)

    def _rename_away(self, path: Path) -> Path:
        """Give a checkpoint that nobody needs a name that is none of a checkpoint, and return that."""
        unwanted = self._writer / f"{path.name}.{uuid.uuid4().hex[:8]}.unwanted"
        path.rename(unwanted)
        return unwanted

    def _discard(self, path: Path) -> None:
        """Delete a folder as far as that is possible: on NFS not what another process has open. What stays is in the
        writer's folder, and the next `claim` tries again.

        Raises:
            FileNotFoundError: another store has claimed the folder.
        """
        shutil.rmtree(path, ignore_errors=True)
        if not self._writer.exists():
            raise FileNotFoundError(self._writer)
        if path.exists():
            log.warning("checkpoint.not_deleted", path=str(path))


def _describe_restart(paths: Sequence[Path]) -> str:
    """Say what to do after a lack of room, given the checkpoints in the order in which a run prefers them."""
    example = f", for example by deleting {paths[-1].name}," if len(paths) > 1 else ""
    start = paths[0].name if paths else "the beginning"
    return f"make room there{example} and start the run again, which continues from {start}"


def _first_complete(paths: Sequence[Path]) -> tuple[Checkpoint | None, list[str]]:
    """Return the first complete checkpoint, if any, and what is wrong with each before it.

    Raises:
        SetupError: a file cannot be read. Its checkpoint may be intact, and the next save would delete it.
    """
    problems: list[str] = []
    for number, path in enumerate(paths, start=1):
        try:
            return _read(path), problems
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, OSError) and not isinstance(error, _MISSING):
                is_last = number == len(paths)
                instead = "" if is_last else f"; to continue from {paths[number].name} instead, move {path.name} away"
                raise _unreadable(error, path, instead) from None
            problems.append(f"{path.name}: {error}")
            log.warning("checkpoint.refused", path=str(path), reason=str(error))
    return None, problems


def _unreadable(error: OSError, path: Path, instead: str = "") -> SetupError:
    remedy = f"mend the disk or its rights and start again{instead}"
    return SetupError(f"{error.filename or path} cannot be read: {error.strerror}; {remedy}")


def _read(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder, all files of which are read.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError, KeyError, TypeError: it is damaged.
    """
    manifest = json.loads((path / MANIFEST).read_text())
    if "files" not in manifest:
        raise ValueError("an earlier version of Penstock wrote it")
    files: Mapping[str, Mapping[str, Any]] = manifest["files"]
    for name, written in files.items():
        found_bytes = (path / name).stat().st_size
        if found_bytes != written["size_bytes"]:
            raise ValueError(f"{name} has {found_bytes} bytes instead of {written['size_bytes']}")
    with ThreadPoolExecutor(_MAX_READERS, thread_name_prefix="digest") as threads:
        found = threads.map(file_digest, [path / name for name in files])
        for (name, written), digest in zip(files.items(), found, strict=True):
            if digest != written["xxh3"]:
                raise ValueError(f"{name} does not hold what was written: its digest is not that of the manifest")
    return Checkpoint(step=manifest["step"], path=path, state=json.loads((path / "state.json").read_text()))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
