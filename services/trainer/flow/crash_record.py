"""Groups that kill the trainer: those in hand when its process died, counted over restarts.

A process that is killed, runs out of memory or crashes reports nothing. So the record is written before groups are read
or trained, and again afterwards: what it still names at the next start was in hand at the death.

Invariant: a group that was in hand at `MAX_DEATHS` deaths, and was not trained between them, is not touched again.

The record is a file of the run's folder, where the checkpoints are, so it survives every end of the process. It need
not survive a host's. A trainer that has been replaced may write it once more; the successor's next write corrects that.
"""

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import structlog

from penstock.errors import DataError, PenstockError

log = structlog.get_logger()

MAX_DEATHS: Final = 3
"""Each death costs a start of the trainer and the steps since its checkpoint; a single one may be of any cause."""


class CrashRecord:
    """Which groups are in hand, and at how many deaths each was. Its methods may be called from any thread; they write.

    A group in hand that ends with a `PenstockError` is put down: the process goes on, or ends on purpose.
    """

    def __init__(self, file: Path) -> None:
        """Read `file`, if it exists, and count a death for each group that it names. Blocks."""
        self._file = file
        self._lock = threading.Lock()
        earlier = _read(file)
        self._deaths: Counter[int] = Counter({int(index): count for index, count in earlier["deaths"].items()})
        self._in_hand: list[int] = []
        self._num_deaths_in_a_row: int = earlier["num_deaths_in_a_row"]
        self._last: list[int] = earlier["in_hand"]
        if self._last:
            self._deaths.update(self._last)
            self._num_deaths_in_a_row += 1
            self._write()
            log.warning("trainer.died_with_groups", indices=self._last, num_in_a_row=self._num_deaths_in_a_row)

    def require_progress(self, max_in_a_row: int) -> None:
        """Refuse to go on if the trainer died too often without training a batch; the next start may try again.

        Raises:
            DataError: more than `max_in_a_row` deaths.
        """
        if (num_deaths := self._num_deaths_in_a_row) <= max_in_a_row:
            return
        with self._lock:
            self._num_deaths_in_a_row = 0
            self._write()
        raise DataError(
            f"the trainer died {num_deaths} times in a row while it read or trained groups, more than "
            f"trainer.max_failures_in_a_row = {max_in_a_row}; at last with groups {self._last[:16]}. The end of its "
            "log may say why; if memory ran out, lower trainer.micro_batch_tokens. Then start it again"
        )

    def why_given_up(self, index: int) -> str | None:
        """Return why the group may not be touched again; None if it may."""
        if (num_deaths := self._deaths[index]) < MAX_DEATHS:
            return None
        return (
            f"the trainer died {num_deaths} times while it read or trained group {index}, or the batch that it was in: "
            "killed, out of memory, or crashed"
        )

    @contextmanager
    def reading(self, index: int) -> Iterator[None]:
        """Have a group in hand that is being read."""
        self._take([index])
        try:
            yield
        except PenstockError:
            self._put_down([index])
            raise
        self._put_down([index])

    @contextmanager
    def training(self, indices: Sequence[int]) -> Iterator[None]:
        """Have a batch in hand; groups that were trained are no longer suspect."""
        self._take(indices)
        try:
            yield
        except PenstockError:
            self._put_down(indices)
            raise
        self._put_down(indices, were_trained=True)

    def _take(self, indices: Sequence[int]) -> None:
        with self._lock:
            self._in_hand += indices
            self._write()

    def _put_down(self, indices: Sequence[int], *, were_trained: bool = False) -> None:
        with self._lock:
            for index in indices:
                self._in_hand.remove(index)
                if were_trained:
                    self._deaths.pop(index, None)
            if were_trained:
                self._num_deaths_in_a_row = 0
            self._write()

    def _write(self) -> None:
        record = {
            "in_hand": self._in_hand,
            "deaths": dict(self._deaths),
            "num_deaths_in_a_row": self._num_deaths_in_a_row,
        }
        temporary = self._file.with_name(f".{self._file.name}.tmp")
        temporary.write_text(json.dumps(record))
        os.replace(temporary, self._file)


def _read(file: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {"in_hand": [], "deaths": {}, "num_deaths_in_a_row": 0}
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        return empty
    except (OSError, ValueError) as error:
        log.warning("crash_record.unreadable", file=str(file), reason=str(error))
        return empty
    return empty | found
