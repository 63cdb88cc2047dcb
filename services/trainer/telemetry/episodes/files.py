"""The folder `episodes` of a run.

    index.jsonl             one short line for each kept group, with the place of its whole description
    step-000123.jsonl       whole descriptions of the groups of step 123, one line each
    images/<sha256>.png     their images, each once
    discarded/              steps that a crashed trainer took after the checkpoint that the run continued from

Invariants: a line of the index is written after what it refers to and removed before it, so that a reader may trust
every whole line of it, whenever the writer was killed. An image is there while a kept step refers to it.
"""

import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from penstock.runtime.files import write_atomically
from penstock.telemetry.json_lines import append_lines
from services.trainer.telemetry.metrics_log import keep_steps

INDEX: Final = "index.jsonl"
_DISCARDED_INDEX: Final = "index-discarded.jsonl"
_IMAGES: Final = "images"
_DISCARDED: Final = "discarded"
_DISCARDED_STEP: Final = -1
"""Stands for all steps in `discarded/`; they go before every other step."""
_LEFT_SHARE: Final = 0.9
"""Share of the bound that is left when room is made, so that the index is rewritten once for many groups."""
_SUFFIX_OF_MAGIC: Final = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp"}


class _Line(msgspec.Struct):
    """What is read of a line of the index."""

    step: int
    number: int = -1
    image_files: list[str] = []


_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(_Line)


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedGroup:
    """A group as it is written."""

    whole: bytes
    """Its whole description, a line of JSON."""
    short: bytes
    """What the index has of it, beside its place: an object of JSON that is not empty."""
    image_files: Collection[str] = ()
    """Names of its images' files, as `EpisodeFiles.add_images` returned them."""

    @classmethod
    def of(
        cls, whole: Mapping[str, Any], short: Mapping[str, Any], *, image_files: Collection[str] = ()
    ) -> "DescribedGroup":
        """Encode both descriptions."""
        return cls(whole=_encoder.encode_lines((whole,)), short=_encoder.encode(short), image_files=image_files)


@dataclass(slots=True)
class _Step:
    """What is kept of a step."""

    num_bytes: int = 0
    """Of its descriptions and its lines in the index."""
    images: set[str] = field(default_factory=set)
    """Names of the images that its groups refer to."""


class EpisodeFiles:
    """Appends to the folder, and keeps it below a size. Its methods block."""

    def __init__(self, folder: Path, *, last_step: int, max_bytes: float) -> None:
        """Continue after `last_step`; later steps move to `discarded/`."""
        self._folder = folder
        self._index = folder / INDEX
        self._max_bytes = max_bytes
        (folder / _IMAGES).mkdir(parents=True, exist_ok=True)
        for path in [*folder.glob(f".{INDEX}.*"), *(folder / _IMAGES).glob(".*")]:
            path.unlink()  # a killed writer left it
        keep_steps(self._index, last_step=last_step)
        for path in folder.glob("step-*.jsonl"):
            if _step_of(path) > last_step:
                (folder / _DISCARDED).mkdir(exist_ok=True)
                os.replace(path, folder / _DISCARDED / path.name)
        self._names = {path.stem: path.name for path in (folder / _IMAGES).iterdir()}
        self._images = {path.name: path.stat().st_size for path in (folder / _IMAGES).iterdir()}
        """Sizes by name."""
        self._steps: defaultdict[int, _Step] = defaultdict(_Step)
        self._users: Counter[str] = Counter()
        """Steps that refer to an image, by its name."""
        self._num_bytes = sum(self._images.values())
        """Size of the folder."""
        self._next_number = 0
        self._count_all()

    def add_images(self, images: Mapping[str, bytes]) -> dict[str, str]:
        """Write the images that are not there yet, and return the file name of each, by content hash."""
        for sha256, data in images.items():
            if sha256 not in self._names:
                name = sha256 + next((end for magic, end in _SUFFIX_OF_MAGIC.items() if data.startswith(magic)), ".bin")
                write_atomically(self._folder / _IMAGES / name, data)
                self._names[sha256] = name
                self._images[name] = len(data)
                self._num_bytes += len(data)
        return {sha256: self._names[sha256] for sha256 in images}

    def add(self, step: int, groups: Sequence[DescribedGroup]) -> None:
        """Append groups that are kept with a step.

        Raises:
            OSError: the disk is full; the index has none of them.
        """
        name = _file_name(step)
        offset = append_lines(os.path.join(self._folder, name), b"".join(group.whole for group in groups))
        self._count(step, sum(len(group.whole) for group in groups))
        entries = bytearray()
        for group in groups:
            place = {
                "image_files": sorted(set(group.image_files)),
                "file": name,
                "offset": offset,
                "size": len(group.whole),
                "number": self._next_number,
            }
            entries += group.short[:-1] + b"," + _encoder.encode(place)[1:] + b"\n"
            offset += len(group.whole)
            self._next_number += 1
        append_lines(self._index, entries)
        self._count(step, len(entries), {image for group in groups for image in group.image_files})
        if self._num_bytes > self._max_bytes:
            self._make_room(newest=step)

    def _count_all(self) -> None:
        """Count what the folder holds, and who refers to its images."""
        for path in self._folder.glob("step-*.jsonl"):
            self._count(_step_of(path), path.stat().st_size)
        for raw, line in _lines(self._index):
            self._count(line.step, len(raw) + 1, line.image_files)
            self._next_number = max(self._next_number, line.number) + 1
        for path in (self._folder / _DISCARDED).glob("*"):
            self._count(_DISCARDED_STEP, path.stat().st_size)
        for raw, line in _lines(self._folder / _DISCARDED_INDEX):
            self._count(_DISCARDED_STEP, len(raw) + 1, line.image_files)
            self._next_number = max(self._next_number, line.number + 1)

    def _count(self, number: int, num_bytes: int, image_files: Iterable[str] = ()) -> None:
        step = self._steps[number]
        step.num_bytes += num_bytes
        self._num_bytes += num_bytes
        new = set(image_files) - step.images
        step.images |= new
        self._users.update(new)

    def _make_room(self, *, newest: int) -> None:
        """Delete the oldest steps but `newest`, and images to which no step refers."""
        doomed = self._oldest(newest)
        if doomed - {_DISCARDED_STEP}:
            self._cut_index(doomed)
        for number in doomed:
            self._delete(number)
        for name in [name for name in self._images if not self._users[name]]:
            (self._folder / _IMAGES / name).unlink(missing_ok=True)
            self._num_bytes -= self._images.pop(name)
            self._names.pop(Path(name).stem, None)

    def _oldest(self, newest: int) -> set[int]:
        """Return the steps without which the folder has room again; all but `newest` if that alone is too large."""
        doomed: set[int] = set()
        released: Counter[str] = Counter()
        num_bytes = self._num_bytes
        for number in sorted(self._steps):
            if num_bytes <= _LEFT_SHARE * self._max_bytes:
                break
            if number == newest:
                continue
            doomed.add(number)
            step = self._steps[number]
            released.update(step.images)
            num_bytes -= step.num_bytes + sum(
                self._images.get(name, 0) for name in step.images if released[name] == self._users[name]
            )
        return doomed

    def _cut_index(self, doomed: Collection[int]) -> None:
        kept = [raw + b"\n" for raw, line in _lines(self._index) if line.step not in doomed]
        write_atomically(self._index, b"".join(kept))

    def _delete(self, number: int) -> None:
        if number == _DISCARDED_STEP:
            shutil.rmtree(self._folder / _DISCARDED, ignore_errors=True)
            (self._folder / _DISCARDED_INDEX).unlink(missing_ok=True)
        else:
            (self._folder / _file_name(number)).unlink(missing_ok=True)
        step = self._steps.pop(number)
        self._num_bytes -= step.num_bytes
        for name in step.images:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]


def _lines(path: Path) -> Iterator[tuple[bytes, _Line]]:
    """Yield the whole lines of an index, which need not exist, and what they say."""
    for raw in path.read_bytes().split(b"\n") if path.exists() else ():
        with suppress(msgspec.DecodeError):
            yield raw, _decoder.decode(raw)


def _file_name(step: int) -> str:
    return f"step-{step:06d}.jsonl"


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))
