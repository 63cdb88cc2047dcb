"""Processes on this machine: each in its own session, ended with all its descendants."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress

from penstock.runtime.children.reaper import Reaper
from penstock.runtime.ports import held_ports
from penstock.runtime.starting import explained, start_program
from services.launch.process.backend import Ending
from services.launch.process.bounded_log import BoundedLog
from services.launch.process.spec import ProcessSpec


class LocalProcess:
    """A process of this machine."""

    def __init__(self, process: asyncio.subprocess.Process, address: str, reaper: Reaper, held: ExitStack) -> None:
        """Watch a process that serves at `address`; what is `held` is given back at its end."""
        self._process = process
        self._address = address
        self._reaper = reaper
        self._held = held

    @property
    def address(self) -> str:
        """host:port on which it serves."""
        return self._address

    @property
    def pid(self) -> int:
        """Process id, and the id of its process group."""
        return self._process.pid

    async def wait(self) -> Ending:
        """Wait for its end, and kill what is left of its process group."""
        with self._held:
            code = await self._process.wait()
            self.kill()
            self._reaper.forget(self._process.pid)
        return Ending(code=code)

    def terminate(self) -> None:
        """Ask it to end; it ends its own children."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Kill it and everything that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class LocalBackend:
    """Starts processes on this machine. Use `local_backend`."""

    def __init__(self, reaper: Reaper, *, host: str = "127.0.0.1") -> None:
        """Name the processes to `reaper`; those without a port get one that is free on `host`."""
        self._reaper = reaper
        self._host = host

    async def start(self, spec: ProcessSpec, log: BoundedLog, stop: asyncio.Event) -> LocalProcess:
        """Start the process, if need be with a port of its own, which is held until it ends.

        Each start gets a new port: callers of the old process cannot reach the new one by mistake.
        """
        with ExitStack() as held:
            command, address = [*spec.command], spec.address
            host, _, port = spec.address.rpartition(":")
            if spec.port_key and port == "0":
                (free,) = held.enter_context(held_ports(1, host=self._host))
                address = f"{host}:{free}"
                command.append(f"--{spec.port_key}={free}")
            with log.path.open("ab") as output:
                process = await start_program(
                    *command,
                    env=dict(spec.environment),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=self._reaper.naming_child(),
                )
            return LocalProcess(process, address, self._reaper, held.pop_all())

    async def forget(self, spec: ProcessSpec) -> None:
        """Do nothing: this machine keeps nothing between starts."""


@asynccontextmanager
async def local_backend(*, host: str = "127.0.0.1") -> AsyncIterator[LocalBackend]:
    """Yield a backend of this machine; whatever ends this process also ends the processes that it started.

    Raises:
        SetupError: this machine has no room for another process.
    """
    try:
        reaper = await Reaper.start()
    except OSError as error:
        raise explained("the process that ends all others if the launcher is killed", error) from None
    try:
        yield LocalBackend(reaper, host=host)
    finally:
        await reaper.end()
