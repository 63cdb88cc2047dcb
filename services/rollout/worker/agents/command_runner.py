"""Calls runners that are programs: one process group for each sample.

Invariants: no process of a program outlives its sample or the worker, even if the worker is killed with -9. The
program's environment has none of Penstock's secrets.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.agents import AgentResult, AgentSession
from penstock.runtime.children.reaper import Reaper
from penstock.runtime.process import end_task
from penstock.runtime.security import VARIABLES
from services.rollout.worker.agents.runners import MAX_OUTPUT_BYTES, RunnerError, parse_result

_END_S = 5.0
_RESULT_S = 30.0
"""Seconds that what a program has piped its output through may take to write the result."""
_FILTERS_S = 2.0
"""Seconds that it may take to end after that."""
_LOOK_EVERY_S = 0.1
_PRINTED = re.compile(r"\S")
_MAX_TOLD_CHARS = 500
"""Maximum characters of a program's last output that its failure quotes."""


class CommandRunner:
    """Starts a program for each sample, in a process group that ends with the sample."""

    def __init__(self, command: Sequence[str], reaper: Reaper) -> None:
        """Start `command`, and have `reaper` end processes that would outlive this one."""
        self._command = command
        self._reaper = reaper

    async def run(self, session: AgentSession) -> AgentResult:
        """See `RunnerCaller`."""
        starting = asyncio.create_task(self._start())
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # asyncio would kill only the program, and wait for everything that its children hold open.
            with contextlib.suppress(RunnerError):
                await self._end(await asyncio.shield(starting))
            raise
        said = _Said()
        talking = asyncio.create_task(_talk(process, json.dumps(session.to_json()).encode(), said))
        ending = asyncio.create_task(_until_ended(process))
        waiting = asyncio.create_task(process.wait())  # at once, unless somebody holds its pipes open
        try:
            await asyncio.wait({talking, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not talking.done():  # processes that it has left behind hold its output open: filters end by themselves
                await _until_written(talking, said, has_result=process.returncode == 0)
            if not talking.done():
                self._kill_group(process)
                await asyncio.wait({talking}, timeout=_END_S)  # one that left the group holds it still
            if talking.done():
                talking.result()
            await asyncio.wait({ending, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._kill_group(process)
            await end_task(ending)
            await end_task(waiting)
            await end_task(talking)
            await self._end(process)
        status = process.returncode
        if status:
            how = f"exit code {status}" if status > 0 else f"signal {-status}"
            last = said.last_complaints() or "it wrote nothing to its errors"
            raise RunnerError(f"the program ended with {how}: {last}")
        return await parse_result(_read_one, bytes(said.output))

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
                preexec_fn=self._reaper.naming_child(),
            )
        except OSError as error:
            raise RunnerError(f"{self._command[0]} does not start: {error.strerror}; correct its command") from None

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """Kill the process group.

        Its output is drained, because asyncio notices the exit only once the pipes are empty.
        """
        assert process.stdout is not None
        assert process.stderr is not None
        self._kill_group(process)
        try:
            async with asyncio.timeout(_END_S):
                for stream in (process.stdout, process.stderr):
                    while await stream.read(2**16):
                        pass
                await process.wait()
        except TimeoutError:
            vars(process)["_transport"].close()  # a child that left the group holds them open
        self._reaper.forget(process.pid)

    def _kill_group(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _read_one(output: bytes) -> Mapping[str, Any]:
    """Return the one JSON object that a program wrote. Nothing behind a second value is read."""
    decoder, text, end = json.JSONDecoder(), output.decode(errors="replace").rstrip(), 0
    found: list[Any] = []
    while len(found) < 2 and (begun := _PRINTED.search(text, end)):
        start = begun.start()
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            told = text[start : start + _MAX_TOLD_CHARS]
            raise RunnerError(
                f"its output holds something beside the result: {told!r}; write logs to the errors"
            ) from None
        found.append(value)
    if len(found) != 1:
        number = "more than once" if found else "nothing"
        raise RunnerError(f"it answered {number}; write one JSON object to the output")
    if not isinstance(found[0], dict):
        raise RunnerError(f"it wrote {output[:_MAX_TOLD_CHARS]!r}; write one JSON object to the output")
    return found[0]


@dataclasses.dataclass(slots=True)
class _Said:
    """What a program has written so far."""

    output: bytearray = dataclasses.field(default_factory=bytearray)
    complaints: bytearray = dataclasses.field(default_factory=bytearray)

    def last_complaints(self) -> str:
        """The end of its errors."""
        return self.complaints.decode(errors="replace").strip()[-_MAX_TOLD_CHARS:]


async def _until_ended(process: asyncio.subprocess.Process) -> None:
    """Return when the program itself has ended, whoever holds its pipes open: `wait` waits for these too."""
    while process.returncode is None:  # noqa: ASYNC110 - asyncio has no event of it
        await asyncio.sleep(_LOOK_EVERY_S)


async def _until_written(talking: asyncio.Task[None], said: _Said, *, has_result: bool) -> None:
    """Return when filters have written all, or have had their time; a program that failed `has_result` no more."""
    result_by, num_bytes = time.monotonic() + _RESULT_S, -1
    while has_result and not talking.done() and time.monotonic() < result_by:
        if num_bytes != len(said.output):
            num_bytes = len(said.output)
            with contextlib.suppress(RunnerError):
                await parse_result(_read_one, bytes(said.output))
                break
        await asyncio.wait({talking}, timeout=_LOOK_EVERY_S)
    await asyncio.wait({talking}, timeout=_FILTERS_S)


async def _talk(process: asyncio.subprocess.Process, sent: bytes, said: _Said) -> None:
    """Send the input, and read output and errors to their ends, keeping only the last part of the errors."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None

    async def send(stream: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # programs need not read it
            stream.write(sent)
            await stream.drain()
        stream.close()

    async def hear(stream: asyncio.StreamReader) -> None:
        while part := await stream.read(2**16):
            said.output.extend(part)
            if len(said.output) > MAX_OUTPUT_BYTES:
                raise RunnerError(f"it wrote more than {MAX_OUTPUT_BYTES} bytes; write one JSON object to the output")

    async def hear_complaints(stream: asyncio.StreamReader) -> None:
        while part := await stream.read(2**16):
            said.complaints.extend(part)
            del said.complaints[: -4 * _MAX_TOLD_CHARS]

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send(process.stdin))
            tasks.create_task(hear(process.stdout))
            tasks.create_task(hear_complaints(process.stderr))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
