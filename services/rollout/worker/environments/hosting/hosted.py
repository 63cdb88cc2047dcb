"""An environment that runs elsewhere, as the episode sees it: the same three calls, passed on over a channel.

Invariant: whatever the other side does, a call ends: with its reply, with `EnvironmentFailedError`, or when the episode
cancels it at its deadline. After `close` nothing of the other side is left.
"""

import math
from collections.abc import Awaitable, Callable
from typing import Protocol

from penstock.environments import AssistantTurn, Observation, StepResult, Task
from penstock.errors import EnvironmentFailedError, PenstockError
from services.rollout.worker.environments.hosting import messages
from services.rollout.worker.environments.hosting.messages import (
    AnyReply,
    AnyRequest,
    FailedReply,
    GradeReply,
    ObservationReply,
    ResetRequest,
    ResultReply,
    TaskMessage,
    VerdictRequest,
)


class Channel(Protocol):
    """Connection to one episode's environment."""

    async def exchange(self, request: AnyRequest) -> AnyReply:
        """Send `request` and return the reply.

        Raises:
            EnvironmentFailedError: the other side died, or its answer was not a message.
        """
        ...

    async def end(self, number: int, *, is_idle: bool) -> None:
        """End the episode by request `number` if the other side `is_idle`, and always release its resources."""
        ...


class HostedEnvironment:
    """One episode's environment at the other end of a channel."""

    def __init__(self, open_channel: Callable[[Task], Awaitable[Channel]], *, name: str) -> None:
        """Open the channel at `reset`; the other side knows the environment as `name`."""
        self._open_channel = open_channel
        self._name = name
        self._channel: Channel | None = None
        self._task: Task | None = None
        self._num_requests = 0
        self._is_idle = False

    async def reset(self, task: Task) -> Observation:
        """Begin the episode at the other side.

        Raises:
            EnvironmentFailedError: the environment crashed, or gave a forbidden answer.
            EnvironmentUnavailableError: it raised an OSError or UnavailableError; another try may succeed.
            InvalidRequestError: it raised one: no other try will succeed.
            ObservationTooLargeError: its observation is larger than any message may carry.
            UnavailableError: it cannot be reached; another try may succeed.
        """
        self._task = task
        self._channel = await self._open_channel(task)
        number, remaining_s = self._next(task)
        reply = await self._ask(
            ResetRequest(number=number, remaining_s=remaining_s, environment=self._name, task=TaskMessage.of(task))
        )
        if not isinstance(reply, ObservationReply):
            raise EnvironmentFailedError(_unexpected(reply, "reset", "observation"))
        return messages.to_observation(reply.observation)

    async def step(self, turn: AssistantTurn) -> StepResult:
        """Pass on a turn of the policy.

        Raises:
            EnvironmentFailedError: the environment crashed, or gave a forbidden answer.
            ObservationTooLargeError: its observation is larger than any message may carry.
        """
        assert self._task is not None, "reset comes before step"
        number, remaining_s = self._next(self._task)
        reply = await self._ask(messages.to_step(turn, number=number, remaining_s=remaining_s))
        if not isinstance(reply, ResultReply):
            raise EnvironmentFailedError(_unexpected(reply, "step", "result"))
        return messages.to_result(reply)

    async def close(self) -> None:
        """End the episode at the other side, whatever it is doing."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.end(self._num_requests, is_idle=self._is_idle)

    def _next(self, task: Task) -> tuple[int, float | None]:
        number, remaining_s = self._num_requests, task.remaining_s()
        self._num_requests += 1
        return number, remaining_s if math.isfinite(remaining_s) else None

    async def _ask(self, request: AnyRequest) -> AnyReply:
        """Return the reply to `request`; answer its questions about verdicts meanwhile."""
        assert self._channel is not None
        assert self._task is not None
        self._is_idle = False
        while True:
            reply = await self._channel.exchange(request)
            if reply.number != request.number:
                raise EnvironmentFailedError(
                    f"it answered request {reply.number} where {request.number} was asked: each is answered once"
                )
            if not isinstance(reply, GradeReply):
                break
            request = await self._answer_grade(reply.text, self._task)
        self._is_idle = True
        if isinstance(reply, FailedReply):
            raise messages.error_of(reply)
        return reply

    async def _answer_grade(self, text: str, task: Task) -> VerdictRequest:
        verdict, error = None, ""
        try:
            verdict = await task.grade(text)
        except PenstockError as reason:
            error = str(reason)
        number, remaining_s = self._next(task)
        return VerdictRequest(number=number, remaining_s=remaining_s, verdict=verdict, error=error)


def _unexpected(reply: AnyReply, request: str, wanted: str) -> str:
    return f"it answered {request} with {reply.__struct_config__.tag!r}, not with {wanted!r}"
