"""The server's handle of a worker: ask, demote, kill. Nothing here blocks the event loop."""

import contextlib
import os
import resource
import secrets
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from penstock.runtime.isolation.forkserver_process import ForkedWorker, Forkserver, WorkerDiedError
from penstock.runtime.isolation.frames import HEADER, frame
from services.reward.isolation.tasks import Task, WorkerReply, WorkerRequest

_MAX_REPLY_BYTES = 2**20
"""Maximum size of a reply. Honest replies are a few kilobytes, and a worker must not fill the server's memory."""
_LOWEST_PRIORITY = 19


class WorkerProcess:
    """One worker."""

    def __init__(self, forked: ForkedWorker, forkserver: Forkserver) -> None:
        self.pid = forked.pid
        self.num_items = 0
        """Number of items that it has received."""
        self.num_demotions = 0
        """Steps down in priority; it cannot go up again without privileges."""
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
        """Its memory, including what it shares with the forkserver; 0 if it is gone."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_bytes().split()[1]) * resource.getpagesize()
        except OSError:
            return 0

    def ask(self, task: Task, *, cpu_limit_s: int) -> Coroutine[Any, Any, WorkerReply]:
        """Count `task`, and return what sends it and returns the reply; if cancelled, the worker must be killed.

        The item's processor time counts from this call.

        Raises:
            WorkerDiedError: when awaited, if it died or broke the protocol.
        """
        self.num_items += 1
        self._cpu_before_s = self._cpu_s()
        return self._ask(task, cpu_limit_s)

    async def _ask(self, task: Task, cpu_limit_s: int) -> WorkerReply:
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
        if reply.token != token:  # a verifier, or its child, wrote to the socket
            raise WorkerDiedError(f"worker {self.pid}: a reply to another request")
        return reply

    @property
    def item_cpu_s(self) -> float:
        """Processor time of its item so far, in seconds."""
        return self._cpu_s() - self._cpu_before_s

    def _cpu_s(self) -> float:
        try:
            return time.clock_gettime(~self.pid << 3 | 2)  # the kernel's id of the process's clock
        except OSError:
            return self._cpu_before_s

    def demote(self) -> None:
        """Give it a tenth of the others' share of a busy core; the second time, the least share there is.

        It never gets idle cores only: on a machine that is busy for long, its item would not end before its deadline.
        """
        self.num_demotions += 1
        priority = os.getpriority(os.PRIO_PROCESS, 0) + 10 if self.num_demotions == 1 else _LOWEST_PRIORITY
        with contextlib.suppress(OSError):  # it may be gone, and a refusal by the kernel is not worth an error
            os.setpriority(os.PRIO_PROCESS, self.pid, priority)

    def kill(self) -> None:
        """Kill it, whatever it is doing."""
        self._writer.close()
        self._forkserver.kill_worker(self.pid)


_REPLIES = msgspec.msgpack.Decoder(WorkerReply)
