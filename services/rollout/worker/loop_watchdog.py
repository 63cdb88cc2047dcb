"""Notices that the event loop is blocked, and logs what blocks it.

An async environment that blocks stops every episode of its worker, and the heartbeats that keep prompts from being
delivered to another one. Nothing in the loop can tell that meanwhile, so a thread does.
"""

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

import structlog

log = structlog.get_logger()

LIMIT_S: Final = 5.0
_NUM_LOOKS = 5
"""Looks of the thread within the limit. It counts looks, not seconds, because a process that was stopped (SIGSTOP, a
suspended machine) has a loop that stood still and blocks nothing."""
_MAX_FRAMES = 30
_REMEDY = (
    "await what takes long; set isolated = true in the environment's table of [worker.environments]; an agent's "
    "function that blocks must be a plain one, which gets a thread"
)


class LoopWatchdog:
    """Watches the running event loop during its context."""

    def __init__(self, environments: Callable[[], Sequence[str]], *, limit_s: float = LIMIT_S) -> None:
        """Log `loop.blocked` each time that the loop is blocked for `limit_s` seconds; `environments` returns the
        names of those with an episode in the loop."""
        self._environments = environments
        self._limit_s = limit_s
        self._look_s = limit_s / _NUM_LOOKS
        self._is_over = threading.Event()
        self._num_turns = 0
        self._thread = threading.Thread(target=self._watch, name="loop-watchdog", daemon=True)

    def __enter__(self) -> Self:
        """Begin to watch the loop of this thread."""
        self._loop_thread = threading.get_ident()
        self._turn()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching."""
        self._next_turn.cancel()
        self._is_over.set()
        self._thread.join()

    def _turn(self) -> None:
        """Show that the loop turns."""
        self._num_turns += 1
        self._next_turn = asyncio.get_running_loop().call_later(self._look_s / 2, self._turn)

    def _watch(self) -> None:
        num_turns, num_still = 0, 0
        while not self._is_over.wait(self._look_s):
            num_still = num_still + 1 if self._num_turns == num_turns else 0
            num_turns = self._num_turns
            if num_still == _NUM_LOOKS:
                self._report()

    def _report(self) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        log.warning(
            "loop.blocked",
            environments=self._environments(),
            blocked_s=self._limit_s,
            remedy=_REMEDY,
            stack="".join(traceback.format_stack(frame)[-_MAX_FRAMES:]),
        )
