"""The server's handle of a forkserver: start, fork, kill. Nothing here blocks the event loop."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Mapping

import msgspec
import structlog

from penstock.runtime.isolation.forkserver_protocol import (
    AT_THE_LIMIT,
    COMMAND,
    MAX_REPLY_BYTES,
    REAP,
    SPAWN,
    ForkserverReply,
    ForkserverSettings,
    Sandbox,
)

log = structlog.get_logger()

_START_TIMEOUT_S = 60.0
_SPAWN_TIMEOUT_S = 10.0
_REPLIES = msgspec.msgpack.Decoder(ForkserverReply)


class WorkerDiedError(Exception):
    """The process at the other end is gone, or does not start."""


@dataclasses.dataclass(frozen=True, slots=True)
class ForkedWorker:
    """A worker process that was just forked, and its socket."""

    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Forkserver:
    """The process that workers are forked from; it can be restarted after `stop`."""

    def __init__(
        self,
        module: str,
        workers: msgspec.Struct,
        *,
        sandbox: Sandbox,
        environment: Mapping[str, str],
        hint: str = "",
    ) -> None:
        """Prepare a forkserver without starting it.

        Args:
            module: The module that it runs; see `penstock.runtime.isolation.forkserver`.
            workers: The module's own settings.
            sandbox: Whether workers are confined, see `ForkserverSettings`.
            environment: Its environment variables, which workers see.
            hint: Remedy to show if it ends before it is ready.
        """
        self._module = module
        self._workers = workers
        self._sandbox = sandbox
        self._environment = dict(environment)
        self._hint = hint
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._pids: set[int] = set()
        self._to_reap: list[int] = []

    async def start(self) -> None:
        """Start the forkserver and wait until it is ready to fork; one that does not become ready is killed.

        Raises:
            WorkerDiedError: it does not start; the message says why.
            OSError: the system has no socket, process or thread left.
        """
        try:
            await self._start()
        except BaseException as error:
            await self.stop()  # otherwise `spawn` would take the late word that it is ready for its own answer
            if isinstance(error, BlockingIOError | RuntimeError):  # asyncio waits for each process in a thread
                raise OSError(f"{error}; {AT_THE_LIMIT}") from None
            raise

    async def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs:
            settings = ForkserverSettings(parent_pid=os.getpid(), control_fd=theirs.fileno(), sandbox=self._sandbox)
            arguments = [msgspec.json.encode(part).decode() for part in (settings, self._workers)]
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", self._module, *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                # Nothing else may get its number: it is None if it was closed when this process started.
                stderr=asyncio.subprocess.DEVNULL if sys.stderr is None else None,
                env=self._environment,
                pass_fds=(theirs.fileno(),),
                # A terminal's interrupt is for the server, which drains. The forkserver has no session of its own: the
                # kernel shares the processor among sessions first, and a demoted worker would get its session's share.
                process_group=0,
            )
        reply = await self._reply(_START_TIMEOUT_S)
        if reply.error:
            raise WorkerDiedError(reply.error)
        if reply.warning:
            log.warning("sandbox.missing", reason=reply.warning)

    async def spawn(self) -> ForkedWorker:
        """Fork a worker. One call at a time.

        Raises:
            WorkerDiedError: the forkserver is gone.
            OSError: no socket or process is left, or the forkserver is too busy; a retry may succeed.
        """
        if self._control is None:
            raise WorkerDiedError("the forkserver is not running")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                socket.send_fds(self._control, [COMMAND.pack(SPAWN, 0)], [theirs.fileno()])
            reply = await self._reply(_SPAWN_TIMEOUT_S)
            if reply.error:
                raise OSError(reply.error)
            pid = reply.pid
            if pid <= 0:  # to kill it would be to kill this process's group
                raise WorkerDiedError(f"the forkserver named {pid} as a worker's process")
            self._pids.add(pid)
            reader, writer = await asyncio.open_connection(sock=ours)
        except ConnectionError as error:
            ours.close()
            raise WorkerDiedError(f"the forkserver is gone: {error}") from None
        except BaseException:
            ours.close()
            raise
        self._reap()
        return ForkedWorker(pid, reader, writer)

    def kill_worker(self, pid: int) -> None:
        """Kill worker `pid` with the programs that it started, and reap it; do nothing if it is not, or no longer, this
        forkserver's."""
        if pid not in self._pids:
            return
        self._pids.discard(pid)
        _kill_group(pid)
        self._to_reap.append(pid)
        self._reap()

    async def stop(self) -> None:
        """Kill the forkserver, its workers and the programs that they started, and wait until it is gone."""
        while self._pids:
            _kill_group(self._pids.pop())
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
                return  # the socket's queue is full, so the next call retries; or the forkserver is gone
            self._to_reap.pop()

    async def _reply(self, timeout_s: float) -> ForkserverReply:
        assert self._control is not None
        try:
            async with asyncio.timeout(timeout_s):
                message = await asyncio.get_running_loop().sock_recv(self._control, MAX_REPLY_BYTES)
        except (TimeoutError, OSError) as error:
            raise WorkerDiedError(f"the forkserver does not answer: {error!r}") from None
        try:
            return _REPLIES.decode(message)
        except msgspec.MsgspecError:
            raise WorkerDiedError(f"the forkserver ended; its message is on standard error{self._hint}") from None


def _kill_group(pid: int) -> None:
    """Kill a worker and what else is in its process group."""
    with contextlib.suppress(ProcessLookupError):  # the forkserver is gone, and its workers went with it
        os.killpg(pid, signal.SIGKILL)
