"""Processor time that parts of recording use, counted by the processes themselves while a run goes on.

Invariant: a thread's time is the kernel's count of what it computed, without what it waited. Parts must not contain
each other, or their time counts twice. What a part reads of the clock is in its time, about one reading a call, so that
totals are upper bounds.
"""

import enum
import functools
import mmap
import os
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any


class Part(enum.StrEnum):
    """A part of recording, in the order of its totals in a file."""

    RECORD = "makes spans"
    SEND = "encodes and sends spans"
    COLLECT = "fetches and checks spans"
    WRITE = "writes spans"
    HAND_OVER = "hands groups over"
    KEEP = "describes and writes groups"


_BYTES = 8
"""Of a total, which is nanoseconds."""


class Account:
    """Totals of a process, in a file in memory that other processes read."""

    def __init__(self, folder: Path, kind: str) -> None:
        """Start from zero; `kind` is the kind of this process."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{kind}.{os.getpid()}"
        file.write_bytes(bytes(_BYTES * len(Part)))
        with file.open("r+b") as opened:
            self._file = mmap.mmap(opened.fileno(), 0)
        self._totals = memoryview(self._file).cast("q")
        self._lock = threading.Lock()

    def timed(self, part: Part, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, whose calls count, in whichever thread."""
        place = list(Part).index(part)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            began = time.thread_time_ns()
            try:
                return function(*args, **options)
            finally:
                took = time.thread_time_ns() - began
                with self._lock:
                    self._totals[place] += took

        return call

    def close(self) -> None:
        """Let go of the file; nothing counts afterwards."""
        self._totals.release()
        self._file.close()

    def timed_steps(
        self, part: Part, function: Callable[..., Coroutine[Any, Any, Any]]
    ) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return `function`, whose coroutines count: what they compute themselves, not what runs while they wait."""

        @functools.wraps(function)
        async def call(*args: Any, **options: Any) -> Any:
            return await self._in_steps(part, function(*args, **options))

        return call

    @types.coroutine
    def _in_steps(self, part: Part, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        send, throw = self.timed(part, coroutine.send), self.timed(part, coroutine.throw)
        step, given = send, None
        while True:
            try:
                awaited = step(given)
            except StopIteration as end:
                return end.value
            try:
                step, given = send, (yield awaited)
            except BaseException as error:  # noqa: BLE001 - the coroutine gets it, whatever it is
                step, given = throw, error


def read_accounts(folder: Path) -> Counter[tuple[str, str]]:
    """Return the seconds that processes have used so far, by kind of process and part."""
    seconds: Counter[tuple[str, str]] = Counter()
    for file in folder.glob("*.*"):
        totals = memoryview(file.read_bytes()).cast("q")
        for part, total in zip(Part, totals, strict=False):  # a process that starts may not have written them
            seconds[file.stem, part] += total / 1e9
    return seconds
