"""Calls runners that are programs: one process group for each sample.

Invariants: no process of a program outlives its sample or the worker, even if the worker is killed with -9. The
program's environment has none of Penstock's secrets.
"""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.agents import AgentResult, AgentSession
from penstock.runtime.reaper import Reaper
from penstock.runtime.security import VARIABLES
from services.rollout.worker.agents.runners import MAX_OUTPUT_BYTES, RunnerError, read_result

_END_S = 5.0
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
        try:
            output, complaints = await _talk(process, json.dumps(session.to_json()).encode())
            status = await process.wait()
        finally:
            await self._end(process)
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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):  # a child that left the group may hold them open
            async with asyncio.timeout(_END_S):
                for stream in (process.stdout, process.stderr):
                    while await stream.read(2**16):
                        pass
                await process.wait()
        self._reaper.forget(process.pid)


def _read_one(output: bytes) -> Mapping[str, Any]:
    """Return the one JSON object that a program wrote."""
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
    """Send the input, and read output and errors to their ends, keeping only the last part of the errors."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    output, complaints = bytearray(), bytearray()

    async def send(stream: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # programs need not read it
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


def _tail(complaints: bytes) -> str:
    return complaints.decode(errors="replace").strip()[-_MAX_TOLD_CHARS:]
