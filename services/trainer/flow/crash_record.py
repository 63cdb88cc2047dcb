"""Records groups that kill the trainer: those in hand when its process died, counted over restarts.

A process that is killed, runs out of memory or crashes reports nothing. So the record is written before groups are read
or trained, and again afterwards: groups that it still names at the next start were in hand when the process died.

Invariant: a group that was being read at `MAX_DEATHS` deaths, and was not read in between, is not touched again; nor is
one that was being trained at `MAX_DEATHS` deaths, and was not trained in between. The two are counted separately,
because groups are read while others are trained.

The record is a file in the run folder, beside the checkpoints, so it survives every end of the process. It need not
survive the death of its host. A replaced trainer may write it once more; the successor's next write corrects that.
"""

import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import structlog

from penstock.errors import DataError, PenstockError
from penstock.runtime.files import write_atomically

log = structlog.get_logger()

MAX_DEATHS: Final = 3
"""Deaths after which a group is given up. Each costs a start of the trainer and the steps since its checkpoint; a
single one may have any cause."""


class CrashRecord:
    """The groups in hand, and the deaths at which each was. Methods may be called from any thread, and write the file.

    A group whose work ends with a `PenstockError` is no longer in hand: the process goes on, or ends on purpose.
    """

    def __init__(self, file: Path, *, run_id: str, is_resumed: bool) -> None:
        """Read `file`, if it exists, and count a death for each group that it names. Blocks.

        Args:
            file: The record.
            run_id: The run that resumes or begins. A record of another run does not apply to its groups.
            is_resumed: Whether it resumes from a checkpoint. A run that died before its first checkpoint starts over
                with another id and the same groups: it takes over a record that names groups in hand.
        """
        self._file = file
        self._run_id = run_id
        self._lock = threading.Lock()
        earlier = _read(file)
        if earlier.get("run_id") != run_id and (is_resumed or not _names_groups_in_hand(earlier)):
            earlier = {}
        self._reading = _Suspects(earlier.get("reading", {}))
        self._training = _Suspects(earlier.get("training", {}))
        self._num_deaths_in_a_row: int = earlier.get("num_deaths_in_a_row", 0)
        self._last = [*self._reading.at_death, *self._training.at_death]
        if self._last:
            self._num_deaths_in_a_row += 1
            self._write()
            log.warning(
                "trainer.died_with_groups",
                reading=self._reading.at_death,
                training=self._training.at_death,
                num_in_a_row=self._num_deaths_in_a_row,
            )

    def require_progress(self, max_in_a_row: int) -> None:
        """Raise an error if the trainer died too often without training a batch; the next start may try again.

        Raises:
            DataError: there were more than `max_in_a_row` deaths.
        """
        if (num_deaths := self._num_deaths_in_a_row) <= max_in_a_row:
            return
        with self._lock:
            self._num_deaths_in_a_row = 0
            self._write()
        raise DataError(
            f"the trainer died {num_deaths} times in a row while it read or trained groups, more than "
            f"{max_in_a_row}; at last with groups {self._last[:16]}. The end of its "
            "log may say why; if memory ran out, lower trainer.micro_batch_tokens. Then start it again"
        )

    def why_given_up(self, index: int) -> str | None:
        """Return why the group may not be touched again; None if it may."""
        for suspects, doing in ((self._reading, "read"), (self._training, "trained the batch with")):
            if (num_deaths := suspects.deaths[index]) >= MAX_DEATHS:
                return (
                    f"the trainer died {num_deaths} times while it {doing} group {index}: killed, out of memory, or "
                    "crashed"
                )
        return None

    @contextmanager
    def reading(self, index: int) -> Iterator[None]:
        """Record a group as in hand while it is being read."""
        with self._holding(self._reading, [index]):
            yield

    @contextmanager
    def training(self, indices: Sequence[int]) -> Iterator[None]:
        """Record groups as in hand while their gradient is computed. They stay suspect until their step ends."""
        with self._holding(self._training, indices, clears=False):
            yield

    @contextmanager
    def updating(self, indices: Sequence[int]) -> Iterator[None]:
        """Record a whole batch as in hand while the weights are updated with it; its step ends here."""
        with self._holding(self._training, indices):
            yield
            self._num_deaths_in_a_row = 0

    @contextmanager
    def _holding(self, suspects: "_Suspects", indices: Sequence[int], *, clears: bool = True) -> Iterator[None]:
        with self._lock:
            suspects.in_hand += indices
            self._write()
        try:
            yield
        except PenstockError:
            self._put_down(suspects, indices, clears=True)
            raise
        self._put_down(suspects, indices, clears=clears)

    def _put_down(self, suspects: "_Suspects", indices: Sequence[int], *, clears: bool) -> None:
        with self._lock:
            for index in indices:
                suspects.in_hand.remove(index)
                if clears:
                    suspects.deaths.pop(index, None)
            self._write()

    def _write(self) -> None:
        record = {
            "run_id": self._run_id,
            "reading": self._reading.as_json(),
            "training": self._training.as_json(),
            "num_deaths_in_a_row": self._num_deaths_in_a_row,
        }
        write_atomically(self._file, json.dumps(record))


class _Suspects:
    """Groups in hand for one purpose, and the number of deaths in a row at which each was."""

    def __init__(self, earlier: dict[str, Any]) -> None:
        """Count a death for each group that an earlier process had in hand."""
        self.at_death: list[int] = earlier.get("in_hand", [])
        self.in_hand: list[int] = []
        self.deaths = Counter({int(index): count for index, count in earlier.get("deaths", {}).items()})
        self.deaths.update(self.at_death)

    def as_json(self) -> dict[str, Any]:
        """Return the state for the record."""
        return {"in_hand": self.in_hand, "deaths": dict(self.deaths)}


def _names_groups_in_hand(record: dict[str, Any]) -> bool:
    return any(record.get(doing, {}).get("in_hand") for doing in ("reading", "training"))


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("crash_record.unreadable", file=str(file), reason=str(error))
        return {}
    return found
