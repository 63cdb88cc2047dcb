"""Calls runners: functions of this process, programs, and services.

Invariants: whatever goes wrong in a runner is a `RunnerError` with its reason; a runner that is cancelled is over, but
for a blocking function, which Python cannot end: its thread is left behind and its session closed. The environment of a
program has none of Penstock's secrets.
"""

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from penstock.agents import AgentResult, AgentSession, Runner
from penstock.errors import ConfigError
from penstock.runtime.security import VARIABLES
from services.rollout.worker.agents.config import AgentConfig

MAX_OUTPUT_BYTES = 2**20
"""Of a result."""
_END_S = 5.0
_MAX_TOLD_CHARS = 500
"""Of what a runner said last, in the reason of its failure."""


class RunnerError(Exception):
    """A runner gave no usable result."""


class RunnerCaller(Protocol):
    """Has one agent play samples."""

    async def run(self, session: AgentSession) -> AgentResult:
        """Play a sample and return the runner's result.

        Raises:
            RunnerError: it gave none that can be used.
        """
        ...


def load_runner(name: str, config: AgentConfig) -> RunnerCaller:
    """What calls the runner of agent `name`.

    Raises:
        ConfigError: its function cannot be loaded.
    """
    if config.command:
        return CommandRunner(config.command)
    if config.url:
        from services.rollout.worker.agents.http_runner import HttpRunner

        return HttpRunner(config.url)
    module_name, colon, attribute = config.function.partition(":")
    problem = ""
    try:
        function: object = getattr(importlib.import_module(module_name), attribute) if colon else None
    except (ImportError, AttributeError) as error:
        function, problem = None, f" ({error})"
    if not callable(function):
        raise ConfigError(
            f'worker.agents.{name}.function = "{config.function}" cannot be loaded{problem}; write '
            '"package.module:function" of a function that takes an AgentSession'
        )
    return FunctionRunner(function)


class FunctionRunner:
    """Calls a function of this process: a coroutine function on the event loop, any other in a thread of its own."""

    def __init__(self, function: Runner) -> None:
        """Call `function`."""
        self._function = function

    async def run(self, session: AgentSession) -> AgentResult:
        """See `RunnerCaller`."""
        try:
            if inspect.iscoroutinefunction(self._function):
                value = await self._function(session)
            else:
                value = await _in_thread(self._function, session)
                if inspect.isawaitable(value):  # an object whose call is a coroutine
                    value = await value
        except Exception as error:  # a boundary: runners are other people's code
            raise RunnerError(f"{type(error).__name__}: {error}") from error
        return read_result(value)


class CommandRunner:
    """Starts a program for each sample, in a process group that ends with the sample."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start `command`."""
        self._command = command

    async def run(self, session: AgentSession) -> AgentResult:
        """See `RunnerCaller`."""
        starting = asyncio.create_task(self._start())
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # asyncio would kill the program alone, and wait for all that its children hold open.
            with contextlib.suppress(RunnerError):
                await _end(await asyncio.shield(starting))
            raise
        try:
            output, complaints = await _talk(process, json.dumps(session.to_json()).encode())
            status = await process.wait()
        finally:
            await _end(process)
        if status != 0:
            how = f"exit code {status}" if status > 0 else f"signal {-status}"
            raise RunnerError(f"the program ended with {how}: {_tail(complaints) or 'it wrote nothing to its errors'}")
        return read_result(_read_one(output))

    async def _start(self) -> asyncio.subprocess.Process:
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        try:
            return await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise RunnerError(f"{self._command[0]} does not start: {error.strerror}; correct its command") from None


def read_result(value: object) -> AgentResult:
    """The result that a runner returned.

    Raises:
        RunnerError: it is none.
    """
    try:
        return AgentResult.read(value)
    except (TypeError, ValueError) as error:
        raise RunnerError(str(error)) from None


def _read_one(output: bytes) -> Mapping[str, Any]:
    """The one JSON object that a program wrote."""
    decoder, text, found = json.JSONDecoder(), output.decode(errors="replace").strip(), []
    while text:
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            raise RunnerError(
                f"its output holds something beside the result: {text[:_MAX_TOLD_CHARS]!r}; write logs to the errors"
            ) from None
        found.append(value)
        text = text[end:].lstrip()
    if len(found) != 1:
        raise RunnerError(f"it answered {len(found)} times; write one JSON object to the output")
    if not isinstance(found[0], dict):
        raise RunnerError(f"it wrote {output[:_MAX_TOLD_CHARS]!r}; write one JSON object to the output")
    return found[0]


async def _talk(process: asyncio.subprocess.Process, sent: bytes) -> tuple[bytes, bytes]:
    """Send the input, and read output and errors to their ends, the errors' last part only."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    output, complaints = bytearray(), bytearray()

    async def send(stream: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # it need not read it
            stream.write(sent)
            await stream.drain()
        stream.close()

    async def hear(stream: asyncio.StreamReader) -> None:
        while part := await stream.read(2**16):
            output.extend(part)
            if len(output) > MAX_OUTPUT_BYTES:
                raise RunnerError(f"it wrote more than {MAX_OUTPUT_BYTES} bytes; write one JSON object to the output")

    async def hear_complaints(stream: asyncio.StreamReader) -> None:
        while part := await stream.read(2**16):
            complaints.extend(part)
            del complaints[: -4 * _MAX_TOLD_CHARS]

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send(process.stdin))
            tasks.create_task(hear(process.stdout))
            tasks.create_task(hear_complaints(process.stderr))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return bytes(output), bytes(complaints)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the process group, and read away what it wrote: until its pipes are empty asyncio does not see its end."""
    assert process.stdout is not None
    assert process.stderr is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):  # a child that left the group may hold them open
        async with asyncio.timeout(_END_S):
            for stream in (process.stdout, process.stderr):
                while await stream.read(2**16):
                    pass
            await process.wait()


def _tail(complaints: bytes) -> str:
    return complaints.decode(errors="replace").strip()[-_MAX_TOLD_CHARS:]


async def _in_thread(function: Runner, session: AgentSession) -> Any:
    """What a blocking function returns. Its thread is its own, so that one that never ends takes no other's place."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def end(value: Any, error: BaseException | None) -> None:
        if ended.done():  # nobody waits any more
            return
        if error is None:
            ended.set_result(value)
        else:
            ended.set_exception(RunnerError(f"{type(error).__name__}: {error}"))

    def call() -> None:
        value, failure = None, None
        try:
            value = function(session)
        except BaseException as error:  # noqa: BLE001 - a boundary, and SystemExit ends a runner, not its thread alone
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end, value, failure)

    threading.Thread(target=call, name="runner", daemon=True).start()
    return await ended
