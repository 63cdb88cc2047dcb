"""Which files of a published folder belong to a configuration and a split, as the `datasets` library finds them.

The card's front matter says it (`configs:` with `data_files:`); without one the files' names do:

    data/train-00000-of-00002.parquet     train.jsonl     test/problems.parquet     geometry/val.csv
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any, Final

from penstock.errors import DataError

DEFAULT_SPLIT: Final = "train"

_SHARD = re.compile(r"(?P<split>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_NOT_DATA = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "config.json"}


def choose_files(
    names: Sequence[str], *, suffixes: Sequence[str], config: str, split: str, card: Mapping[str, Any], name: str
) -> list[str]:
    """Return the files of a split, in order.

    Args:
        names: Paths of all files, relative to the folder.
        suffixes: The formats that can be read; if a folder has several, the first of these counts.
        config: Name of the configuration; empty for the only or the default one.
        split: Name of the split; empty for `train`, or the only one.
        card: The front matter of the folder's README.md.
        name: What to call the folder in an error.

    Raises:
        DataError: there is no such configuration or split, or a shard is missing.
    """
    readable = [each for each in sorted(names) if PurePosixPath(each).name not in _NOT_DATA]
    suffix = next((end for end in suffixes if any(each.lower().endswith(end) for each in readable)), None)
    if suffix is None:
        raise DataError(f"{name} has no file that can be read; the formats are {', '.join(suffixes)}")
    readable = [each for each in readable if each.lower().endswith(suffix)]
    by_split = _named_in_card(readable, config, card, name) or _named_by_files(readable, config, name)
    wanted = split or (DEFAULT_SPLIT if DEFAULT_SPLIT in by_split or len(by_split) > 1 else next(iter(by_split)))
    if not by_split.get(wanted):
        raise DataError(f"{name} has no split {wanted!r}; it has {', '.join(by_split)}. Name one with --data.split=...")
    _require_all_shards(by_split[wanted], name)
    return by_split[wanted]


def _named_in_card(names: Sequence[str], config: str, card: Mapping[str, Any], name: str) -> dict[str, list[str]]:
    """Files by split, as the card's `configs` say; empty if it says nothing."""
    configs = {
        str(each.get("config_name", "default")): each for each in card.get("configs") or () if each.get("data_files")
    }
    if not configs:
        return {}
    default = next((each for each, entry in configs.items() if entry.get("default")), "default")
    chosen = config or (default if default in configs else next(iter(configs)) if len(configs) == 1 else "")
    if chosen not in configs:
        raise DataError(
            f"{name} has no configuration {config!r}; it has {', '.join(configs)}. Name one with --data.hub_config=..."
        )
    patterns = configs[chosen]["data_files"]
    if isinstance(patterns, str | list) and not any(isinstance(each, Mapping) for each in patterns):
        patterns = [{"split": DEFAULT_SPLIT, "path": patterns}]
    elif isinstance(patterns, Mapping):
        patterns = [{"split": split, "path": path} for split, path in patterns.items()]
    return {str(each["split"]): _matching(names, each["path"]) for each in patterns}


def _matching(names: Sequence[str], patterns: str | Sequence[str]) -> list[str]:
    wanted = [patterns] if isinstance(patterns, str) else patterns
    return [each for each in names if any(fnmatchcase(each, pattern.removeprefix("./")) for pattern in wanted)]


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
    by_split: dict[str, list[str]] = {}
    for each in names:
        by_split.setdefault(_split_of(each), []).append(each)
    return by_split


def _split_of(name: str) -> str:
    path = PurePosixPath(name)
    if shard := _SHARD.fullmatch(path.stem):
        return shard["split"]
    words = [word for part in (path.stem, *reversed(path.parts[:-1])) for word in re.split(r"[^a-z0-9]+", part.lower())]
    return next((split for word in words for split, known in _WORDS.items() if word in known), DEFAULT_SPLIT)


def _require_all_shards(names: Sequence[str], name: str) -> None:
    found: dict[str, set[str]] = {}
    counts: dict[str, int] = {}
    for each in names:
        if shard := _SHARD.fullmatch(PurePosixPath(each).stem):
            series = f"{PurePosixPath(each).parent}/{shard['split']}"
            found.setdefault(series, set()).add(shard["number"])
            counts[series] = int(shard["count"])
    for series, numbers in found.items():
        if len(numbers) < counts[series]:
            raise DataError(
                f"{name}: {len(numbers)} of {counts[series]} files of {series!r} are there; download it completely"
            )
