"""Reads the folder of a run, which may be running, interrupted or over. Nothing is written to it."""

import math
import os
import re
import threading
import tomllib
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from penstock.errors import InvalidRequestError
from penstock.telemetry.json_lines import JsonLinesFollower, every_field
from services.view.alarms import Alarm, find_step_alarms
from services.view.episode_query import EpisodeQuery, Found
from services.view.lock_file import LockFile
from services.view.text_search import TextSearch
from services.view.trace_reader import Span, SpanStream, TraceReader

_IMAGE: Final = re.compile(r"[0-9a-f]{64}\.(png|jpg|gif|webp|bin)")
_EPISODES_FILE: Final = re.compile(r"step-\d+\.jsonl")


class NotThereError(InvalidRequestError):
    """The run keeps no such thing."""


class RunReader:
    """One run. Its methods may be called from several threads."""

    def __init__(self, folder: Path, *, keep: Callable[[str], bool] = every_field) -> None:
        """Read the run in `folder`; `keep` tells which metrics its steps keep."""
        self.folder = folder
        self._launcher_lock = LockFile(folder / ".lock")
        self._trainer_lock = LockFile(folder / ".trainer.lock")
        self._lock = threading.Lock()
        self._metrics = JsonLinesFollower(folder / "metrics.jsonl", keep=keep)
        self._step_alarms: tuple[tuple[int, int], list[Alarm]] = (0, 0), []
        """Generation and number of the steps, and what they alone show to be wrong."""
        self._evaluations = JsonLinesFollower(folder / "evaluations.jsonl")
        self._trace_lock = threading.Lock()  # of its own: to find a time among gigabytes of spans takes seconds
        self._trace = TraceReader(folder)
        self._index = JsonLinesFollower(folder / "episodes" / "index.jsonl")
        self._search = TextSearch(self._description)

    @property
    def name(self) -> str:
        """The folder's name, by which people know the run; also where the folder is given as `.` or `..`."""
        return Path(os.path.abspath(self.folder)).name

    @property
    def is_running(self) -> bool:
        """Whether a launcher works in the folder, or a trainer without one."""
        looks = [lock.begin_look() for lock in (self._launcher_lock, self._trainer_lock)]
        return any(look.found() for look in looks)

    @property
    def has_launcher(self) -> bool:
        """Whether a launcher works in the folder."""
        return self._launcher_lock.is_locked()

    @property
    def has_trainer(self) -> bool:
        """Whether a trainer works in the folder, with a launcher or without one."""
        return self._trainer_lock.is_locked()

    @property
    def last_change(self) -> float:
        """When a step, an evaluation, a part of a validation or the start came last, in seconds since 1970."""
        names = ("metrics.jsonl", "evaluations.jsonl", "validation.jsonl", "config.toml")
        return max(written_at(self.folder / name) for name in names)

    @property
    def has_stepped(self) -> bool:
        """Whether a step was taken since the run was started, or started again, which may cut metrics.jsonl."""
        _, rows = self.steps()
        return bool(rows) and _time_of(rows[-1]) > written_at(self.folder / "config.toml")

    @property
    def kept_bytes(self) -> int:
        """Size of the index of kept groups, which changes with each; reading it would take long for a list of runs."""
        with suppress(OSError):
            return (self.folder / "episodes" / "index.jsonl").stat().st_size
        return 0

    def steps(self) -> tuple[int, list[dict[str, Any]]]:
        """Return the rows of metrics.jsonl, and a number that grows when earlier rows were replaced."""
        with self._lock:
            self._metrics.poll()
            return self._metrics.generation, list(self._metrics.rows)

    def step_alarms(self) -> list[Alarm]:
        """Return what the steps alone show to be wrong. They are examined once, and again when they have changed."""
        generation, rows = self.steps()
        steps, found = self._step_alarms
        if steps != (generation, len(rows)):
            found = find_step_alarms(rows)
            self._step_alarms = (generation, len(rows)), found
        return found

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the rows of evaluations.jsonl."""
        with self._lock:
            self._evaluations.poll()
            return list(self._evaluations.rows)

    def trace(self) -> list[dict[str, Any]]:
        """Return the trainer's spans, step by step."""
        with self._trace_lock:
            return list(self._trace.steps())

    def spans(self, first: float, last: float) -> SpanStream:
        """Return what all processes did from `first` to `last`, in seconds since 1970, in no order.

        The files are read as the spans are taken, and not at once: those of a long run are gigabytes.
        """
        with self._trace_lock:
            return self._trace.stream(first, last)

    def starts(self) -> list[list[Span]]:
        """Return when each launcher of the run, in their order, started processes, and when they ended."""
        with self._trace_lock:
            return self._trace.starts()

    def episodes(self) -> list[dict[str, Any]]:
        """Return the index of kept groups, in the order in which they were kept.

        Each has a `number` of its own, which grows from one to the next. Once the folder was full, the oldest are gone.
        """
        with self._lock:
            new = self._index.poll()
            for place, entry in enumerate(new, start=len(self._index.rows) - len(new)):
                if not isinstance(entry.get("number"), int):
                    entry["number"] = place
            return list(self._index.rows)

    def find_episodes(self, query: EpisodeQuery) -> tuple[list[dict[str, Any]], Found]:
        """Return the index of kept groups, and which of them match.

        Raises:
            InvalidRequestError: groups cannot be sorted so.
        """
        index = self.episodes()
        return index, query.run(index, self._search.run)

    def episode(self, number: int) -> bytes:
        """Return the whole description of a kept group, as JSON.

        Args:
            number: Its `number` in the index.

        Raises:
            NotThereError: there is none, or it was deleted to keep the folder small.
        """
        index = self.episodes()
        place = bisect_left(index, number, key=lambda entry: entry["number"])
        if place == len(index) or index[place]["number"] != number:
            raise NotThereError(
                f"run {self.name!r} has no group number {number} now: it was never kept, was deleted to keep the "
                "folder below episodes.max_gib, or its step came after the checkpoint from which the run went on"
            )
        entry = index[place]
        if _EPISODES_FILE.fullmatch(str(entry["file"])) is None:
            raise NotThereError(f"the index of {self.name!r} names no file of groups: {entry['file']!r}")
        data = self._description(entry)
        if data is None:
            raise NotThereError(
                f"the groups of step {entry['step']} were deleted to keep the folder below episodes.max_gib"
            )
        return data

    def _description(self, entry: Mapping[str, Any]) -> bytes | None:
        """Return what an entry of the index refers to; None if it is gone."""
        if _EPISODES_FILE.fullmatch(str(entry["file"])) is not None:
            with suppress(FileNotFoundError), (self.folder / "episodes" / entry["file"]).open("rb") as file:
                file.seek(int(entry["offset"]))
                data = file.read(int(entry["size"]))
                return data if len(data) == int(entry["size"]) else None
        return None

    def image(self, name: str) -> bytes:
        """Return a kept picture.

        Raises:
            NotThereError: there is none of this name.
        """
        if _IMAGE.fullmatch(name):
            with suppress(FileNotFoundError):
                return (self.folder / "episodes" / "images" / name).read_bytes()
        raise NotThereError(f"run {self.name!r} keeps no picture {name!r}")

    def settings(self) -> dict[str, Any]:
        """Return the run's settings by dotted name; empty if there is no recipe."""
        return read_settings(self.folder)


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the run in `folder` by dotted name; empty if there is no recipe."""
    try:
        recipe = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return dict(_leaves("", recipe))


def written_at(path: Path) -> float:
    """Return when a file was written last, in seconds since 1970; 0 if there is none."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _time_of(row: Mapping[str, Any]) -> float:
    """Return when a step was taken, in seconds since 1970; of old runs, which do not say it, as late as can be."""
    with suppress(KeyError, TypeError, ValueError):
        return datetime.fromisoformat(row["time"]).timestamp()
    return math.inf


def without_groups(row: dict[str, Any]) -> dict[str, Any]:
    """Return a step without the list of its groups, which no page shows and which would be half of it."""
    return {key: value for key, value in row.items() if key != "groups"}


def _leaves(prefix: str, value: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, each in value.items():
        name = f"{prefix}.{key}" if prefix else key
        found += _leaves(name, each) if isinstance(each, Mapping) and each else [(name, each)]
    return found
