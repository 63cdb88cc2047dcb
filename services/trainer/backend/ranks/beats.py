"""What each rank says of itself every second, and what rank 0 concludes from all of it. No I/O.

A rank that is dead or frozen says nothing. A rank that lives but is stuck shows it without knowing: within a command
all ranks enter the same collectives in the same order, so the one that has entered the fewest is the one that the
others wait for. While it computes or reads, its processor time grows; if nothing of it moves for `STALL_S`, it will not
come. Some stuck ranks cannot be told from slow ones: a rank that is busy and yet never comes; rank 0, whose process
serves others as well; and a rank that waits for its GPU, because CUDA keeps a core busy with waiting.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Self

from penstock.errors import PenstockError

BEAT_S = 1.0
SILENCE_S = 20.0
"""A rank that was silent for this long is taken for hung. A process that computes still beats."""
STALL_S = 60.0
"""A rank that others wait for, and of which nothing has moved for this long, is taken for stuck."""

_MOVING_SHARE = 0.01
"""Of a core. Threads that only wait take less; a process that reads a slow disk takes more."""
_LEAST_MOVE_S = 0.02
"""The kernel counts processor time in hundredths of a second."""
_REFUSED_S = 10.0
"""Rank 0 has this long, from the last time that it moved, to refuse a command that another rank has refused."""
_MOST_OF_A_REASON = 4000
"""Characters of a reason that are sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """What a rank says of itself."""

    command: int = 0
    """Number of the command that it began last; 0 before the first."""
    name: str = ""
    """Name of that command."""
    is_done: bool = True
    """Whether it has come to the end of that command."""
    collectives: int = 0
    """Collectives that it has entered in that command."""
    cpu_s: float = 0.0
    """Processor time that it has used, in seconds."""
    num_refused: int = 0
    """Commands that it has refused."""
    last_refused: int = 0
    """Number of the last of them."""
    reason: str = ""
    """The name of that one, and why it has refused it."""

    @property
    def progress(self) -> tuple[int, bool, int]:
        """How far it has come: of two ranks, the one with less is behind."""
        return self.command, self.is_done, 0 if self.is_done else self.collectives

    def encode(self) -> bytes:
        """Return it as it is sent."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, sent: bytes) -> Self:
        """Return the beat that was encoded."""
        return cls(**json.loads(sent))


class Pulse:
    """What a rank is at. The thread that runs commands writes it, and the one that beats reads it."""

    def __init__(self) -> None:
        """Begin before the first command."""
        self.count_collectives: Callable[[], int] = int
        """Returns how many collectives the process has entered so far; to be set when it has joined the others."""
        self._now = Beat()
        self._before = 0

    @contextmanager
    def command(self, name: str) -> Iterator[None]:
        """Run a command within this context."""
        self._before = self.count_collectives()
        number = self._now.command + 1
        self._now = replace(self._now, command=number, name=name, is_done=False)
        try:
            yield
        except PenstockError as error:
            num_refused = self._now.num_refused + 1
            reason = f"{name}: {error}"[:_MOST_OF_A_REASON]
            self._now = replace(self._now, num_refused=num_refused, last_refused=number, reason=reason)
            raise
        finally:
            self._now = replace(self._now, is_done=True)

    def beat(self) -> Beat:
        """Return what there is to say."""
        now = self._now
        return replace(now, collectives=self.count_collectives() - self._before, cpu_s=time.process_time())


@dataclass(slots=True, kw_only=True)
class _Heard:
    beat: Beat
    moved_at: float
    """When its progress or its processor time has changed."""
    moving_from_s: float
    """Its processor time at that moment."""
    behind_since: float | None = None


@dataclass(slots=True, kw_only=True)
class BeatWatch:
    """What rank 0 has heard of all ranks, itself included. May be used from several threads."""

    stall_s: float = field(default_factory=lambda: STALL_S)
    now: Callable[[], float] = time.monotonic
    _heard: dict[int, _Heard] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hear(self, rank: int, beat: Beat) -> None:
        """Take note of what a rank says."""
        with self._lock:
            now, known = self.now(), self._heard.get(rank)
            if known is None:
                self._heard[rank] = _Heard(beat=beat, moved_at=now, moving_from_s=beat.cpu_s)
                return
            least = max(_LEAST_MOVE_S, _MOVING_SHARE * (now - known.moved_at))
            if beat.progress != known.beat.progress or beat.cpu_s - known.moving_from_s >= least:
                known.moved_at, known.moving_from_s = now, beat.cpu_s
            known.beat = beat

    def problem(self) -> str:
        """Return why the ranks will not come to the end of a command; empty: they may."""
        with self._lock:
            return self._refusal() or self._stall()

    def _refusal(self) -> str:
        own = self._heard.get(0)
        for rank, heard in sorted(self._heard.items()):
            beat = heard.beat
            if own is None or beat.num_refused <= own.beat.num_refused:
                continue
            goes_on = (own.beat.command, own.beat.is_done) >= (beat.last_refused, True)
            if goes_on or self.now() - own.moved_at >= _REFUSED_S:
                return f"rank {rank} alone refused the command {beat.reason}"
        return ""

    def _stall(self) -> str:
        if not self._heard:
            return ""
        now, progress = self.now(), {rank: heard.beat.progress for rank, heard in sorted(self._heard.items())}
        first, last = max(progress, key=lambda rank: progress[rank]), min(progress.values())
        behind = [rank for rank, reached in progress.items() if reached == last < progress[first]]
        for rank, heard in self._heard.items():
            if rank not in behind:
                heard.behind_since = None
            elif heard.behind_since is None:
                heard.behind_since = now
        waited_s = [now - max(self._heard[rank].behind_since or now, self._heard[rank].moved_at) for rank in behind]
        if not behind or min(waited_s) < self.stall_s:
            return ""
        which = f"rank {behind[0]}" if len(behind) == 1 else f"ranks {', '.join(map(str, behind))}"
        name = self._heard[first].beat.name
        return f"{which} did not move for {self.stall_s:g} s while others waited in the command {name}"
