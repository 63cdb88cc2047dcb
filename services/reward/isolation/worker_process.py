"""Handles of the forkserver and of its workers, in the server: start, ask, kill. Nothing here blocks the event loop."""

import asyncio
import contextlib
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import structlog

from penstock.runtime import security
from services.reward.isolation.forkserver_protocol import (
    COMMAND,
    MAX_REPLY_BYTES,
    REAP,
    SPAWN,
    ForkserverReply,
    ForkserverSettings,
    Sandbox,
)
from services.reward.isolation.tasks import HEADER, Task, WorkerReply, WorkerRequest, frame

log = structlog.get_logger()

_START_TIMEOUT_S = 60.0
_SPAWN_TIMEOUT_S = 10.0
_MAX_REPLY_BYTES = 2**20
"""Honest replies are a few kilobytes; memory of the server is not for a worker to fill."""


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
        self.num_demotions = 0
        """Steps down in priority; there is no way back up without privileges."""
        self._cpu_before_s = 0.0
        self._reader = reader
        self._writer = writer
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


class Forkserver:
    """The process that workers are forked from; it can be started again after `stop`."""

    def __init__(self, *, memory_limit_bytes: int, sandbox: Sandbox, verifiers: Mapping[str, str]) -> None:
        self._memory_limit_bytes = memory_limit_bytes
        self._sandbox = sandbox
        self._verifiers = dict(verifiers)
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._pids: set[int] = set()
        self._to_reap: list[int] = []

    async def start(self) -> None:
        """Start it and wait until math-verify is imported.

        Raises:
            WorkerDiedError: it does not come up; the message says why.
            OSError: no socket or no process can be had.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs:
            settings = ForkserverSettings(
                parent_pid=os.getpid(),
                control_fd=theirs.fileno(),
                memory_limit_bytes=self._memory_limit_bytes,
                sandbox=self._sandbox,
                verifiers=self._verifiers,
            )
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "services.reward.isolation.forkserver", msgspec.json.encode(settings).decode()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if name not in security.VARIABLES},
                pass_fds=(theirs.fileno(),),
                # An interrupt at the terminal is for the server, which drains. Not a session of its own: the kernel
                # shares the processor out by sessions first, and a demoted worker would get the share of its session.
                process_group=0,
            )
        reply = await self._reply(_START_TIMEOUT_S)
        if reply.error:
            raise WorkerDiedError(reply.error)
        if reply.warning:
            log.warning("sandbox.missing", reason=reply.warning)

    async def spawn(self) -> WorkerProcess:
        """Fork a worker. One call at a time.

        Raises:
            WorkerDiedError: the forkserver is gone.
            OSError: no socket can be opened, or it has too much to do; it may succeed later.
        """
        if self._control is None:
            raise WorkerDiedError("the forkserver is not running")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                socket.send_fds(self._control, [COMMAND.pack(SPAWN, 0)], [theirs.fileno()])
            pid = (await self._reply(_SPAWN_TIMEOUT_S)).pid
            self._pids.add(pid)
            reader, writer = await asyncio.open_connection(sock=ours)
        except ConnectionError as error:
            ours.close()
            raise WorkerDiedError(f"the forkserver is gone: {error}") from None
        except BaseException:
            ours.close()
            raise
        self._reap()
        return WorkerProcess(pid, reader, writer, self)

    def kill_worker(self, pid: int) -> None:
        """Kill and reap worker `pid`; nothing happens if it is not, or no longer, this forkserver's."""
        if pid not in self._pids:
            return
        self._pids.discard(pid)
        with contextlib.suppress(ProcessLookupError):  # the forkserver is gone, and its workers went with it
            os.kill(pid, signal.SIGKILL)
        self._to_reap.append(pid)
        self._reap()

    async def stop(self) -> None:
        """Kill it, and so its workers, and wait until it is gone."""
        self._pids.clear()
        self._to_reap.clear()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()
            self._process = None

    def _reap(self) -> None:
        while self._control is not None and self._to_reap:
            try:
                self._control.send(COMMAND.pack(REAP, self._to_reap[-1]))
            except OSError:
                return  # its queue is full, and the next call tries again; or it is gone
            self._to_reap.pop()

    async def _reply(self, timeout_s: float) -> ForkserverReply:
        assert self._control is not None
        try:
            async with asyncio.timeout(timeout_s):
                message = await asyncio.get_running_loop().sock_recv(self._control, MAX_REPLY_BYTES)
        except (TimeoutError, OSError) as error:
            raise WorkerDiedError(f"the forkserver does not answer: {error!r}") from None
        try:
            return _FORKSERVER_REPLIES.decode(message)
        except msgspec.MsgspecError:
            raise WorkerDiedError(
                "the forkserver ended; its message is on standard error; is math-verify installed? "
                "pip install 'penstock[reward]'"
            ) from None


_REPLIES = msgspec.msgpack.Decoder(WorkerReply)
_FORKSERVER_REPLIES = msgspec.msgpack.Decoder(ForkserverReply)
