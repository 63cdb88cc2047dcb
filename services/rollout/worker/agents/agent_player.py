"""Plays one sample by an agent: opens a session, calls the runner, and collects the session's records.

Invariants: a sample with tokens is never thrown away. If it ended early, its finish reason says why; it has a reward
only if its runner finished. Calls recorded after the session closed are ignored. A runner that produced no token is
called again a few times, each time in a new session, unless its call failed for good; then the sample fails its group.
"""

import asyncio
import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import structlog

from penstock.agents import AgentResult, AgentSession
from penstock.bus.sessions import OpenedSession, Sessions
from penstock.errors import (
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    PenstockError,
    PoisonError,
    UnavailableError,
)
from penstock.model.chat.chat_template import Renderer
from penstock.records import Prompt, Sample, SessionCall, SessionFailure, SessionId, SessionState, Verdict
from penstock.records.session import LAST_TOKENS_S, SESSION_HEADER
from penstock.runtime.security import Security
from penstock.telemetry import spans
from penstock.verdict_status import Status
from services.rollout.worker.agents.linearize import linearize, turns_of
from services.rollout.worker.agents.runners import RunnerCaller, RunnerError
from services.rollout.worker.answer_verifier import AnswerVerifier
from services.rollout.worker.closings import Closings
from services.rollout.worker.episodes.clock import TIME_REMEDY, EpisodeClock
from services.rollout.worker.episodes.grading import Grading
from services.rollout.worker.episodes.tasks import make_task
from services.rollout.worker.group_images import GroupImages

log = structlog.get_logger()

Ending: TypeAlias = Literal["stop", "length", "deadline", "error"]

MAX_ATTEMPTS = 3
"""Maximum calls of a runner that got no answer of the policy. A container that failed to start may start next time."""
_PAUSE_S = 1.0
_BUS_TIMEOUT_S = 60.0
"""Seconds to wait for an absent server after a sample has ended, before its group is put back."""
_ABANDON_S = 2.0
_END_S = 10.0
"""Seconds that a cancelled runner has to end."""
_NO_REWARD = "its runner gave no reward, and the row's gold answers cannot be read"
"""Why a sample whose last answer was cut is unjudged. Without the cut, such golds fail its group."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentEpisode:
    """A sample that an agent played and that has no verdict yet."""

    calls: Sequence[tuple[int, SessionCall]]
    texts: Sequence[str]
    """The policy's text in each call."""
    result: AgentResult
    finish_reason: Ending
    started_at: float
    """Seconds since 1970."""
    elapsed_s: float
    ended_by: str = ""
    """What ended it early; see `penstock.records.Sample`."""

    @property
    def answer(self) -> str:
        """The text of the session's last answer, for the reward service."""
        return self.texts[-1]

    @property
    def error(self) -> str:
        """Why the sample cannot be judged; empty if it can."""
        return str(self.result.error)

    @property
    def needs_verdict(self) -> bool:
        """Whether the reward service decides its reward."""
        return self.result.reward is None and not self.error

    def to_sample(self, verdict: Verdict | None) -> Sample:
        """Return the finished sample; `verdict` is the reward service's, if it was asked."""
        judged = None if verdict is None or not verdict.is_judged else verdict.score
        given = None if self.error else self.result.reward
        lacks_golds = verdict is not None and verdict.status == Status.GOLD_INVALID
        return Sample(
            sequences=linearize(self.calls),
            reward=judged if given is None else float(given),
            metrics={name: float(value) for name, value in self.result.metrics.items()},
            finish_reason=self.finish_reason,
            error=self.error or (self.ended_by or _NO_REWARD if lacks_golds else ""),
            ended_by=self.ended_by,
            verdict=verdict,
            turns=turns_of(self.calls),
            started_at=self.started_at,
            elapsed_s=self.elapsed_s,
            text="\n".join(self.texts),
        )


class AgentPlayer:
    """Plays samples by agents, through a router."""

    def __init__(
        self,
        agents: Mapping[str, RunnerCaller],
        *,
        answer_verifier: AnswerVerifier,
        sessions: Sessions,
        renderer: Renderer,
        router_url: str,
        security: Security,
        episode_timeout_s: float,
    ) -> None:
        """Create a player from these parts.

        Args:
            agents: The caller of each agent's runner, by the agent's name.
            answer_verifier: Verifies answers for runners.
            sessions: Where the router records the policy's answers.
            renderer: The model's tokenizer.
            router_url: http(s)://host:port of the router's OpenAI-compatible API.
            security: Makes the key of each session, and holds the TLS settings for clients of the router.
            episode_timeout_s: Maximum seconds for a sample; its prompt may allow less.
        """
        self._agents = agents
        self._answer_verifier = answer_verifier
        self._sessions = sessions
        self._renderer = renderer
        self._router_url = router_url.rstrip("/")
        self._security = security
        self._tls = None if security.tls is None else security.tls.client_context()
        self._tls_ca = "" if security.tls is None else str(security.tls.ca_file or "")
        self._episode_timeout_s = episode_timeout_s

    def plays(self, name: str) -> bool:
        """Return whether there is an agent of that name."""
        return name in self._agents

    async def play(self, prompt: Prompt, number: int, images: GroupImages, closings: Closings) -> AgentEpisode:
        """Play sample `number` of `prompt`; `images` and `closings` are the group's.

        Raises:
            DeadlineError: time ran out before a token came.
            UnavailableError: the runner ended a few times without an answer of the policy, or NATS is away.
            SessionOverError: another worker plays the sample.
            InvalidRequestError: its first call can never succeed, or the runner requested a verdict and the prompt's
                golds cannot be judged.
            PoisonError: its first call broke every replica that tried it.
            PenstockError: an answer contradicts what the session allows.
        """
        item_id, problem = f"{prompt.id.message}/{number}", ""
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                await asyncio.sleep(_PAUSE_S)
            with spans.recorded(
                "session", group=prompt.id.message, sample=number, attempt=attempt, agent=prompt.environment
            ) as about:
                episode, problem = await self._attempt(prompt, number, images, closings)
                about["num_calls"] = 0 if episode is None else len(episode.calls)
                if error := problem if episode is None else episode.error:
                    about["error"] = error
            if episode is not None:
                return episode
            log.warning("runner.got_no_answer", sample=item_id, agent=prompt.environment, reason=problem)
        raise UnavailableError(
            f"agent {prompt.environment!r} got no answer of the policy in {MAX_ATTEMPTS} attempts at sample {number}: "
            f"{problem}; see that its runner starts and calls the base_url that it is given, and what its calls are "
            "answered"
        )

    async def _attempt(
        self, prompt: Prompt, number: int, images: GroupImages, closings: Closings
    ) -> tuple[AgentEpisode | None, str]:
        """Have the runner play once; return the episode, or None and the reason if the policy said nothing."""
        session = SessionId.new(prompt.id, number)
        timeout_s = min(prompt.limits.episode_timeout_s or math.inf, self._episode_timeout_s)
        opened = await self._sessions.open(session, _state_of(prompt, session, timeout_s))
        clock, item_id = EpisodeClock(timeout_s), f"{prompt.id.message}/{number}"
        grading = Grading(self._answer_verifier, prompt, item_id, clock)
        ending: Ending = "stop"
        ended_by = ""
        given = AgentSession(
            base_url=f"{self._router_url}/sessions/{session}/v1",
            router_url=self._router_url,
            headers={SESSION_HEADER: str(session)},
            api_key=self._security.key_of(str(session)) or "none",
            task=make_task(prompt, item_id, images, grading, clock),
            timeout_s=timeout_s,
            tls=self._tls,
            tls_ca=self._tls_ca,
        )
        try:
            result = await _limited(
                self._agents[prompt.environment].run(given), clock, functools.partial(self._take_tokens, opened)
            )
        except RunnerError as error:
            result = AgentResult(error=f"agent {prompt.environment!r}: {error}")
        except asyncio.CancelledError:
            await self._abandon(opened)
            raise
        if result is None:
            why = f"agent {prompt.environment!r}: its runner was ended after {timeout_s:g} s, before it gave a reward"
            result, ending = AgentResult(error="" if prompt.golds else why), "deadline"
            ended_by = f"{why}; {TIME_REMEDY}"
        elapsed_s = clock.elapsed_s
        calls, failure = await self._end(opened, closings)
        grading.require_sound()
        if (unjudged := grading.take_unjudged()) and not result.error:
            result = AgentResult(error=f"an answer that its reward may rest on was not judged: {unjudged}")
        if not calls:
            if ending == "deadline":
                raise _late_error(prompt.environment, failure, timeout_s=timeout_s)
            if failure is not None:
                raise _final_error(prompt.environment, failure)
            return None, str(result.error) or "its runner returned without an answer of the policy"
        _check(calls, prompt)
        if result.error:
            ending = "deadline" if ending == "deadline" else "error"
            log.warning("sample.failed", sample=item_id, error=result.error)
        elif ending == "stop" and calls[-1][1].finish_reason == "length":
            ending = "length"
        episode = AgentEpisode(
            calls=calls,
            texts=[self._renderer.decode(call.output_ids.tolist()) for _, call in calls],
            result=result,
            finish_reason=ending,
            started_at=clock.started_at,
            elapsed_s=elapsed_s,
            ended_by=ended_by,
        )
        return episode, ""

    async def _take_tokens(self, opened: OpenedSession, runner: asyncio.Task[AgentResult]) -> None:
        """If a session whose time is over has no answer, have routers record the tokens that came for one in progress.
        The runner goes on meanwhile: its call would leave nothing if it were cancelled.

        Raises:
            SessionOverError: another worker plays the sample.
        """
        give_up_at, is_ending = time.monotonic() + LAST_TOKENS_S, False
        while not runner.done() and time.monotonic() < give_up_at:
            with contextlib.suppress(UnavailableError, OverloadedError):
                if await self._sessions.read(opened.id):
                    return
                if not is_ending:
                    await self._sessions.begin_end(opened)
                    is_ending = True
            await asyncio.wait({runner}, timeout=_PAUSE_S)

    async def _abandon(self, opened: OpenedSession) -> None:
        """Close the session of a group that is abandoned, and remove its calls."""
        with contextlib.suppress(PenstockError, TimeoutError):
            async with asyncio.timeout(_ABANDON_S):
                await self._sessions.close(opened)
                await self._sessions.forget(opened.id)

    async def _end(
        self, opened: OpenedSession, closings: Closings
    ) -> tuple[Sequence[tuple[int, SessionCall]], SessionFailure | None]:
        """Close the session, and return its calls; without any, also why one failed for good. `closings` removes them.

        Raises:
            SessionOverError: another session plays the sample.
            PenstockError: NATS is away for too long, or has no room.
        """
        give_up_at = time.monotonic() + _BUS_TIMEOUT_S
        while True:
            try:
                await self._sessions.close(opened)
                calls = await self._sessions.read(opened.id)
                failure = None if calls else await self._sessions.read_failure(opened.id)
            except (UnavailableError, OverloadedError):
                if time.monotonic() >= give_up_at:
                    raise
                await asyncio.sleep(_PAUSE_S)
            else:
                closings.begin(self._sessions.forget(opened.id))
                return calls, failure


async def _limited(
    running: Coroutine[Any, Any, AgentResult],
    clock: EpisodeClock,
    at_deadline: Callable[[asyncio.Task[AgentResult]], Awaitable[None]],
) -> AgentResult | None:
    """Return the runner's result; None if its time ran out, after `at_deadline`. Leave a runner that ignores its
    cancellation behind."""
    task = asyncio.create_task(running)
    try:
        with contextlib.suppress(DeadlineError):
            async with clock.limit("the runner"):
                await asyncio.wait({task})
        if task.done():
            return task.result()
        await at_deadline(task)
        return None
    finally:
        task.cancel()
        await asyncio.wait({task}, timeout=_END_S)
        if not task.done():
            log.warning("runner.left_behind", reason="it does not end when it is cancelled")
        elif not task.cancelled():
            task.exception()  # known, or from a runner whose result has no reader


def _state_of(prompt: Prompt, session: SessionId, timeout_s: float) -> SessionState:
    return SessionState(
        nonce=session.nonce,
        group=prompt.id.message,
        scope=prompt.id.scope,
        images=prompt.images,
        sampling=prompt.sampling,
        min_version=prompt.min_version,
        exact_version=prompt.exact_version,
        tools=prompt.tools,
        chat_template_kwargs=prompt.chat_template_kwargs,
        limits=prompt.limits,
        timeout_s=timeout_s,
    )


def _late_error(agent: str, failure: SessionFailure | None, *, timeout_s: float) -> PenstockError:
    """Return the error of a sample whose time ended without a token. A call that was refused does not explain that."""
    if failure is not None and failure.is_poison:
        return _final_error(agent, failure)
    refused = "" if failure is None else f", after a call that was refused ({failure.reason})"
    return DeadlineError(
        f"agent {agent!r} got no token of the policy within {timeout_s:g} s{refused}; see whether its runner hangs or "
        "its calls wait for engines, add engines, or raise worker.episode_timeout_s"
    )


def _final_error(agent: str, failure: SessionFailure) -> PenstockError:
    """Return the error of a sample whose call failed for good."""
    kind = PoisonError if failure.is_poison else InvalidRequestError
    return kind(f"agent {agent!r} got no answer of the policy: {failure.reason}")


def _check(calls: Sequence[tuple[int, SessionCall]], prompt: Prompt) -> None:
    """Check that only allowed policy versions answered, because engines' reports are not trusted."""
    newest = math.inf if prompt.exact_version is None else prompt.exact_version
    versions = {span.policy_version for _, call in calls for span in call.version_spans}
    if wrong := sorted(version for version in versions if not prompt.min_version <= version <= newest):
        raise PenstockError(
            f"policy versions {wrong} answered in a session of versions {prompt.min_version} to {newest}; an engine or "
            "router breaks its contract"
        )
