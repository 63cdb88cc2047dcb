"""Runs code for all episodes of a worker: one forkserver, and one process per piece of code, killed afterwards.

Invariant: no process outlives its call, and no call sees anything of another.
"""

import asyncio
import dataclasses
import os
from typing import ClassVar, Literal, TypeAlias

import msgspec

from penstock.errors import SetupError
from penstock.runtime.isolation.forkserver_process import ForkedWorker, Forkserver, WorkerDiedError
from penstock.runtime.isolation.frames import HEADER, frame
from services.rollout.worker.environments.confined_python.messages import (
    Code,
    Finished,
    InterpreterSettings,
    Printed,
    Report,
)

Ending: TypeAlias = Literal["finished", "out_of_time", "killed"]

_REPORTS: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
_BYTES_PER_CHARACTER = 4
_MAX_REPORT_BYTES = 4096
"""Maximum size of a report, not counting its text."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The outcome of a piece of code."""

    ending: Ending
    printed: str
    value: str = ""
    error: str = ""
    num_dropped: int = 0


class Interpreter:
    """The processes that run code. Users with the same settings, in the same event loop, share one interpreter."""

    _shared: ClassVar[dict[tuple[asyncio.AbstractEventLoop, InterpreterSettings], "Interpreter"]] = {}

    def __init__(self, settings: InterpreterSettings) -> None:
        """Make an interpreter that starts with its first call."""
        self._settings = settings
        # Nothing is inherited from the worker's environment: it may hold secrets, and code can read it.
        self._forkserver = Forkserver(
            "services.rollout.worker.environments.confined_python.forkserver",
            settings,
            sandbox="require",
            environment={
                **{name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LANG") if name in os.environ},
                **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            },
        )
        self._num_users = 0
        self._is_started = False
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(len(os.sched_getaffinity(0)))
        self._forks: set[asyncio.Task[ForkedWorker]] = set()

    @classmethod
    def acquire(cls, settings: InterpreterSettings) -> "Interpreter":
        """Return the shared interpreter; give it back with `release`."""
        key = (asyncio.get_running_loop(), settings)
        if key not in cls._shared:
            cls._shared[key] = cls(settings)
        found = cls._shared[key]
        found._num_users += 1
        return found

    async def release(self) -> None:
        """Give the interpreter back; the last user ends the forkserver."""
        self._num_users -= 1
        if self._num_users == 0:
            del self._shared[asyncio.get_running_loop(), self._settings]
            async with self._starting:
                await self._forkserver.stop()

    async def run(self, source: str) -> Run:
        """Run a piece of code, as many at once as there are processors.

        Raises:
            SetupError: processes cannot be started or confined.
        """
        async with self._slots:
            # Shielded from cancellation: otherwise the next call would take the forkserver's answer for its own.
            fork = asyncio.ensure_future(self._fork())
            self._forks.add(fork)
            fork.add_done_callback(self._forks.discard)
            try:
                worker = await asyncio.shield(fork)
            except asyncio.CancelledError:
                fork.add_done_callback(self._kill_unused)
                raise
            try:
                return await self._follow(worker, source)
            finally:
                self._kill(worker)

    async def _fork(self) -> ForkedWorker:
        async with self._starting:
            if self._num_users == 0:
                raise SetupError("tool python: its episode is over")
            try:
                try:
                    return await self._started_fork()
                except WorkerDiedError:  # the forkserver was killed
                    await self._forkserver.stop()
                    self._is_started = False
                    return await self._started_fork()
            except (WorkerDiedError, OSError) as error:
                if isinstance(error, WorkerDiedError):  # otherwise others' code runs on
                    await self._forkserver.stop()
                    self._is_started = False
                raise SetupError(f"tool python: its processes do not start: {error}") from None

    async def _started_fork(self) -> ForkedWorker:
        if not self._is_started:
            await self._forkserver.start()
            self._is_started = True
        return await self._forkserver.spawn()

    async def _follow(self, worker: ForkedWorker, source: str) -> Run:
        printed: list[str] = []
        ending: Ending = "killed"
        finished = None
        try:
            async with asyncio.timeout(self._settings.time_limit_s):
                worker.writer.write(frame(Code(source=source)))
                await worker.writer.drain()
                finished = await self._collect(worker.reader, printed)
                ending = "finished"
        except TimeoutError:
            ending = "out_of_time"
        except (EOFError, OSError, msgspec.MsgspecError):
            pass  # it crashed, was ended by the kernel, or broke the protocol
        text = "".join(printed)
        if finished is None:
            return Run(ending=ending, printed=text)
        return Run(
            ending=ending,
            printed=text,
            value=finished.value,
            error=finished.error,
            num_dropped=finished.num_dropped,
        )

    async def _collect(self, reader: asyncio.StreamReader, printed: list[str]) -> Finished:
        """Read reports up to the last. The process is not trusted, so the limits are enforced here again."""
        room = self._settings.max_characters
        while True:
            (size_bytes,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            if size_bytes > 2 * _BYTES_PER_CHARACTER * self._settings.max_characters + _MAX_REPORT_BYTES:
                raise EOFError
            match _REPORTS.decode(await reader.readexactly(size_bytes)):
                case Printed(text=text):
                    room -= len(text)
                    if room < 0 or not text:
                        raise EOFError
                    printed.append(text)
                case Finished() as finished:
                    return finished

    def _kill_unused(self, fork: asyncio.Task[ForkedWorker]) -> None:
        if not fork.cancelled() and fork.exception() is None:
            self._kill(fork.result())

    def _kill(self, worker: ForkedWorker) -> None:
        worker.writer.close()
        self._forkserver.kill_worker(worker.pid)
