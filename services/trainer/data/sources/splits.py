"""Finds the files of a published folder that belong to a configuration and a split, as the `datasets` library does.

The card's front matter names them (`configs:` with `data_files:` or `data_dir:`); where it does not, the files' names
determine the split:

    data/train-00000-of-00002.parquet     train.jsonl     test/problems.parquet     geometry/val.csv
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, Final, cast

import pydantic

from penstock.errors import DataError

DEFAULT_SPLIT: Final = "train"

_SHARD = re.compile(r"(?P<split>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_NOT_DATA = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "config.json"}


class _SplitFiles(pydantic.BaseModel):
    """The files of one split."""

    model_config = pydantic.ConfigDict(coerce_numbers_to_str=True)
    split: str
    path: str | list[str]


class _CardConfig(pydantic.BaseModel):
    """One of the card's `configs`."""

    model_config = pydantic.ConfigDict(coerce_numbers_to_str=True)
    config_name: str = "default"
    default: bool = False
    data_dir: str | None = None
    data_files: str | list[str] | list[_SplitFiles] | dict[str, str | list[str]] | None = None

    def by_split(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Return those of a folder's files that it has, by split: all of `data_dir`, or of the folder, unless it says
        which."""
        folder = PurePosixPath(self.data_dir or "")
        paths = [path for path in map(PurePosixPath, names) if path.is_relative_to(folder)]
        inside = [path.relative_to(folder).as_posix() for path in paths]
        if self.data_files:
            found = {split: _matching(inside, patterns) for split, patterns in self._patterns().items()}
        else:
            found = _by_names(inside)
        return {split: [(folder / each).as_posix() for each in files] for split, files in found.items()}

    def _patterns(self) -> dict[str, str | list[str]]:
        """Patterns of files by split, in any form that a card may use."""
        files = self.data_files
        if isinstance(files, dict):
            return files
        entries = [each for each in files or () if isinstance(each, _SplitFiles)]
        return {each.split: each.path for each in entries} or {DEFAULT_SPLIT: cast(str | list[str], files or [])}


class _Card(pydantic.BaseModel):
    """The part of a card that names files."""

    configs: list[_CardConfig] | None = None


def choose_files(
    names: Sequence[str], *, suffixes: Sequence[str], config: str, split: str, card: Mapping[str, Any], name: str
) -> list[str]:
    """Return the files of a split, in order.

    Args:
        names: Paths of all files, relative to the folder.
        suffixes: The readable formats; if a split has files of several, those of the first of these count.
        config: Name of the configuration; empty for the only or the default one.
        split: Name of the split; empty for `train`, or the only one.
        card: The front matter of the folder's README.md.
        name: Name of the folder in error messages.

    Raises:
        DataError: the configuration or split does not exist, or a shard is missing.
    """
    found = [each for each in sorted(names) if _is_data(each, suffixes)]
    if not found:
        raise DataError(f"{name} has no file that can be read; the formats are {', '.join(suffixes)}")
    entry = _find_in_card(card, config, name)
    if entry is None:  # what says no split and is of another format is no data, as metadata.json beside test.parquet
        data = _of_first_format(found, suffixes)
        found = [each for each in found if _said_split(each) or each in data]
    of_formats = _named_by_files(found, config, name) if entry is None else entry.by_split(found)
    by_split = {split: _of_first_format(each, suffixes) for split, each in of_formats.items() if each}
    if not by_split:
        raise DataError(
            f"{name}: its README.md names no file that is there and can be read; the formats are {', '.join(suffixes)}"
        )
    wanted = split or (DEFAULT_SPLIT if DEFAULT_SPLIT in by_split or len(by_split) > 1 else next(iter(by_split)))
    if wanted not in by_split:
        raise DataError(f"{name} has no split {wanted!r}; it has {', '.join(by_split)}. Name one with --data.split=...")
    _require_all_shards(by_split[wanted], name)
    return by_split[wanted]


def split_of(name: str) -> str:
    """Return the split that the name of a file says, its folders' names included; `train` if none does."""
    return _said_split(name) or DEFAULT_SPLIT


def split_of_folder(name: str) -> str:
    """Return the split whose files are in a folder of this name, if it is one of a split at all."""
    return next((split for split, known in _WORDS.items() if name.lower() in known), name)


def _said_split(name: str) -> str:
    path = PurePosixPath(name)
    if shard := _SHARD.fullmatch(_stem(path)):
        return shard["split"]
    words = [
        word for part in (_stem(path), *reversed(path.parts[:-1])) for word in re.split(r"[^a-z0-9]+", part.lower())
    ]
    return next((split for word in words for split, known in _WORDS.items() if word in known), "")


def _is_data(name: str, suffixes: Sequence[str]) -> bool:
    is_readable = name.lower().endswith(tuple(suffixes))
    return is_readable and PurePosixPath(name).name not in _NOT_DATA and not _is_hidden(name)


def _of_first_format(names: Sequence[str], suffixes: Sequence[str]) -> list[str]:
    """Return the files of the first format that any file has."""
    of_formats = ([each for each in names if each.lower().endswith(suffix)] for suffix in suffixes)
    return next(filter(None, of_formats), [])


def _find_in_card(card: Mapping[str, Any], config: str, name: str) -> _CardConfig | None:
    """Return the entry of a configuration; None if no entry of the card says which files are its own."""
    entries = _read_card(card, name).configs or []
    if not any(each.data_files or each.data_dir for each in entries):
        return None
    configs = {each.config_name: each for each in entries}
    default = next((each for each, entry in configs.items() if entry.default), "default")
    chosen = config or (default if default in configs else next(iter(configs)) if len(configs) == 1 else "")
    if chosen not in configs:
        raise DataError(
            f"{name} has no configuration {config!r}; it has {', '.join(configs)}. Name one with --data.hub_config=..."
        )
    return configs[chosen]


def _read_card(card: Mapping[str, Any], name: str) -> _Card:
    try:
        return _Card.model_validate(card)
    except pydantic.ValidationError as error:
        field = ".".join(map(str, error.errors()[0]["loc"]))
        raise DataError(
            f"{name}: {field} in the front matter of its README.md does not say which files belong to which split; "
            "correct it, or give the files themselves, data.path = 'FOLDER/*.parquet'"
        ) from None


def _is_hidden(name: str) -> bool:
    """Return whether programs keep the file for themselves, as Jupyter's checkpoints and macOS's own files."""
    return any(part.startswith((".", "__")) for part in PurePosixPath(name).parts)


def _matching(names: Sequence[str], patterns: str | Sequence[str]) -> list[str]:
    wanted = [patterns] if isinstance(patterns, str) else patterns
    of_parts = [pattern.removeprefix("./").split("/") for pattern in wanted]
    return [each for each in names if any(_matches(each.split("/"), pattern) for pattern in of_parts)]


def _matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a path matches a pattern, part by part; `**` is any number of folders, also none."""
    if not pattern:
        return not name
    if pattern[0] == "**" and len(pattern) > 1:
        return any(_matches(name[number:], pattern[1:]) for number in range(len(name)))
    if not name:
        return False
    if pattern == ["**"]:
        return True
    return fnmatchcase(name[0], pattern[0]) and _matches(name[1:], pattern[1:])


def _named_by_files(names: Sequence[str], config: str, name: str) -> dict[str, list[str]]:
    if config:
        inside = [each for each in names if config in PurePosixPath(each).parts[:-1]]
        if not inside:
            folders = sorted({part for each in names for part in PurePosixPath(each).parts[:-1]})
            raise DataError(
                f"{name} has no configuration {config!r}; its folders are {', '.join(folders) or 'none'}. "
                "Leave data.hub_config empty for all"
            )
        names = inside
    return _by_names(names)


def _by_names(names: Sequence[str]) -> dict[str, list[str]]:
    by_split: dict[str, list[str]] = {}
    for each in names:
        by_split.setdefault(split_of(each), []).append(each)
    return by_split


def _stem(path: PurePosixPath) -> str:
    return path.name.removesuffix(path.suffix if path.suffix != ".gz" else "".join(path.suffixes[-2:]))


def _require_all_shards(names: Sequence[str], name: str) -> None:
    found: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for each in names:
        if shard := _SHARD.fullmatch(_stem(PurePosixPath(each))):
            series = f"{PurePosixPath(each).parent}/{shard['split']}"
            found.setdefault(series, set()).add(shard["number"])
            counts[series] = int(shard["count"])
    for series, numbers in found.items():
        if len(numbers) < counts[series]:
            raise DataError(
                f"{name}: {len(numbers)} of {counts[series]} files of {series!r} are there; download it completely"
            )
