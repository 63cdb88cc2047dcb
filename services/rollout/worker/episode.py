"""Plays one sample: turn by turn, from the environment's first messages to its end.

Invariant: token in, token out. The ids of a turn's request are exactly the ids of the turns before and what the
environment added; the policy's own ids are never made from text.
"""

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Literal, Protocol, TypeAlias

import structlog

from penstock.config import SamplingConfig
from penstock.errors import DeadlineError, PenstockError
from penstock.model.chat_template import Renderer
from penstock.records import Prompt, Sample, Verdict
from penstock.v1 import common_pb2, generate_pb2
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.base import Environment, Observation
from services.rollout.worker.environments.registry import EnvironmentRegistry
from services.rollout.worker.trajectory import LENGTH, Trajectory

log = structlog.get_logger()

Ending: TypeAlias = Literal["stop", "length", "environment"]

_CLOSE_TIMEOUT_S = 5.0
_MIN_ROOM_TOKENS = 16
"""A turn is played only where the context has room for so many tokens; engines keep a few of them to themselves."""


class Generator(Protocol):
    """What plays a turn: `penstock.clients.GenerateClient`."""

    async def generate(
        self, request: generate_pb2.GenerateRequest, *, timeout_s: float, retry_until: float | None = None
    ) -> generate_pb2.GenerateResponse:
        """Play one turn."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A sample that has been played and not yet judged."""

    trajectory: Trajectory
    images: tuple[bytes, ...]
    """Images that the environment added after the prompt's."""
    text: str
    """The policy's own text, turn after turn."""
    finish_reason: Ending
    """stop: the policy finished. length: its last turn was cut, or the context is full. environment: the environment
    cut it short, or the turns were used up."""

    def to_sample(self, verdict: Verdict) -> Sample:
        """The finished sample."""
        token_ids, loss_mask, logprobs = self.trajectory.arrays()
        return Sample(
            token_ids=token_ids,
            loss_mask=loss_mask,
            logprobs=logprobs,
            version_spans=self.trajectory.version_spans,
            images=self.images,
            num_turns=self.trajectory.num_turns,
            num_prompt_tokens=self.trajectory.num_prompt_tokens,
            num_cached_tokens=self.trajectory.num_cached_tokens,
            num_last_turn_tokens=self.trajectory.num_last_turn_tokens,
            finish_reason=self.finish_reason,
            verdict=verdict,
            text=self.text,
        )


class EpisodePlayer:
    """Plays episodes against a router or an engine."""

    def __init__(
        self,
        config: WorkerConfig,
        sampling: SamplingConfig,
        *,
        renderer: Renderer,
        generator: Generator,
        environments: EnvironmentRegistry,
        forbidden_ids: Collection[int] = (),
        context_length: int | None = None,
    ) -> None:
        """Play with these parts.

        Args:
            forbidden_ids: A turn that holds one of them is refused.
            context_length: The most tokens of a sequence, images expanded; None for no limit.
        """
        self._config = config
        self._sampling = generate_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(0, sampling.top_k),
            max_new_tokens=sampling.max_new_tokens,
        )
        self._renderer = renderer
        self._generator = generator
        self._environments = environments
        self._forbidden_ids = frozenset(forbidden_ids)
        self._context_length = context_length

    async def play(self, prompt: Prompt, sample: int, *, deadline: float) -> Episode:
        """Play the `sample`-th sample of `prompt` until `deadline` of `time.monotonic()`.

        Raises:
            InvalidRequestError: the prompt can never be played: a fault of the data, or no such environment.
            DeadlineError: it took too long.
            PenstockError: the engine or the environment broke its contract, or nobody answers.
        """
        session_id = f"{prompt.message_id}/{sample}"
        trajectory = Trajectory(min_version=prompt.admitted_version, forbidden_ids=self._forbidden_ids)
        async with _opened(self._environments.find(prompt.environment)()) as environment:
            async with _until(deadline, "the environment's reset"):
                first = await environment.reset(prompt)
            images = _check_prompt_images(first, prompt)
            trajectory.add_observation(self._renderer.render_prompt(first.messages, num_images=len(images)))
            texts: list[str] = []
            while True:
                response = await self._generate(session_id, prompt, trajectory, images, deadline)
                trajectory.add_turn(response)
                texts.append(self._renderer.decode(response.output_ids))
                ending = await self._go_on(environment, trajectory, images, texts[-1], deadline)
                if ending is not None:
                    added = tuple(images[len(prompt.images) :])
                    return Episode(trajectory=trajectory, images=added, text="\n".join(texts), finish_reason=ending)

    async def _go_on(
        self, environment: Environment, trajectory: Trajectory, images: list[bytes], text: str, deadline: float
    ) -> Ending | None:
        """Tell the environment what the policy said and append its answer; or return how the episode ended."""
        if trajectory.last_finish == LENGTH:
            return "length"
        async with _until(deadline, "the environment's step"):
            result = await environment.step(text)
        observation = result.observation
        if observation is None:
            return "environment" if result.truncated else "stop"
        if trajectory.num_turns >= self._config.max_turns:
            return "environment"
        ids = self._renderer.render_continuation(
            trajectory.token_ids[-1], observation.messages, num_images=len(observation.images)
        )
        # Images of the observation count as one token each here; the engine refuses what is too long all the same.
        limit = self._context_length
        if limit is not None and trajectory.num_context_tokens + len(ids) + _MIN_ROOM_TOKENS > limit:
            return "length"
        trajectory.add_observation(ids)
        images.extend(observation.images)
        return None

    async def _generate(
        self, session_id: str, prompt: Prompt, trajectory: Trajectory, images: list[bytes], deadline: float
    ) -> generate_pb2.GenerateResponse:
        if time.monotonic() >= deadline:
            raise DeadlineError(
                f"the episode took longer than worker.episode_timeout_s, at turn {trajectory.num_turns}"
            )
        request = generate_pb2.GenerateRequest(
            request_id=f"{session_id}/{trajectory.num_turns}/{uuid.uuid4().hex[:8]}",
            session_id=session_id,
            input_ids=trajectory.token_ids,
            images=[common_pb2.Image(data=image) for image in images],
            sampling=self._sampling,
            min_policy_version=prompt.admitted_version,
        )
        return await self._generator.generate(request, timeout_s=self._config.generate_timeout_s, retry_until=deadline)


def _check_prompt_images(first: Observation, prompt: Prompt) -> list[bytes]:
    """The first observation's images, which must begin with the prompt's: the trainer pairs placeholders by order."""
    if first.images[: len(prompt.images)] != prompt.images:
        raise PenstockError(
            f"environment {prompt.environment!r} began with {len(first.images)} images that do not start with the "
            f"prompt's {len(prompt.images)}; show the prompt's images first, unchanged"
        )
    return list(first.images)


@asynccontextmanager
async def _opened(environment: Environment) -> AsyncIterator[Environment]:
    try:
        yield environment
    finally:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await environment.close()
        except TimeoutError:
            log.warning("environment.close_abandoned", environment=type(environment).__name__)


@asynccontextmanager
async def _until(deadline: float, what: str) -> AsyncIterator[None]:
    limit = asyncio.timeout(deadline - time.monotonic())
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineError(f"{what} took longer than worker.episode_timeout_s allows") from None
