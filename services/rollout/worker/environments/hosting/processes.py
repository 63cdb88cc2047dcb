"""Environments in processes, as the worker sees them: a server that forks one for each episode, and the pipe to it.

Invariants: the worker's event loop never waits for an environment. A process ends with its episode, with the worker, or
when it is killed.
"""

import asyncio
import collections
import contextlib
import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import structlog

from penstock.environments import Task
from penstock.errors import ConfigError, EnvironmentFailedError, PenstockError, UnavailableError
from penstock.runtime import security
from services.rollout.worker.environments.hosting import messages
from services.rollout.worker.environments.hosting.episode_process import HEADER
from services.rollout.worker.environments.hosting.forkserver_protocol import (
    MAX_PACKET_BYTES,
    Command,
    Event,
    Exited,
    ForkserverSettings,
    Kill,
    Ready,
    Spawn,
    Spawned,
)
from services.rollout.worker.environments.hosting.hosted import HostedEnvironment
from services.rollout.worker.environments.hosting.messages import AnyReply, AnyRequest, CloseRequest

log = structlog.get_logger()

_START_TIMEOUT_S = 120.0
_EXIT_TIMEOUT_S = 30.0
"""Seconds for a process to be reported as ended after its pipe closed; only the slot of its sample waits for it."""
_STOP_TIMEOUT_S = 5.0
"""Seconds for the server to end before it is killed."""
_CLOSE_TIMEOUT_S = 6.0
"""Seconds for an environment's `close`. A worker that ends waits for it too, and its launcher kills it 10 s after its
grace; so those who wait for this one have 7 s (a server's episode), 8 s (the server's caller) and 9 s (the sample)."""


class EnvironmentProcesses:
    """Makes environments that each run in their own process. Start and stop it in one event loop."""

    def __init__(self, name: str, path: str, args: Mapping[str, Any]) -> None:
        """Run the class at `path`, "package.module:Class", with `args`; rows call it `name`."""
        self._name = name
        self._settings = {"path": path, "args": dict(args)}
        self._starting = asyncio.Lock()
        self._forkserver: _Forkserver | None = None

    def __call__(self) -> HostedEnvironment:
        """Return the environment of one episode; its process starts at reset."""
        return HostedEnvironment(self._open, name=self._name)

    async def start(self) -> None:
        """Import the environment's module in the server, unless the server runs already.

        Raises:
            ConfigError: it cannot be loaded, or does not take the arguments.
        """
        async with self._starting:
            if self._forkserver is not None and self._forkserver.is_alive:
                return
            if self._forkserver is not None:
                log.warning("environment.forkserver_died", environment=self._name)
                await self._forkserver.stop()
            self._forkserver = _Forkserver()
            try:
                await self._forkserver.start(self._settings)
            except BaseException as error:
                forkserver, self._forkserver = self._forkserver, None
                await forkserver.stop()
                if isinstance(error, ConfigError):
                    raise ConfigError(f"environment {self._name}: {error}") from None
                raise

    async def stop(self) -> None:
        """Kill all processes, and wait for the server to end."""
        if self._forkserver is not None:
            await self._forkserver.stop()
            self._forkserver = None

    async def _open(self, _: Task) -> "_ProcessChannel":
        await self.start()
        assert self._forkserver is not None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await self._forkserver.spawn(theirs)
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_connection(sock=ours)
        return _ProcessChannel(self._name, self._forkserver, process, reader, writer)


@dataclasses.dataclass(slots=True)
class _Process:
    """The process of an episode."""

    pid: int
    exited: "asyncio.Future[Exited]"


class _ProcessChannel:
    """The pipe to one process."""

    def __init__(
        self,
        name: str,
        forkserver: "_Forkserver",
        process: _Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._name = name
        self._forkserver = forkserver
        self._process = process
        self._reader = reader
        self._writer = writer
        self._doing = "reset"

    async def exchange(self, request: AnyRequest) -> AnyReply:
        self._doing = str(request.__struct_config__.tag)
        data = messages.encode(request)
        try:
            self._writer.write(HEADER.pack(len(data)))
            self._writer.write(data)
            await self._writer.drain()
            (size_bytes,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if size_bytes > messages.MAX_MESSAGE_BYTES:
                raise EnvironmentFailedError(f"it answered {self._doing} with {messages.too_large(size_bytes)}")
            return messages.decode_reply(await self._reader.readexactly(size_bytes))
        except (EOFError, OSError):
            raise EnvironmentFailedError(await self._describe_end()) from None

    async def end(self, number: int, *, is_idle: bool) -> None:
        was_doing, reason = self._doing, ""
        try:
            if is_idle:
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    reply = await self.exchange(CloseRequest(number=number, remaining_s=_CLOSE_TIMEOUT_S))
                    reason = getattr(reply, "error", "")
            elif not self._process.exited.done():
                reason = f"its {was_doing} was not finished when the episode ended"
        except TimeoutError:
            reason = f"its close took longer than {_CLOSE_TIMEOUT_S:g} s"
        except PenstockError as error:
            reason = str(error)
        finally:
            self._writer.transport.abort()  # without waiting until a stuck process reads
            self._forkserver.kill(self._process.pid)
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                ended = await asyncio.shield(self._process.exited)
                if reason:
                    log.warning("environment.killed", environment=self._name, reason=reason, output=ended.output)
                elif ended.output:
                    log.debug("environment.wrote", environment=self._name, output=ended.output)

    async def _describe_end(self) -> str:
        try:
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                ended = await asyncio.shield(self._process.exited)
        except TimeoutError:
            return f"its process closed its pipe during {self._doing}"
        except ConnectionError:
            return f"its process was killed with the server that forked it, during {self._doing}"
        if ended.status >= 0:
            how = f"ended with exit code {ended.status}"
        else:
            how = f"was ended by {_signal_name(-ended.status)}"
            if ended.status == -signal.SIGKILL:
                how += " (as the kernel does when memory runs out)"
        wrote = f"; it wrote last: {ended.output}" if ended.output else ""
        return f"its process {how} during {self._doing}{wrote}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class _Forkserver:
    """The server that forks. Start it once."""

    def __init__(self) -> None:
        self.is_alive = False
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._outbox: collections.deque[tuple[bytes, socket.socket | None]] = collections.deque()
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._spawning: collections.deque[asyncio.Future[_Process]] = collections.deque()
        self._running: dict[int, _Process] = {}

    async def start(self, settings: Mapping[str, Any]) -> None:
        """Start the server, and wait until it has imported the environment.

        Raises:
            ConfigError: the environment cannot be loaded.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs:
            argument = ForkserverSettings(
                parent_pid=os.getpid(), control_fd=theirs.fileno(), sys_path=[*filter(None, sys.path)], **settings
            )
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", "services.rollout.worker.environments.hosting.forkserver"),
                msgspec.json.encode(argument).decode(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if name not in security.VARIABLES},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # an interrupt at the terminal is meant for the worker, which drains
            )
        self.is_alive = True
        asyncio.get_running_loop().add_reader(self._control, self._read)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                ready = await self._ready
        except TimeoutError:
            raise ConfigError(
                f"importing it took longer than {_START_TIMEOUT_S:g} s; look at what it imports"
            ) from None
        except ConnectionError:
            code = await self._process.wait()
            how = f"exit code {code}" if code >= 0 else _signal_name(-code)
            raise ConfigError(f"its import ended the process with {how}; its message is on standard error") from None
        if ready.error:
            raise ConfigError(ready.error)

    async def spawn(self, channel: socket.socket) -> _Process:
        """Fork a process that serves `channel`.

        Raises:
            UnavailableError: no process can be forked at the moment.
        """
        spawned: asyncio.Future[_Process] = asyncio.get_running_loop().create_future()
        try:
            own = channel.dup()
        except OSError as error:  # before anything is noted: answers come in the order of what was asked
            raise UnavailableError(f"no process can be started: {error.strerror}") from None
        self._spawning.append(spawned)
        self._send(Spawn(), own)
        try:
            return await spawned
        except ConnectionError:
            raise UnavailableError("the server that forks environments ended; another try starts it again") from None

    def kill(self, pid: int) -> None:
        """Kill a process and its process group; do nothing if it has ended."""
        if pid in self._running:
            self._send(Kill(pid=pid))

    async def stop(self) -> None:
        """Close the server's socket, so that it kills all processes and ends; wait for its end."""
        self._lose()
        if self._process is not None:
            try:
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    def _send(self, command: Command, channel: socket.socket | None = None) -> None:
        self._outbox.append((msgspec.msgpack.encode(command), channel))
        self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._outbox and self._control is not None:
            packet, channel = self._outbox[0]
            try:
                if channel is None:
                    self._control.send(packet)
                else:
                    socket.send_fds(self._control, [packet], [channel.fileno()])
            except BlockingIOError:
                loop.add_writer(self._control, self._flush)
                return
            except OSError:
                self._lose()
                return
            self._outbox.popleft()
            if channel is not None:
                channel.close()
        if self._control is not None:
            loop.remove_writer(self._control)
        else:
            self._drop_outbox()

    def _read(self) -> None:
        assert self._control is not None
        try:
            packet = self._control.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._lose()
            return
        match _EVENTS.decode(packet):
            case Ready() as ready:
                if not self._ready.done():
                    self._ready.set_result(ready)
            case Spawned() as event:
                self._note_spawned(event)
            case Exited() as event:
                self._running.pop(event.pid).exited.set_result(event)

    def _note_spawned(self, event: Spawned) -> None:
        spawned = self._spawning.popleft()
        if event.error:
            if not spawned.done():
                spawned.set_exception(UnavailableError(event.error))
            return
        process = _Process(event.pid, asyncio.get_running_loop().create_future())
        self._running[event.pid] = process
        if spawned.done():  # the episode was cancelled in the meantime
            self.kill(event.pid)
        else:
            spawned.set_result(process)

    def _lose(self) -> None:
        """Note the end of the server, and with it of its processes."""
        self.is_alive = False
        if self._control is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._control)
        loop.remove_writer(self._control)
        self._control.close()
        self._control = None
        self._drop_outbox()
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._spawning]
        for future in (*waiting, *(process.exited for process in self._running.values())):
            if not future.done():
                future.set_exception(ConnectionResetError("the server that forks environments ended"))
                future.exception()  # it may have no reader
        self._spawning.clear()
        self._running.clear()

    def _drop_outbox(self) -> None:
        for _, channel in self._outbox:
            if channel is not None:
                channel.close()
        self._outbox.clear()


_EVENTS: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
