"""The episodes that live at a server of environments.

Invariants: an episode belongs to any caller who knows its id. It ends when it is deleted, when a call takes longer than
its caller waits, or when no call arrives for a while. At most `max_episodes` live at once.
"""

import asyncio
import contextlib
import dataclasses
import math
import time
from typing import Any

import structlog
from fastapi import HTTPException
from prometheus_client.core import Metric

from penstock.environments import Environment, Task
from penstock.errors import EnvironmentFailedError, InvalidRequestError, NotReadyError, OverloadedError, PenstockError
from penstock.records import Verdict
from penstock.runtime.process import others_code
from penstock.telemetry import spans
from services.rollout.worker.environments.hosting import messages, metrics
from services.rollout.worker.environments.hosting.messages import (
    AnyReply,
    AnyRequest,
    CloseRequest,
    FailedReply,
    GradeReply,
    ObservationReply,
    ObservationTooLargeError,
    ResetRequest,
    StepRequest,
    VerdictRequest,
)
from services.rollout.worker.environments.registry import EnvironmentRegistry

log = structlog.get_logger()

_CLOSE_TIMEOUT_S = 7.0
"""Longer than an environment's process has for its `close`; see processes.py."""


@dataclasses.dataclass(slots=True)
class _Question:
    """A text that the environment asked the worker to have judged."""

    text: str
    verdict: "asyncio.Future[Verdict]"
    """Cancelled when the environment stops waiting for it."""


class _Episode:
    """One episode, with at most one call of its environment at a time, which may wait for a verdict."""

    def __init__(self, environment: Environment, room: contextlib.AsyncExitStack) -> None:
        self.used_at = time.monotonic()
        self.is_busy = False
        self._environment = environment
        self._room = room
        self._call: asyncio.Task[bytes] | None = None
        self._questions: asyncio.Queue[_Question] = asyncio.Queue()
        self._asked: _Question | None = None
        """The question that the worker has, and whose verdict it owes."""
        self._ends_at = math.inf
        self._about: dict[str, Any] = {}
        """Which sample it plays, and with what."""
        self._num_steps = 0

    async def answer(self, request: AnyRequest) -> bytes:
        """Answer `request` within its time; return the encoded reply.

        Raises:
            TimeoutError: it takes longer.
        """
        self._ends_at = math.inf if request.remaining_s is None else time.monotonic() + request.remaining_s
        try:
            async with asyncio.timeout(request.remaining_s):
                return await self._advance(request)
        except PenstockError as error:
            return messages.encode(messages.failed(request.number, str(error)))

    async def close(self) -> None:
        """Cancel the current call and end the episode."""
        async with self._room:
            if self._call is not None:
                self._call.cancel()
                await asyncio.gather(self._call, return_exceptions=True)
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    with others_code():
                        await self._environment.close()
            except Exception as error:  # noqa: BLE001 - a boundary: environments are other people's code
                log.warning("environment.close_failed", error=repr(error))

    async def _advance(self, request: AnyRequest) -> bytes:
        if isinstance(request, VerdictRequest):
            self._take_verdict(request)
        elif self._call is not None:
            raise EnvironmentFailedError("a call came before the one before it was answered")
        else:
            self._call = asyncio.create_task(self._perform(request))
        assert self._call is not None, "only a call asks"
        asking = asyncio.create_task(self._next_question())
        try:
            await asyncio.wait({self._call, asking}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                self._asked = asking.result()
                return messages.encode(GradeReply(number=request.number, text=self._asked.text))
            call, self._call = self._call, None
            reply = call.result()
            return messages.renumber(reply, request.number) if isinstance(request, VerdictRequest) else reply
        finally:
            asking.cancel()

    def _take_verdict(self, request: VerdictRequest) -> None:
        """Hand the verdict to the environment, unless it has stopped waiting for it."""
        if self._asked is None:
            raise EnvironmentFailedError("a verdict came that nobody asked for")
        waiting, self._asked = self._asked.verdict, None
        if waiting.done():
            return
        if request.verdict is None:
            waiting.set_exception(PenstockError(request.error or "no verdict came"))
        else:
            waiting.set_result(request.verdict)

    async def _next_question(self) -> _Question:
        """Return the next question whose verdict the environment waits for."""
        while True:
            question = await self._questions.get()
            if not question.verdict.done():
                return question

    async def _perform(self, request: AnyRequest) -> bytes:
        """Call the environment, and record the span of it: from the request to the reply, verdicts included.

        Returns the encoded reply, under the number of `request`.
        """
        turn = None
        if isinstance(request, ResetRequest):
            group, _, sample = request.task.id.rpartition("/")
            self._about = {"group": group, "sample": int(sample)} if sample.isdecimal() else {"group": request.task.id}
            self._about["environment"] = request.environment
        else:
            turn, self._num_steps = self._num_steps, self._num_steps + 1
        began, outcome = time.monotonic(), "cut"
        try:
            with spans.recorded("environment.call", turn=turn, **self._about) as about:
                reply, data = messages.encode_or_fail(await self._call_environment(request))
                outcome = "answered"
                if isinstance(reply, FailedReply):
                    about["error"], outcome = reply.error, "failed"
        finally:
            metrics.count_call(time.monotonic() - began, outcome)
        return data

    async def _call_environment(self, request: AnyRequest) -> AnyReply:
        what = str(request.__struct_config__.tag)
        try:
            if isinstance(request, ResetRequest):
                task = Task(**request.task.fields(), remaining_s=self._remaining_s, grade=self._grade)
                with others_code():
                    observation = await self._environment.reset(task)
                return ObservationReply(number=request.number, observation=messages.from_observation(observation))
            assert isinstance(request, StepRequest)
            with others_code():
                result = await self._environment.step(request.turn)
            return messages.from_result(result, number=request.number)
        except ObservationTooLargeError as error:
            return messages.failed(request.number, str(error), is_too_large=True)
        except Exception as error:  # noqa: BLE001 - a boundary: environments are other people's code
            is_said = isinstance(error, EnvironmentFailedError)
            reason = str(error) if is_said else f"{what} raised {type(error).__name__}: {error}"
            if isinstance(request, ResetRequest):
                return messages.reset_failed(request.number, error, reason)
            return messages.failed(request.number, reason)

    def _remaining_s(self) -> float:
        return self._ends_at - time.monotonic()

    async def _grade(self, text: str) -> Verdict:
        question = _Question(text, asyncio.get_running_loop().create_future())
        self._questions.put_nowait(question)
        return await question.verdict


class ServedEpisodes:
    """The episodes that live at the server."""

    def __init__(
        self, registry: EnvironmentRegistry, names: frozenset[str], *, max_episodes: int, max_idle_s: float
    ) -> None:
        self._registry = registry
        self._names = names
        self._max_episodes = max_episodes
        self._max_idle_s = max_idle_s
        self._is_open = True
        self._episodes: dict[str, _Episode] = {}
        self._none_lives = asyncio.Event()
        self._none_lives.set()

    def require_open(self) -> None:
        """Refuse new episodes once the server is stopping.

        Raises:
            NotReadyError: the server is stopping.
        """
        if not self._is_open:
            raise NotReadyError("this server is stopping; begin the episode at another server, or again later")

    async def answer(self, episode_id: str, request: AnyRequest) -> bytes:
        """Answer `request` for episode `episode_id`; a `reset` begins the episode. Return the encoded reply.

        Raises:
            HTTPException: there is no such episode (404), or it cannot take this request (409).
            InvalidRequestError: no such environment is served.
            NotReadyError: the server takes no new episode.
            OverloadedError: too many episodes live, or too many processes.
            TimeoutError: it took longer than its caller waits; the episode has ended.
        """
        if isinstance(request, CloseRequest):
            raise InvalidRequestError("an episode is ended with DELETE")
        if isinstance(request, ResetRequest):
            episode = await self._begin(episode_id, request)
        else:
            episode = self._find(episode_id)
        if episode.is_busy:
            raise HTTPException(409, "the episode is at work on another request; wait for its reply")
        episode.is_busy = True
        try:
            return await episode.answer(request)
        except BaseException:  # too late, or the caller is gone, so that the episode cannot continue
            await asyncio.shield(self.end(episode_id))
            raise
        finally:
            episode.is_busy, episode.used_at = False, time.monotonic()

    async def end(self, episode_id: str) -> None:
        """End an episode; do nothing if there is none."""
        if (episode := self._episodes.pop(episode_id, None)) is not None:
            try:
                await episode.close()
            finally:
                if not self._episodes:
                    self._none_lives.set()

    async def expire(self) -> None:
        """End episodes that had no call for a while, forever."""
        while True:
            await asyncio.sleep(self._max_idle_s / 10)
            oldest = time.monotonic() - self._max_idle_s
            for episode_id, episode in list(self._episodes.items()):
                if not episode.is_busy and episode.used_at < oldest:
                    log.warning("environment.expired", episode=episode_id, idle_s=self._max_idle_s)
                    await self.end(episode_id)

    async def drain(self, grace_s: float) -> None:
        """Take no new episode, and wait up to `grace_s` seconds until the running ones have ended."""
        self._is_open = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self._none_lives.wait()

    async def read(self) -> list[Metric]:
        """Return how full the server is."""
        return metrics.room(len(self._episodes), self._max_episodes)

    async def close(self) -> None:
        """End all episodes."""
        await asyncio.gather(*map(self.end, list(self._episodes)))

    async def _begin(self, episode_id: str, request: ResetRequest) -> _Episode:
        self.require_open()
        if episode_id in self._episodes:
            raise HTTPException(409, "there is an episode of this id; begin another one under an id of its own")
        if request.environment not in self._names:
            raise InvalidRequestError(
                f"environment {request.environment!r} is not served here; served: {', '.join(sorted(self._names))}"
            )
        if len(self._episodes) >= self._max_episodes:
            raise OverloadedError(f"{len(self._episodes)} episodes live here, and no more may; try again later")
        self._registry.require_room(request.environment)
        room = contextlib.AsyncExitStack()
        await room.enter_async_context(self._registry.room(request.environment))  # at once, because there is room
        self._episodes[episode_id] = episode = _Episode(self._registry.find(request.environment)(), room)
        self._none_lives.clear()
        return episode

    def _find(self, episode_id: str) -> _Episode:
        if (episode := self._episodes.get(episode_id)) is None:
            raise HTTPException(404, "there is no such episode; it has ended or expired, or the server was restarted")
        return episode
