"""Finds the files that a source's path names: files, folders, globs, slices of them, and data sets on the Hub.

    train.parquet    data/    data/*.jsonl    train.parquet@[100:200]    hiyouga/geometry3k    hiyouga/geometry3k@[:100]

Invariant: the order of a source's files does not depend on the file system's listing order.
"""

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.errors import ConfigError, DataError
from services.trainer.data.config import DataConfig, SourceConfig
from services.trainer.data.sources import hub
from services.trainer.data.sources.readers.formats import SUFFIXES
from services.trainer.data.sources.splits import choose_files, split_of, split_of_folder

_SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")


class _SavedDict(msgspec.Struct):
    """dataset_dict.json."""

    splits: list[str]


class _SavedFile(msgspec.Struct):
    """A file of a saved data set."""

    filename: str


class _SavedState(msgspec.Struct):
    """state.json."""

    data_files: list[_SavedFile] = msgspec.field(name="_data_files")


SavedT = TypeVar("SavedT", _SavedDict, _SavedState)


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Consecutive files, and which of their rows to read."""

    path: str
    """The path from the settings, without the slice."""
    files: Sequence[Path]
    rows: slice
    revision: str = ""
    """The commit of files from the Hub; otherwise empty."""


def find_files(config: SourceConfig) -> list[Files]:
    """Return the files of each of a source's paths. Data sets on the Hub are downloaded if the cache lacks them.

    Raises:
        ConfigError: a file does not exist, or is of another split than the settings name.
        DataError: a data set or split does not exist.
        UnavailableError: the Hub cannot be reached, and the cache has no complete copy.
    """
    return [_find(path, config) for path in config.paths]


def require_files(config: SourceConfig) -> None:
    """Check that the files exist, without asking the Hub; cheap enough to run before anything else starts.

    Raises:
        ConfigError: as for `find_files`, or a data set on the Hub is one of several paths.
        DataError: a saved data set has no such split, or cannot be read.
    """
    for given in config.paths:
        path, _ = split_slice(given)
        if not hub.is_hub_id(path):
            _existing(path, config)
        elif len(config.paths) > 1:
            raise ConfigError(
                f"data.path: {path!r}, on the Hugging Face Hub, is one of several paths; give each data set a source "
                "of its own, [data.sources.NAME]"
            )


def pin(config: DataConfig) -> DataConfig:
    """Return the settings with the commit of each data set on the Hugging Face Hub, after caching its files.

    Raises:
        DataError: a data set, revision, configuration or split does not exist.
        UnavailableError: the Hub cannot be reached, and its cache has no copy.
    """
    if config.sources:
        sources = {
            name: source.model_copy(update={"revision": _commit(source)}) for name, source in config.sources.items()
        }
        return config.model_copy(update={"sources": sources})
    return config.model_copy(update={"revision": _commit(config)})


def split_slice(path: str) -> tuple[str, slice]:
    """Return the path and its rows: `a.parquet@[10:20]` means rows 10 to 19; negative bounds count from the end."""
    match = _SLICE.fullmatch(path)
    if match is None:
        return path, slice(None)
    start, stop = (int(match[end]) if match[end] else None for end in ("start", "stop"))
    return match["path"], slice(start, stop)


def _find(given: str, config: SourceConfig) -> Files:
    path, rows = split_slice(given)
    if hub.is_hub_id(path):
        snapshot = hub.fetch(path, config=config.hub_config, split=config.split, revision=config.revision)
        return Files(path=path, files=snapshot.files, rows=rows, revision=snapshot.revision)
    found = _existing(path, config)
    if found == [Path(path)] and Path(path).is_dir():
        return Files(path=path, files=_in_folder(Path(path), config), rows=rows)
    return Files(path=path, files=found, rows=rows)


def _commit(config: SourceConfig) -> str:
    for path in config.paths:
        if hub.is_hub_id(split_slice(path)[0]):
            return find_files(config)[0].revision
    return config.revision


def _existing(path: str, config: SourceConfig) -> list[Path]:
    """Return the file, the folder, the files of the glob, or those of a saved data set's split."""
    if (saved := _saved(Path(path), config)) is not None:
        return saved
    found = [Path(path)]
    if not Path(path).exists():
        found = [Path(each) for each in sorted(glob.glob(path, recursive=True)) if Path(each).is_file()]
    if not found:
        raise ConfigError(
            f"data.path = {path!r}: there is no such file; give a file ({', '.join(SUFFIXES)}), a folder, a glob or a "
            "data set on the Hugging Face Hub (owner/name), or leave it out for the built-in data set"
        )
    for each in found:
        if not each.is_dir():
            _require_split(each, split_of(each.name), config)
    return found


def _require_split(path: Path, split: str, config: SourceConfig) -> None:
    """Refuse settings that choose among the files of a folder, and would do nothing to data of one split."""
    if config.hub_config:
        raise ConfigError(
            f"data.path {str(path)!r} has no configurations, so hub_config = {config.hub_config!r} would change "
            'nothing; remove it, or set hub_config = "" where a source takes it from [data]'
        )
    if config.split not in ("", split, path.name.partition(".")[0], split_of_folder(path.parent.name)):
        raise ConfigError(
            f"data.path {str(path)!r} is of one split, {split!r} by its name, so split = {config.split!r} would change "
            'nothing; give the file of that split or the folder of all, or set split = "" to read these rows'
        )


def _saved(folder: Path, config: SourceConfig) -> list[Path] | None:
    """Return the files of a data set that the `datasets` library saved; None if the folder holds none."""
    split = split_of(folder.name)
    if (folder / "dataset_dict.json").is_file():  # as DatasetDict.save_to_disk writes it
        splits = _read(folder / "dataset_dict.json", _SavedDict).splits
        split = config.split or ("train" if "train" in splits or len(splits) != 1 else splits[0])
        if split not in splits:
            raise DataError(
                f"data.path {str(folder)!r} has no split {split!r}; it has {', '.join(splits)}. Name one "
                "with --data.split=..."
            )
        folder = folder / split
    elif not (folder / "state.json").is_file():  # as Dataset.save_to_disk writes it
        return None
    _require_split(folder, split, config)
    return [folder / each.filename for each in _read(folder / "state.json", _SavedState).data_files]


def _in_folder(folder: Path, config: SourceConfig) -> list[Path]:
    names = [each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file()]
    chosen = choose_files(
        names,
        suffixes=SUFFIXES,
        config=config.hub_config,
        split=config.split,
        card=hub.read_card(folder / "README.md"),
        name=f"data.path {str(folder)!r}",
    )
    return [folder / each for each in chosen]


def _read(file: Path, kind: type[SavedT]) -> SavedT:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (msgspec.MsgspecError, OSError) as error:
        raise DataError(f"data.path {str(file)!r} cannot be read: {error}; save the data set again") from None
