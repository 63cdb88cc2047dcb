"""Calls runners that are functions of this process; programs and services have a file each.

Invariants: every failure of a runner is a `RunnerError` with its reason. A cancelled runner ends, except for a blocking
function in a call that nothing interrupts: its thread is left behind, which the log says, and its session closed.
"""

import asyncio
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Protocol

from penstock.agents import AgentResult, AgentSession, Runner
from penstock.errors import ConfigError
from penstock.runtime.children.reaper import Reaper
from penstock.runtime.own_thread import run_in_own_thread
from penstock.runtime.process import others_code
from services.rollout.worker.agents.config import AgentConfig

MAX_OUTPUT_BYTES = 2**20
"""Maximum size of a result."""
_SMALL_BYTES = 2**14
"""Maximum size of a result that is read in the event loop: a millisecond or two."""


class RunnerError(Exception):
    """A runner gave no usable result."""


class RunnerCaller(Protocol):
    """Has one agent play samples."""

    async def run(self, session: AgentSession) -> AgentResult:
        """Play a sample and return the runner's result.

        Raises:
            RunnerError: there is no usable result.
        """
        ...


def load_runner(name: str, config: AgentConfig, reaper: Reaper) -> RunnerCaller:
    """Return the caller of agent `name`'s runner; `reaper` ends programs that outlive this process.

    Raises:
        ConfigError: its function cannot be loaded.
    """
    if config.command:
        from services.rollout.worker.agents.command_runner import CommandRunner

        return CommandRunner(config.command, reaper)
    if config.url:
        from services.rollout.worker.agents.http_runner import HttpRunner

        return HttpRunner(config.url)
    module_name, colon, attribute = config.function.partition(":")
    problem = ""
    try:
        function: object = getattr(importlib.import_module(module_name), attribute) if colon else None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a boundary: importing a module runs a person's code
        function, problem = None, f" ({type(error).__name__}: {error})"
    if not callable(function):
        raise ConfigError(
            f'worker.agents.{name}.function = "{config.function}" cannot be loaded{problem}; write '
            '"package.module:function" of a function that takes an AgentSession'
        )
    return FunctionRunner(function)


class FunctionRunner:
    """Calls a function of this process: a coroutine function on the event loop, any other in its own thread."""

    def __init__(self, function: Runner) -> None:
        """Call `function`."""
        self._function = function

    async def run(self, session: AgentSession) -> AgentResult:
        """See `RunnerCaller`."""
        try:
            with others_code():
                if inspect.iscoroutinefunction(self._function):
                    value = await self._function(session)
                else:
                    value = await run_in_own_thread(functools.partial(self._function, session), name="runner")
                    if inspect.isawaitable(value):  # an object whose call is a coroutine
                        value = await value
        except Exception as error:  # a boundary: runners are other people's code
            raise RunnerError(f"{type(error).__name__}: {error}") from error
        return read_result(value)


def read_result(value: object) -> AgentResult:
    """Read the result that a runner returned.

    Raises:
        RunnerError: it is not a result.
    """
    try:
        return AgentResult.read(value)
    except (TypeError, ValueError) as error:
        raise RunnerError(str(error)) from None


async def parse_result(parse: Callable[[bytes], object], output: bytes) -> AgentResult:
    """Read the result in what a program or service wrote, in a thread if it is long.

    Args:
        parse: Returns the JSON value in the output.
        output: What it wrote.

    Raises:
        RunnerError: it is not a result, or `parse` raises one.
    """

    def read() -> AgentResult:
        return read_result(parse(output))

    return read() if len(output) <= _SMALL_BYTES else await asyncio.to_thread(read)
