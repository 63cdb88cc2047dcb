"""Handles of the forkserver and of its workers, in the server: start, ask, kill. Nothing here blocks the event loop."""

import asyncio
import os
import signal
import socket
import sys

import msgspec

from services.reward.isolation.forkserver_protocol import COMMAND, REAP, REPLY, SPAWN
from services.reward.isolation.tasks import HEADER, Task, WorkerReply, WorkerRequest, frame

_START_TIMEOUT_S = 60.0
_SPAWN_TIMEOUT_S = 10.0


class WorkerDiedError(Exception):
    """The process at the other end is gone, or does not come up."""


class WorkerProcess:
    """One worker."""

    def __init__(
        self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, forkserver: "Forkserver"
    ) -> None:
        self.pid = pid
        self.num_items = 0
        """Items that it was given so far."""
        self._reader = reader
        self._writer = writer
        self._forkserver = forkserver

    @property
    def is_alive(self) -> bool:
        """False once its end of the socket was seen to close."""
        return not self._reader.at_eof()

    async def ask(self, task: Task, *, cpu_limit_s: int) -> WorkerReply:
        """Send `task` and return the reply; if cancelled, the worker must be killed.

        Raises:
            WorkerDiedError: it died.
        """
        self.num_items += 1
        try:
            self._writer.write(frame(WorkerRequest(task=task, cpu_limit_s=cpu_limit_s)))
            await self._writer.drain()
            (size_bytes,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            return _DECODER.decode(await self._reader.readexactly(size_bytes))
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            raise WorkerDiedError(f"worker {self.pid}: {error}") from None

    def kill(self) -> None:
        """Kill it, whatever it does."""
        self._writer.close()
        self._forkserver.kill_worker(self.pid)


class Forkserver:
    """The process that workers are forked from; it can be started again after `stop`."""

    def __init__(self, memory_limit_bytes: int) -> None:
        self._memory_limit_bytes = memory_limit_bytes
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._pids: set[int] = set()

    async def start(self) -> None:
        """Start it and wait until math-verify is imported.

        Raises:
            WorkerDiedError: it does not come up.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        arguments = (str(theirs.fileno()), str(os.getpid()), str(self._memory_limit_bytes))
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "services.reward.isolation.forkserver", *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # an interrupt at the terminal is for the server, which drains
            )
        await self._reply(_START_TIMEOUT_S)

    async def spawn(self) -> WorkerProcess:
        """Fork a worker. One call at a time.

        Raises:
            WorkerDiedError: the forkserver is gone.
        """
        if self._control is None:
            raise WorkerDiedError("the forkserver is not running")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                socket.send_fds(self._control, [COMMAND.pack(SPAWN, 0)], [theirs.fileno()])
            pid = await self._reply(_SPAWN_TIMEOUT_S)
            self._pids.add(pid)
            reader, writer = await asyncio.open_connection(sock=ours)
        except OSError as error:
            ours.close()
            raise WorkerDiedError(f"the forkserver is gone: {error}") from None
        except BaseException:
            ours.close()
            raise
        return WorkerProcess(pid, reader, writer, self)

    def kill_worker(self, pid: int) -> None:
        """Kill and reap worker `pid`; nothing happens if it is not, or no longer, this forkserver's."""
        if pid not in self._pids or self._control is None:
            return
        self._pids.discard(pid)
        try:
            os.kill(pid, signal.SIGKILL)
            self._control.send(COMMAND.pack(REAP, pid))
        except OSError:
            pass  # the forkserver is gone, and its workers went with it

    async def stop(self) -> None:
        """Kill it, and so its workers, and wait until it is gone."""
        self._pids.clear()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
            self._process = None

    async def _reply(self, timeout_s: float) -> int:
        assert self._control is not None
        try:
            async with asyncio.timeout(timeout_s):
                message = await asyncio.get_running_loop().sock_recv(self._control, REPLY.size)
        except (TimeoutError, OSError) as error:
            raise WorkerDiedError(f"the forkserver does not answer: {error!r}") from None
        if len(message) != REPLY.size:
            raise WorkerDiedError("the forkserver ended; its message is on standard error")
        (pid,) = REPLY.unpack(message)
        return int(pid)


_DECODER = msgspec.msgpack.Decoder(WorkerReply)
