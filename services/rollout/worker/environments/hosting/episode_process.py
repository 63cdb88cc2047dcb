"""The process of one episode: answers requests with an environment, until its socket closes.

It runs the environment in its main thread. Nothing here has a deadline: the worker keeps it and kills the process.
"""

import asyncio
import contextlib
import inspect
import math
import os
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from penstock.environments import BlockingTask, Task
from penstock.errors import EnvironmentFailedError, PenstockError
from penstock.records import Verdict
from services.rollout.worker.environments.hosting import messages
from services.rollout.worker.environments.hosting.messages import (
    AnyReply,
    AnyRequest,
    ClosedReply,
    CloseRequest,
    GradeReply,
    ObservationReply,
    ObservationTooLargeError,
    ResetRequest,
    StepRequest,
    VerdictRequest,
)

HEADER = struct.Struct("<I")
"""Length of the message that follows, in bytes."""


def serve_episode(channel: socket.socket, make: Callable[[], Any]) -> None:
    """Answer requests from `channel` with the environment that `make` creates."""
    with asyncio.Runner() as runner:
        _Episode(channel, make, runner).serve()


def flush_output() -> None:
    """Send what was printed on its way; the environment may have closed or replaced the streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


class _Episode:
    def __init__(self, channel: socket.socket, make: Callable[[], Any], runner: asyncio.Runner) -> None:
        self._channel = channel
        self._make = make
        self._runner = runner
        self._environment: Any = None
        self._asking = threading.Lock()
        self._number: int | None = None
        """Number of the request in progress; None between requests."""
        self._ends_at = math.inf

    def serve(self) -> None:
        while True:
            request = self._receive()
            reply = self._answer(request)
            with self._asking:  # a question that the environment no longer waits for has its verdict then
                assert self._number is not None
                data = self._encode(messages.numbered(reply, self._number))
                self._number = None
                flush_output()
                self._channel.sendall(data)
            if isinstance(request, CloseRequest):
                return

    def _receive(self) -> AnyRequest:
        request = messages.decode_request(self._read(HEADER.unpack(self._read(HEADER.size))[0]))
        self._number = request.number
        self._ends_at = math.inf if request.remaining_s is None else time.monotonic() + request.remaining_s
        return request

    def _read(self, size_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < size_bytes:
            part = self._channel.recv(min(size_bytes - len(data), 2**20))
            if not part:
                os._exit(0)  # the worker is gone, so an orderly end has no use
            data += part
        return bytes(data)

    def _encode(self, reply: AnyReply) -> bytes:
        _, data = messages.encode_or_fail(reply)
        return HEADER.pack(len(data)) + data

    def _answer(self, request: AnyRequest) -> AnyReply:
        what = str(request.__struct_config__.tag)
        try:
            return self._perform(request)
        except EnvironmentFailedError as error:
            is_too_large = isinstance(error, ObservationTooLargeError)
            return messages.failed(request.number, f"{what}: {error}", is_too_large=is_too_large)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a boundary: environments are other people's code
            reason = f"{what} raised {_describe(error)}"
            if isinstance(request, ResetRequest):
                return messages.reset_failed(request.number, error, reason)
            return messages.failed(request.number, reason)

    def _perform(self, request: AnyRequest) -> AnyReply:
        match request:
            case ResetRequest():
                self._environment = self._make()
                observation = messages.from_observation(self._call("reset", self._task(request)))
                return ObservationReply(number=request.number, observation=observation)
            case StepRequest():
                return messages.from_result(self._call("step", request.turn), number=request.number)
            case CloseRequest():
                if self._environment is not None:
                    self._call("close")
                return ClosedReply(number=request.number)
            case VerdictRequest():
                raise EnvironmentFailedError("a verdict came that nobody asked for")

    def _call(self, method: str, *arguments: Any) -> Any:
        result = getattr(self._environment, method)(*arguments)
        return self._runner.run(_wait_for(result)) if inspect.isawaitable(result) else result

    def _task(self, request: ResetRequest) -> Task | BlockingTask:
        fields = request.task.fields()
        if inspect.iscoroutinefunction(self._environment.reset):
            return Task(**fields, remaining_s=self._remaining_s, grade=self._grade_in_thread)
        return BlockingTask(**fields, remaining_s=self._remaining_s, grade=self._grade)

    def _remaining_s(self) -> float:
        return self._ends_at - time.monotonic()

    def _grade(self, text: str, *, given_up: threading.Event | None = None) -> Verdict:
        with self._asking:
            if given_up is not None and given_up.is_set():
                raise PenstockError("nobody waits for the verdict any more")
            if self._number is None:
                raise RuntimeError("task.grade was called between calls of the environment; call it in reset or step")
            data = self._encode(GradeReply(number=self._number, text=text))
            self._channel.sendall(data)
            request = self._receive()
        if not isinstance(request, VerdictRequest) or request.verdict is None:
            raise PenstockError(getattr(request, "error", "") or "no verdict came")
        return request.verdict

    async def _grade_in_thread(self, text: str) -> Verdict:
        given_up = threading.Event()
        try:
            return await asyncio.to_thread(self._grade, text, given_up=given_up)
        finally:
            given_up.set()


async def _wait_for(result: Any) -> Any:
    return await result


def _describe(error: BaseException) -> str:
    """Describe the error and where in the environment's code it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
