"""Requests to the launcher of a run, as files in the run folder, which both sides see on whatever hosts they are.

A request is answered once. It and its answer are removed by the side that made it, or by the next launcher.
"""

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError, SetupError
from penstock.runtime.files import write_atomically
from services.launch.run_folder import TRAIN, RunFolder
from services.view.run_reader import RunReader

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Request:
    """A request that waits for its answer."""

    file: Path
    counts: Mapping[str, int]
    """Processes that the run shall have, by kind."""

    def answer(self, lines: list[str]) -> None:
        """Say what is done about it."""
        self._write({"lines": lines})

    def refuse(self, reason: str) -> None:
        """Say why it is not done."""
        self._write({"error": reason})

    def _write(self, answer: Mapping[str, object]) -> None:
        self.file.unlink(missing_ok=True)
        write_atomically(_answer_to(self.file), json.dumps(answer))


def ask(folder: RunFolder, counts: Mapping[str, int], *, timeout_s: float) -> list[str]:
    """Ask the launcher of a run for these numbers of processes, and return the lines of its answer. Blocking.

    Raises:
        ConfigError: the launcher refuses them.
        SetupError: the folder is none of a training run, no launcher works in it, it cannot be written, or no answer
            came in `timeout_s`.
    """
    if folder.command not in ("", TRAIN):
        raise SetupError(
            f"{folder.path} is a folder of `{folder.command}`, and only a run of `{TRAIN}` can be scaled; "
            "give the folder of one"
        )
    if not RunReader(folder.path).has_launcher:
        raise SetupError(f"no `{TRAIN}` is running in {folder.path}; continue the run with --resume {folder.path}")
    file = _folder(folder) / f"{secrets.token_hex(8)}.request.json"
    try:
        write_atomically(file, json.dumps(counts))
    except OSError as error:
        raise SetupError(f"{file.parent} cannot be written: {error.strerror}; change its owner or rights") from None
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            with suppress(FileNotFoundError):
                answer = json.loads(_answer_to(file).read_text())
                if "error" in answer:
                    raise ConfigError(answer["error"])
                return list(answer["lines"])
            time.sleep(_POLL_S)
    finally:
        file.unlink(missing_ok=True)
        _answer_to(file).unlink(missing_ok=True)
    raise SetupError(
        f"the launcher in {folder.path} has not answered within {timeout_s:g} s; see {folder.launcher_log}"
    )


def pending(folder: RunFolder) -> Iterator[Request]:
    """Yield the requests that wait for an answer."""
    for file in sorted(_folder(folder).glob("*.request.json")):
        with suppress(OSError, ValueError, TypeError, AttributeError):
            yield Request(file, {str(kind): int(count) for kind, count in json.loads(file.read_text()).items()})


def forget_all(folder: RunFolder) -> None:
    """Remove what earlier requests left."""
    for file in _folder(folder).glob("*.json"):
        file.unlink(missing_ok=True)


def _folder(folder: RunFolder) -> Path:
    return folder.path / "scale"


def _answer_to(request: Path) -> Path:
    return request.with_name(request.name.replace(".request.", ".answer."))
