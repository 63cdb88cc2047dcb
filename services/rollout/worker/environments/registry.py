"""Finds environments by the name that a prompt gives, and decides where each runs.

Names are looked up in the worker's own configuration, then in the entry points of group `penstock.environments`, then
among those that come with Penstock. A prompt can only name an environment; it cannot make a worker import code.

An async class runs in the event loop, unless it is configured as isolated. A class of plain functions runs in its own
process for each episode, and the number of these that live at once is limited.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from penstock.environments import EnvironmentFactory
from penstock.errors import ConfigError, InvalidRequestError, OverloadedError
from penstock.runtime.security import Security
from services.rollout.worker.environments.config import (
    BUILT_IN,
    MAX_PROCESSES,
    EnvironmentConfig,
    environment_names,
    installed_environments,
)
from services.rollout.worker.environments.hosting.processes import EnvironmentProcesses
from services.rollout.worker.environments.hosting.remote import RemoteEnvironments
from services.rollout.worker.environments.loading import is_blocking, load_class, prepare


class EnvironmentRegistry:
    """Environment factories by name. As a context it starts and ends what the configured environments need."""

    def __init__(
        self,
        configured: Mapping[str, EnvironmentConfig] | None = None,
        *,
        security: Security | None = None,
        max_processes: int = MAX_PROCESSES,
    ) -> None:
        """Load the environments of `configured` beside the installed ones.

        Args:
            configured: The tables of `[worker.environments]`.
            security: Credentials for servers of environments.
            max_processes: Maximum episodes at once that have their own process.

        Raises:
            ConfigError: a class cannot be imported, is not an environment, or does not take its arguments.
        """
        self._factories: dict[str, EnvironmentFactory] = {}
        self._installed = installed_environments()
        self._configured = dict(configured or {})
        self._security = security or Security()
        self._max_processes = max_processes
        self._processes = asyncio.Semaphore(max_processes)
        self._num_in_loop: Counter[str] = Counter()
        for name in environment_names(self._configured):
            config = self._configured.get(name, EnvironmentConfig())
            try:
                self._factories[name] = self._make_factory(name, config)
            except ConfigError as error:
                raise ConfigError(f"environment {name}: {error}") from None

    async def __aenter__(self) -> Self:
        """Start the servers of configured environments that run in processes.

        Raises:
            ConfigError: a server cannot load its environment, or the class does not take its arguments.
        """
        starting = (
            factory.start()
            for name in self._configured
            if isinstance(factory := self._factories[name], EnvironmentProcesses | RemoteEnvironments)
        )
        errors = [error for error in await asyncio.gather(*starting, return_exceptions=True) if error is not None]
        if errors:
            await self._stop()
            raise errors[0]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes and connections."""
        await self._stop()

    @property
    def names(self) -> list[str]:
        """The names of all environments."""
        return sorted(self._factories)

    def find(self, name: str) -> EnvironmentFactory:
        """Return the factory called `name`.

        Raises:
            InvalidRequestError: there is none.
        """
        factory = self._factories.get(name)
        if factory is None:
            raise InvalidRequestError(
                f"environment {name!r} is unknown; known: {', '.join(self.names)}; add yours under "
                f'[worker.environments] as {name} = "package.module:Class"'
            )
        return factory

    @asynccontextmanager
    async def room(self, name: str) -> AsyncIterator[None]:
        """Reserve room for one episode of environment `name`: enter before making it, leave after closing it.

        Waits, first come first served, while all processes are taken. An episode that has room never waits for
        another's room, so each ends in its time, and all get their turn.
        """
        factory = self._factories.get(name)
        if isinstance(factory, EnvironmentProcesses):
            async with self._processes:
                yield
        elif isinstance(factory, RemoteEnvironments):
            yield
        else:
            self._num_in_loop[name] += 1
            try:
                yield
            finally:
                self._num_in_loop[name] -= 1

    def in_loop(self) -> list[str]:
        """Return the names of the environments that have an episode in the event loop, sorted. Any thread may ask while
        the loop is blocked."""
        return sorted(name for name, number in self._num_in_loop.items() if number)

    def require_room(self, name: str) -> None:
        """Refuse to wait for room.

        Raises:
            OverloadedError: `room` would wait.
        """
        if isinstance(self._factories.get(name), EnvironmentProcesses) and self._processes.locked():
            raise OverloadedError(
                f"all {self._max_processes} processes of environments are taken; try again later, or raise "
                "worker.environment_processes"
            )

    def _make_factory(self, name: str, config: EnvironmentConfig) -> EnvironmentFactory:
        if config.url:
            return RemoteEnvironments(name, config.url, remote_name=config.name or name, security=self._security)
        path = config.class_ or self._installed.get(name) or BUILT_IN.get(name)
        if path is None:
            raise ConfigError(
                f"there is no built-in environment of this name ({', '.join(sorted(BUILT_IN))}); give its class or "
                "its url"
            )
        if config.isolated:  # not imported here, because it may crash the process that imports it
            return EnvironmentProcesses(name, path, config.args)
        factory = load_class(path, config.args)
        if is_blocking(factory):
            return EnvironmentProcesses(name, path, config.args)
        prepare(factory)
        return factory

    async def _stop(self) -> None:
        for factory in self._factories.values():
            if isinstance(factory, EnvironmentProcesses | RemoteEnvironments):
                await factory.stop()
