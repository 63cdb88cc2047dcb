"""A server of environments: plays episodes of any registered environment for workers elsewhere.

Invariants: an episode belongs to whoever knows its id; it ends when it is deleted, when a call takes longer than its
caller waits, or when no call comes for a while; and no more than `max_episodes` live at once.
"""

import asyncio
import contextlib
import importlib.metadata
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import structlog
from fastapi import FastAPI, HTTPException, Request, Response

from penstock.environments import Environment, Task
from penstock.errors import EnvironmentFailedError, InvalidRequestError, OverloadedError, PenstockError
from penstock.http.app import make_app
from penstock.http.server import HttpServer
from penstock.records import Verdict
from penstock.runtime.security import ENVIRONMENT_TOKEN, Security, read_secret
from services.rollout.worker.environments.hosting import messages
from services.rollout.worker.environments.hosting.messages import (
    AnyReply,
    AnyRequest,
    CloseRequest,
    GradeReply,
    ObservationReply,
    ResetRequest,
    StepRequest,
    VerdictRequest,
)
from services.rollout.worker.environments.registry import EnvironmentRegistry

log = structlog.get_logger()

MAX_EPISODES = 1024
MAX_IDLE_S = 3600.0
"""Longer than a turn may wait for a replica and be played: an episode's own time stands still meanwhile."""
_CLOSE_TIMEOUT_S = 5.0
_DESCRIPTION = "Environments for Penstock's rollout workers. docs/environments.md describes the messages."


@contextlib.asynccontextmanager
async def serving_environments(
    registry: EnvironmentRegistry,
    names: Sequence[str],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    security: Security | None = None,
    max_episodes: int = MAX_EPISODES,
    max_idle_s: float = MAX_IDLE_S,
    grace_s: float = 5.0,
) -> AsyncIterator[HttpServer]:
    """Serve the environments `names` of `registry`, which is started, for as long as the context lasts.

    Args:
        registry: Where the environments are found.
        names: Those that are served.
        host: Address to listen on.
        port: Port to listen on; 0 takes any that is free.
        security: What callers must show; None reads it from the environment. `PENSTOCK_ENVIRONMENT_TOKEN`, where it is
            set, takes the place of its token.
        max_episodes: Episodes at once; one more is refused with 429, and its worker tries again.
        max_idle_s: Seconds without a call after which an episode ends: its worker has vanished.
        grace_s: Seconds that calls in progress get at the end.

    Raises:
        InvalidRequestError: a name is unknown.
        SetupError: the port is in use.
    """
    for name in names:
        registry.find(name)
    security = security or Security.from_environment()
    episodes = _Episodes(registry, frozenset(names), max_episodes=max_episodes, max_idle_s=max_idle_s)
    server = HttpServer(
        _make_app(episodes),
        host=host,
        port=port,
        key="--port",
        max_body_bytes=messages.MAX_MESSAGE_BYTES,
        security=replace(security, token=read_secret(ENVIRONMENT_TOKEN) or security.token),
    )
    await server.start()
    expiring = asyncio.create_task(episodes.expire())
    try:
        yield server
    finally:
        expiring.cancel()
        await asyncio.gather(expiring, return_exceptions=True)
        await server.drain(grace_s)
        await episodes.close()


async def serve_environments(
    registry: EnvironmentRegistry, names: Sequence[str], stop: asyncio.Event, **options: Any
) -> None:
    """Serve until `stop`; see `serving_environments` for the options. The registry is started and ended here."""
    async with registry, serving_environments(registry, names, **options) as server:
        log.info("environments.served", names=sorted(names), address=server.url)
        await stop.wait()


class _Episode:
    """One episode: at most one call of its environment at a time, which may wait for a verdict."""

    def __init__(self, environment: Environment) -> None:
        self.used_at = time.monotonic()
        self.is_busy = False
        self._environment = environment
        self._call: asyncio.Task[AnyReply] | None = None
        self._asked: asyncio.Queue[str] = asyncio.Queue()
        self._verdict: asyncio.Future[Verdict] | None = None
        self._grading = asyncio.Lock()
        self._ends_at = math.inf

    async def answer(self, request: AnyRequest) -> AnyReply:
        """The reply to `request`, within its time.

        Raises:
            TimeoutError: it takes longer.
        """
        self._ends_at = math.inf if request.remaining_s is None else time.monotonic() + request.remaining_s
        try:
            async with asyncio.timeout(request.remaining_s):
                return await self._advance(request)
        except PenstockError as error:
            return messages.failed(request.number, str(error))

    async def close(self) -> None:
        """Cancel its call and end it."""
        if self._call is not None:
            self._call.cancel()
            await asyncio.gather(self._call, return_exceptions=True)
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._environment.close()
        except Exception as error:  # noqa: BLE001 - a boundary: environments are other people's code
            log.warning("environment.close_failed", error=repr(error))

    async def _advance(self, request: AnyRequest) -> AnyReply:
        if isinstance(request, VerdictRequest):
            if self._verdict is None or self._verdict.done():
                raise EnvironmentFailedError("a verdict came that nobody asked for")
            if request.verdict is None:
                self._verdict.set_exception(PenstockError(request.error or "no verdict came"))
            else:
                self._verdict.set_result(request.verdict)
        else:
            if self._call is not None:
                raise EnvironmentFailedError("a call came before the one before it was answered")
            self._call = asyncio.create_task(self._perform(request))
        call = self._call
        if call is None:
            raise EnvironmentFailedError("a verdict came that nobody asked for")
        asked = asyncio.create_task(self._asked.get())
        try:
            await asyncio.wait({call, asked}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return GradeReply(number=request.number, text=asked.result())
            self._call = None
            return _numbered(call.result(), request.number)
        finally:
            asked.cancel()

    async def _perform(self, request: AnyRequest) -> AnyReply:
        what = str(request.__struct_config__.tag)
        try:
            if isinstance(request, ResetRequest):
                task = Task(**request.task.fields(), remaining_s=self._remaining_s, grade=self._grade)
                observation = messages.from_observation(await self._environment.reset(task))
                return ObservationReply(number=request.number, observation=observation)
            assert isinstance(request, StepRequest)
            return messages.from_result(await self._environment.step(request.turn), number=request.number)
        except EnvironmentFailedError as error:
            return messages.failed(request.number, str(error))
        except Exception as error:  # noqa: BLE001 - a boundary: environments are other people's code
            return messages.failed(request.number, f"{what} raised {type(error).__name__}: {error}")

    def _remaining_s(self) -> float:
        return self._ends_at - time.monotonic()

    async def _grade(self, text: str) -> Verdict:
        async with self._grading:  # one question at a time travels
            self._verdict = asyncio.get_running_loop().create_future()
            self._asked.put_nowait(text)
            return await self._verdict


class _Episodes:
    """The episodes that live at the server."""

    def __init__(
        self, registry: EnvironmentRegistry, names: frozenset[str], *, max_episodes: int, max_idle_s: float
    ) -> None:
        self._registry = registry
        self._names = names
        self._max_episodes = max_episodes
        self._max_idle_s = max_idle_s
        self._episodes: dict[str, _Episode] = {}

    async def answer(self, episode_id: str, request: AnyRequest) -> AnyReply:
        """The reply of episode `episode_id` to `request`, a `reset` of which begins it.

        Raises:
            HTTPException: there is no such episode (404), or it cannot take this request (409).
            InvalidRequestError: no such environment is served.
            OverloadedError: too many episodes live.
            TimeoutError: it took longer than its caller waits; the episode has ended.
        """
        if isinstance(request, CloseRequest):
            raise InvalidRequestError("an episode is ended with DELETE")
        episode = self._begin(episode_id, request) if isinstance(request, ResetRequest) else self._find(episode_id)
        if episode.is_busy:
            raise HTTPException(409, "the episode is at work on another request; wait for its reply")
        episode.is_busy = True
        try:
            return await episode.answer(request)
        except BaseException:  # too late, or the caller is gone: nobody can go on with it
            await asyncio.shield(self.end(episode_id))
            raise
        finally:
            episode.is_busy, episode.used_at = False, time.monotonic()

    async def end(self, episode_id: str) -> None:
        """End an episode; nothing happens if there is none."""
        if (episode := self._episodes.pop(episode_id, None)) is not None:
            await episode.close()

    async def expire(self) -> None:
        """End episodes that nobody has called for a while, for ever."""
        while True:
            await asyncio.sleep(self._max_idle_s / 10)
            oldest = time.monotonic() - self._max_idle_s
            for episode_id, episode in list(self._episodes.items()):
                if not episode.is_busy and episode.used_at < oldest:
                    log.warning("environment.expired", episode=episode_id, idle_s=self._max_idle_s)
                    await self.end(episode_id)

    async def close(self) -> None:
        """End all episodes."""
        await asyncio.gather(*map(self.end, list(self._episodes)))

    def _begin(self, episode_id: str, request: ResetRequest) -> _Episode:
        if episode_id in self._episodes:
            raise HTTPException(409, "there is an episode of this id; begin another one under an id of its own")
        if request.environment not in self._names:
            raise InvalidRequestError(
                f"environment {request.environment!r} is not served here; served: {', '.join(sorted(self._names))}"
            )
        if len(self._episodes) >= self._max_episodes:
            raise OverloadedError(f"{len(self._episodes)} episodes live here, and no more may; try again later")
        episode = _Episode(self._registry.find(request.environment)())
        self._episodes[episode_id] = episode
        return episode

    def _find(self, episode_id: str) -> _Episode:
        if (episode := self._episodes.get(episode_id)) is None:
            raise HTTPException(404, "there is no such episode; it has ended or expired, or the server was restarted")
        return episode


def _make_app(episodes: _Episodes) -> FastAPI:
    app = make_app(
        title="Penstock environments", description=_DESCRIPTION, version=importlib.metadata.version("penstock")
    )

    @app.post("/v1/episodes/{episode_id}")
    async def answer(episode_id: str, request: Request) -> Response:
        """A request of an episode; its `kind` says which."""
        try:
            decoded = messages.decode_request(await request.body())
        except EnvironmentFailedError as error:
            raise InvalidRequestError(str(error)) from None
        reply = await episodes.answer(episode_id, decoded)
        try:
            data = messages.encode(reply)
        except EnvironmentFailedError as error:
            data = messages.encode(messages.failed(decoded.number, str(error)))
        return Response(data, media_type="application/json")

    @app.delete("/v1/episodes/{episode_id}")
    async def end(episode_id: str) -> dict[str, str]:
        """The end of an episode, also of one that is gone."""
        await episodes.end(episode_id)
        return {"status": "ended"}

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """200 while the server takes work; 503 while it is stopping."""
        return {"status": "serving"}

    return app


def _numbered(reply: AnyReply, number: int) -> AnyReply:
    """The reply with the number of the request that it answers: after questions that is a later one."""
    return msgspec.structs.replace(reply, number=number)
