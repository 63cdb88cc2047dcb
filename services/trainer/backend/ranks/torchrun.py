"""Beats of ranks that torchrun has started, on one machine or several: they pass through the store in which the
ranks have met.

Each rank writes its own every second. Rank 0 reads all of them, and ends the trainer where `processes` would; the
others read that of rank 0, and end when it is silent, or the store is gone with it. torchrun notices by itself only
what ends on its own machine.
"""

import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any, NoReturn, Self

import structlog

from penstock.runtime.process import EXIT_FAILURE
from services.trainer.backend.ranks import beats
from services.trainer.backend.ranks.beats import BEAT_S, Beat, BeatWatch, Pulse
from services.trainer.backend.ranks.processes import end_trainer

log = structlog.get_logger()

_LEAVING_S = 5.0
"""A rank that finds the store gone may be about to end as it should: it is given this long."""


class TorchrunRanks:
    """The other ranks, from this one's point of view."""

    def __init__(self, store: Any, *, rank: int, size: int, pulse: Pulse) -> None:
        """Use `watch`."""
        self._store = store
        self._rank = rank
        self._others = range(1, size) if rank == 0 else range(1)
        self._pulse = pulse
        self._beats = BeatWatch()
        self._heard: dict[int, tuple[bytes, float]] = {}
        self._closed = threading.Event()

    @classmethod
    def watch(cls, store: Any, *, rank: int, size: int, pulse: Pulse) -> Self:
        """Beat, and watch the others, until `close`. All ranks must have joined.

        Args:
            store: torch's store of all ranks, without what ranks of an earlier start have left in it.
            rank: This one.
            size: All of them.
            pulse: That of this process.
        """
        own = store.clone()  # another thread may wait for something in the first connection
        own.set_timeout(timedelta(seconds=beats.SILENCE_S))
        ranks = cls(own, rank=rank, size=size, pulse=pulse)
        threading.Thread(target=ranks._run, name="watch of other ranks", daemon=True).start()
        return ranks

    @property
    def are_own(self) -> bool:
        """Whether `close` ends them: torchrun does, or they end by themselves."""
        return False

    def blame(self) -> None:
        """Do nothing: torchrun says which of its processes has ended."""

    def close(self) -> None:
        """Do not beat or watch any more."""
        self._closed.set()

    def _run(self) -> None:
        number = 0
        while not self._closed.wait(BEAT_S):
            number += 1
            beat = self._pulse.beat()
            try:
                self._store.set(_key(self._rank), f"{number} ".encode() + beat.encode())
                problem = self._listen()
            except RuntimeError as error:  # torch's DistError is one
                if self._closed.wait(_LEAVING_S):
                    return
                problem = f"the store in which the ranks have met is out of reach: {error}"
            if self._rank == 0:
                self._beats.hear(0, beat)
                problem = problem or self._beats.problem()
            if problem and not self._closed.is_set():
                self._end(problem)

    def _listen(self) -> str:
        """Read the others' beats; return which of them is silent."""
        now = time.monotonic()
        for rank in self._others:
            said = self._store.get(_key(rank)) if self._store.check([_key(rank)]) else b""
            before, since = self._heard.get(rank, (b"", now))
            self._heard[rank] = (said, since if said == before else now)
            if said == before and now - since > beats.SILENCE_S:
                return f"rank {rank} gave no sign of life for {beats.SILENCE_S:g} s"
            if said != before:
                self._beats.hear(rank, Beat.decode(said.partition(b" ")[2]))
        return ""

    def _end(self, problem: str) -> None:
        if self._rank == 0:
            end_trainer(problem)
        leave(self._rank, problem)


def leave(rank: int, problem: str) -> NoReturn:
    """End this process at once: its main thread may wait for another rank, which nothing interrupts."""
    log.error("rank.left", rank=rank, reason=problem)
    sys.stderr.flush()
    os._exit(EXIT_FAILURE)


def _key(rank: int) -> str:
    return f"beat of rank {rank}"
