"""The handle of a worker, in the server: ask, demote, kill. Nothing here blocks the event loop."""

import contextlib
import os
import resource
import secrets
import time
from pathlib import Path

import msgspec

from penstock.runtime.isolation.forkserver_process import ForkedWorker, Forkserver, WorkerDiedError
from penstock.runtime.isolation.frames import HEADER, frame
from services.reward.isolation.tasks import Task, WorkerReply, WorkerRequest

_MAX_REPLY_BYTES = 2**20
"""Honest replies are a few kilobytes; memory of the server is not for a worker to fill."""


class WorkerProcess:
    """One worker."""

    def __init__(self, forked: ForkedWorker, forkserver: Forkserver) -> None:
        self.pid = forked.pid
        self.num_items = 0
        """Items that it was given so far."""
        self.num_demotions = 0
        """Steps down in priority; there is no way back up without privileges."""
        self._cpu_before_s = 0.0
        self._reader = forked.reader
        self._writer = forked.writer
        self._forkserver = forkserver

    @property
    def is_alive(self) -> bool:
        """False once its end of the socket was seen to close."""
        return not self._reader.at_eof()

    @property
    def resident_bytes(self) -> int:
        """Memory that it has, what it shares with the forkserver included; 0 if it is gone."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_bytes().split()[1]) * resource.getpagesize()
        except OSError:
            return 0

    async def ask(self, task: Task, *, cpu_limit_s: int) -> WorkerReply:
        """Send `task` and return the reply; if cancelled, the worker must be killed.

        Raises:
            WorkerDiedError: it died, or does not keep to the protocol.
        """
        self.num_items += 1
        self._cpu_before_s = self._cpu_s()
        try:
            token = secrets.randbits(63)
            self._writer.write(frame(WorkerRequest(task=task, cpu_limit_s=cpu_limit_s, token=token)))
            await self._writer.drain()
            (size_bytes,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if size_bytes > _MAX_REPLY_BYTES:
                raise WorkerDiedError(f"worker {self.pid}: a reply of {size_bytes} bytes")
            reply = _REPLIES.decode(await self._reader.readexactly(size_bytes))
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            raise WorkerDiedError(f"worker {self.pid}: {error}") from None
        if reply.token != token:  # a verifier, or what it ran, wrote to the socket
            raise WorkerDiedError(f"worker {self.pid}: a reply to another request")
        return reply

    @property
    def item_cpu_s(self) -> float:
        """Processor time that its item has taken so far."""
        return self._cpu_s() - self._cpu_before_s

    def _cpu_s(self) -> float:
        try:
            return time.clock_gettime(~self.pid << 3 | 2)  # the kernel's number of the process's clock
        except OSError:
            return self._cpu_before_s

    def demote(self) -> None:
        """Let it have a tenth of what others get of a busy core; the second time, only what nobody else wants."""
        self.num_demotions += 1
        with contextlib.suppress(OSError):  # it may be gone; and it is not worth an error where the kernel refuses
            if self.num_demotions == 1:
                os.setpriority(os.PRIO_PROCESS, self.pid, os.getpriority(os.PRIO_PROCESS, 0) + 10)
            else:
                os.sched_setscheduler(self.pid, os.SCHED_IDLE, os.sched_param(0))

    def kill(self) -> None:
        """Kill it, whatever it does."""
        self._writer.close()
        self._forkserver.kill_worker(self.pid)


_REPLIES = msgspec.msgpack.Decoder(WorkerReply)
