"""Plays one sample: turn by turn, from the environment's first messages to its end.

Invariants: token in, token out: a turn's request has exactly the ids of the turns before and of the environment's
answers, without thoughts where `worker.strip_thinking` says so. The policy's own ids are never made from text. A sample
with tokens is never thrown away: if it ends early, its finish reason says why. Only a sample without any token fails
its group.
"""

import dataclasses
import functools
import math
import time
import uuid
from collections.abc import Callable, Collection

import structlog

from penstock.environments import Observation, StepResult
from penstock.errors import (
    DeadlineError,
    NotReadyError,
    OverloadedError,
    PenstockError,
    PromptTooLongError,
    UnavailableError,
    UserError,
)
from penstock.model.chat.chat_template import Renderer
from penstock.model.families.qwen_vl import ImageGrid
from penstock.names import SINGLE_TURN, TRAIN
from penstock.records import Prompt
from penstock.runtime.process import others_code
from penstock.telemetry import spans
from penstock.v1 import generate_pb2
from services.rollout.worker.answer_verifier import AnswerVerifier
from services.rollout.worker.closings import Closings
from services.rollout.worker.config import WorkerConfig
from services.rollout.worker.environments.hosting.messages import ObservationTooLargeError
from services.rollout.worker.environments.registry import EnvironmentRegistry
from services.rollout.worker.episodes.beginning import Beginning, EpisodeStarter, describe_failure
from services.rollout.worker.episodes.budget import OverBudgetError
from services.rollout.worker.episodes.clock import TIME_REMEDY, EpisodeClock
from services.rollout.worker.episodes.earlier_thoughts import EarlierThoughts
from services.rollout.worker.episodes.episode import Ending, Episode
from services.rollout.worker.episodes.grading import Grading
from services.rollout.worker.episodes.rendering import Rendering
from services.rollout.worker.episodes.tasks import make_task
from services.rollout.worker.episodes.trajectory import DEADLINE, STOP, Trajectory
from services.rollout.worker.episodes.turn import CHUNK_TOKENS, WAIT_TIMEOUT_S, Generator, Turn, TurnPlayer
from services.rollout.worker.group_images import GroupImages
from services.rollout.worker.shared_rendering import SharedRendering

log = structlog.get_logger()


class EpisodePlayer:
    """Plays episodes against a router or an engine."""

    def __init__(
        self,
        config: WorkerConfig,
        *,
        renderer: Renderer,
        generator: Generator,
        environments: EnvironmentRegistry,
        answer_verifier: AnswerVerifier,
        forbidden_ids: Collection[int] = (),
        context_length: int | None = None,
        grid: ImageGrid | None = None,
        wait_timeout_s: float = WAIT_TIMEOUT_S,
        router_replay: bool = False,
    ) -> None:
        """Create a player from these parts.

        Args:
            config: Timeouts.
            renderer: The model's chat template.
            generator: A router or an engine.
            environments: Finds the environment of a prompt.
            answer_verifier: Verifies answers for environments.
            forbidden_ids: Turns with any of these ids are refused.
            context_length: Maximum tokens of a sequence, images expanded; None for no limit.
            grid: How the model cuts images into tokens; None for a model without images.
            wait_timeout_s: Maximum seconds that a turn waits while no replica works on it, and an episode for room at a
                server of environments.
            router_replay: Ask engines which experts computed the tokens that will be trained.

        Raises:
            ConfigError: thoughts must be left out, but the model's chat template never does.
        """
        self._config = config
        self._renderer = renderer
        self._turns = TurnPlayer(generator, wait_timeout_s=wait_timeout_s)
        self._rendering = Rendering(renderer)
        self._earlier_thoughts = EarlierThoughts(renderer) if config.strip_thinking else None
        self._starter = EpisodeStarter(
            renderer=renderer,
            rendering=self._rendering,
            environments=environments,
            context_length=context_length,
            grid=grid,
            wait_timeout_s=wait_timeout_s,
        )
        self._answer_verifier = answer_verifier
        self._forbidden_ids = frozenset(forbidden_ids)
        self._router_replay = router_replay

    async def play(
        self, prompt: Prompt, number: int, images: GroupImages, shared: SharedRendering, closings: Closings
    ) -> Episode:
        """Play sample `number` of `prompt`; `images`, `shared` and `closings` are the group's.

        Its environment is closed beside what comes next, in the task that reset it: `closings` waits for that.

        Raises:
            InvalidRequestError: the prompt can never be played or judged: its data are at fault, there is no such
                environment, or the environment's beginning is invalid.
            PoisonError: its first turn broke every replica that tried it, or its environment could not be reset.
            DeadlineError: the environment's reset took too long, or no first token came.
            PenstockError: the engine broke its contract, or no server answers.
        """
        return await closings.result_of(functools.partial(self._play, prompt, number, images, shared))

    async def _play(
        self,
        prompt: Prompt,
        number: int,
        images: GroupImages,
        shared: SharedRendering,
        tell: Callable[[Episode], None],
    ) -> None:
        trajectory = Trajectory(
            min_version=prompt.min_version, exact_version=prompt.exact_version, forbidden_ids=self._forbidden_ids
        )
        own, bound = prompt.limits.episode_timeout_s, self._config.episode_timeout_s
        clock = EpisodeClock(bound if own is None else min(own, bound))
        item_id = f"{prompt.id.message}/{number}"
        grading = Grading(self._answer_verifier, prompt, item_id, clock)
        task = make_task(prompt, item_id, images, grading, clock)
        async with self._starter.begun(prompt, task, clock, grading, shared) as begun:
            trajectory.add_observation(begun.ids, await images.add(begun.first.images))
            episode = _Episode(prompt, number, item_id, begun, trajectory, images, clock, grading)
            ending = await self._play_turn(episode)
            while ending is None:
                ending = await self._ask_environment(episode) or await self._play_turn(episode)
            if episode.error:
                log.warning("sample.failed", sample=episode.session_id, error=episode.error)
            tell(
                Episode(
                    trajectory=trajectory,
                    text="\n".join(episode.texts),
                    answer=episode.texts[-1],
                    finish_reason=ending,
                    error=episode.error,
                    ended_by=episode.ended_by,
                    is_cut_short=not episode.is_answered and prompt.environment != SINGLE_TURN,
                    started_at=clock.started_at,
                    elapsed_s=clock.elapsed_s,
                )
            )

    async def _play_turn(self, episode: "_Episode") -> Ending | None:
        """Append a turn of the policy; return the ending if it ended the episode, else None."""
        trajectory, prompt = episode.trajectory, episode.prompt
        budget_s = min(prompt.limits.turn_timeout_s or math.inf, episode.clock.remaining_s)
        if trajectory.turns and budget_s <= 0:
            episode.ended_by = f"no time was left for another turn; {TIME_REMEDY}"
            return "deadline"
        request = generate_pb2.GenerateRequest(
            request_id=f"{episode.session_id}/{len(trajectory.turns)}/{uuid.uuid4().hex[:8]}",
            session_id=episode.session_id,
            group_id=prompt.id.message,
            input_ids=trajectory.token_ids,
            images=map(episode.images.reference, trajectory.images),
            sampling=generate_pb2.SamplingParams(
                temperature=prompt.sampling.temperature,
                top_p=prompt.sampling.top_p,
                top_k=prompt.sampling.top_k,
                max_new_tokens=episode.begun.budget.max_new_tokens(prompt.sampling.max_new_tokens),
            ),
            min_policy_version=prompt.min_version,
            exact_policy_version=prompt.exact_version or 0,
            chunk_tokens=CHUNK_TOKENS,
        )
        if self._router_replay and prompt.purpose == TRAIN:
            request.routed_experts_from = trajectory.num_routed_tokens
        started_at, started = episode.clock.now, time.monotonic()
        try:
            turn = await self._turns.play(request, budget_s=budget_s, restore_images=episode.images.store_again)
        except PenstockError as error:
            spans.record(
                "turn",
                started,
                group=prompt.id.message,
                sample=episode.number,
                turn=len(trajectory.turns),
                error=str(error),
            )
            if not trajectory.turns:
                raise
            return _end_by(error, episode)
        ended = time.monotonic()
        spans.record(
            "turn",
            started,
            ended,
            group=prompt.id.message,
            sample=episode.number,
            turn=len(trajectory.turns),
            replica=turn.response.replica_id,
            wait_s=turn.waited_s,
            decode_s=turn.generated_s,
            num_tokens=len(turn.response.output_ids),
            num_prompt_tokens=turn.response.usage.num_prompt_tokens,
            num_cached_tokens=turn.response.usage.num_cached_tokens,
            **({"error": turn.failure} if turn.failure else {}),
        )
        episode.clock.stop_for(ended - started - turn.generated_s)
        return self._add_turn(episode, turn, started_at)

    def _add_turn(self, episode: "_Episode", turn: Turn, started_at: float) -> Ending | None:
        trajectory = episode.trajectory
        trajectory.add_turn(turn.response, started_at=started_at, waited_s=turn.waited_s, generated_s=turn.generated_s)
        episode.begun.budget.add_turn(trajectory.num_context_tokens)
        episode.texts.append(self._renderer.decode(turn.response.output_ids))
        episode.is_answered = False
        if turn.failure:
            episode.error = turn.failure
            return "error"
        if trajectory.last_finish == STOP:
            return None
        return "deadline" if trajectory.last_finish == DEADLINE else "length"

    async def _ask_environment(self, episode: "_Episode") -> Ending | None:
        """Pass the policy's turn to the environment and append its answer; or return how the episode ended.

        Raises:
            InvalidRequestError: the environment asked for a verdict, and the gold answers are wrong.
        """
        trajectory, limits = episode.trajectory, episode.prompt.limits
        try:
            async with episode.clock.limit("the environment's step"):
                turn = self._renderer.parse_turn(
                    episode.texts[-1],
                    tools=episode.begun.first.tools,
                    template_kwargs=episode.prompt.chat_template_kwargs,
                )
                trajectory.add_tools(call.name for call in turn.calls)
                with (
                    spans.recorded_unless_short(
                        "tool",
                        group=episode.prompt.id.message,
                        sample=episode.number,
                        turn=len(trajectory.turns) - 1,
                        environment=episode.prompt.environment,
                    ),
                    episode.clock.measured(trajectory.add_environment_time),
                    others_code(),
                ):
                    result = await episode.begun.environment.step(turn)
            episode.is_answered = True
            episode.grading.require_sound()
            if not isinstance(result, StepResult):
                raise TypeError(f"its step returned {type(result).__name__}; return a StepResult")
            trajectory.add_step(result.reward, result.metrics)
            unjudged = episode.grading.take_unjudged()
            if unjudged and result.reward is not None:
                episode.error = f"a step's reward may rest on an answer that was not judged: {unjudged}"
                return "error"
            if result.observation is None:
                return "environment" if result.truncated else "stop"
            if limits.max_turns is not None and len(trajectory.turns) >= limits.max_turns:
                return "environment"
            kept, ids = await self._render_next(result.observation, episode)
        except (OverBudgetError, ObservationTooLargeError) as error:
            episode.grading.require_sound()
            episode.ended_by = str(error)
            episode.is_answered = True  # also if its server could not send so large an answer
            return "length"
        except DeadlineError as error:
            episode.grading.require_sound()
            if unjudged := episode.grading.take_unjudged():  # perhaps the verdict took too long, not the step
                episode.error = f"its step asked for a verdict and got none: {unjudged}"
                return "error"
            episode.ended_by = str(error)
            return "deadline"
        except Exception as error:  # noqa: BLE001 - a boundary: environments are other people's code
            episode.grading.require_sound()
            # Its errors may depend on what the policy said; playing the group again would select against that.
            episode.error = describe_failure(episode.prompt.environment, error)
            return "error"
        try:
            hashes = await episode.images.add(result.observation.images)
        except PenstockError as error:
            return _end_by(error, episode)
        trajectory.leave_out(kept)
        trajectory.add_observation(ids, hashes)
        return None

    async def _render_next(self, observation: Observation, episode: "_Episode") -> tuple[list[int], list[int]]:
        """Return the ids so far that the policy keeps, and the ids of `observation`, which follow them."""
        if observation.tools:
            raise ValueError(
                f"it shows {len(observation.tools)} tools after the first turn, where the chat template cannot; show "
                "all tools in the first observation"
            )
        roles = [message.role for message in observation.messages]
        if not roles or {*roles} - {"user", "tool"}:
            raise ValueError(
                f"it answers a turn with messages of roles {roles}; answer with roles user or tool, or end the episode "
                "with observation=None"
            )
        trajectory, template_kwargs = episode.trajectory, episode.prompt.chat_template_kwargs
        kept = trajectory.token_ids
        if self._earlier_thoughts is not None:
            kept = self._earlier_thoughts.leave_out(
                kept, trajectory.turn_ranges, observation.messages, template_kwargs=template_kwargs
            )

        def render(renderer: Renderer) -> list[int]:
            return renderer.render_continuation(
                kept[-1],
                observation.messages,
                num_images=len(observation.images),
                num_earlier_images=len(trajectory.images),
                template_kwargs=template_kwargs,
            )

        episode.begun.budget.leave_out(len(trajectory.token_ids) - len(kept))
        ids = await episode.begun.budget.add_observation(
            observation, lambda num_bytes: self._rendering.render(render, num_bytes=num_bytes)
        )
        return kept, ids


@dataclasses.dataclass(slots=True)
class _Episode:
    """An episode in play."""

    prompt: Prompt
    number: int
    session_id: str
    begun: Beginning
    trajectory: Trajectory
    images: GroupImages
    clock: EpisodeClock
    grading: Grading
    texts: list[str] = dataclasses.field(default_factory=list)
    error: str = ""
    ended_by: str = ""
    is_answered: bool = False
    """Whether the environment has answered the last turn."""


def _end_by(error: PenstockError, episode: _Episode) -> Ending:
    """Return how an episode with tokens ends if its next turn fails with `error`.

    Raises:
        UserError: `error`, if a person must change something.
    """
    match error:
        case UserError():
            raise error
        case PromptTooLongError():
            episode.ended_by = str(error)
            return "length"
        case DeadlineError() | UnavailableError() | OverloadedError() | NotReadyError():
            episode.ended_by = str(error)
            return "deadline"
    # Among others: InvalidRequestError blames the environment's addition; with MissingImageError, storing the image
    # again failed.
    episode.error = str(error)
    return "error"
