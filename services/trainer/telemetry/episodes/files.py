"""The folder `episodes` of a run.

    index.jsonl             one short line for each kept group, with the place of its whole description
    step-000123.jsonl       whole descriptions of the groups of step 123, one line each
    images/<sha256>.png     their images, each once
    discarded/              steps that a crashed trainer took after the checkpoint that the run continued from

Invariant: a line of the index is written after what it refers to, so that a reader may trust every whole line of it,
whenever the writer was killed.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.runtime.files import write_atomically
from services.trainer.telemetry.metrics_log import keep_steps

INDEX = "index.jsonl"
_IMAGES = "images"
_SUFFIX_OF_MAGIC = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp"}


class EpisodeFiles:
    """Appends to the folder, and keeps it below a size. Its methods block."""

    def __init__(self, folder: Path, *, last_step: int, max_bytes: float) -> None:
        """Continue after `last_step`; later steps move to `discarded/`."""
        self._folder = folder
        self._max_bytes = max_bytes
        (folder / _IMAGES).mkdir(parents=True, exist_ok=True)
        keep_steps(folder / INDEX, last_step=last_step)
        for path in folder.glob("step-*.jsonl"):
            if _step_of(path) > last_step:
                (folder / "discarded").mkdir(exist_ok=True)
                os.replace(path, folder / "discarded" / path.name)
        self._sizes = {path: path.stat().st_size for path in sorted(folder.glob("step-*.jsonl"))}
        self._images = {path.stem: path.name for path in (folder / _IMAGES).iterdir()}
        self._image_bytes = sum(path.stat().st_size for path in (folder / _IMAGES).iterdir())

    def add_images(self, images: Mapping[str, bytes]) -> dict[str, str]:
        """Write the images that are not there yet, and return the file name of each, by content hash."""
        for sha256, data in images.items():
            if sha256 not in self._images:
                name = sha256 + next((end for magic, end in _SUFFIX_OF_MAGIC.items() if data.startswith(magic)), ".bin")
                write_atomically(self._folder / _IMAGES / name, data)
                self._images[sha256] = name
                self._image_bytes += len(data)
        return {sha256: self._images[sha256] for sha256 in images}

    def add(self, step: int, whole: Mapping[str, Any], short: Mapping[str, Any]) -> None:
        """Append a group."""
        path = self._folder / f"step-{step:06d}.jsonl"
        line = msgspec.json.encode(whole) + b"\n"
        with path.open("ab") as file:
            offset = file.tell()
            file.write(line)
        self._sizes[path] = offset + len(line)
        entry = {**short, "file": path.name, "offset": offset, "size": len(line)}
        with (self._folder / INDEX).open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")
        self._delete_oldest(path)

    def _delete_oldest(self, newest: Path) -> None:
        while self._image_bytes + sum(self._sizes.values()) > self._max_bytes and len(self._sizes) > 1:
            oldest = min(path for path in self._sizes if path != newest)
            oldest.unlink(missing_ok=True)
            del self._sizes[oldest]


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))
