"""Begins an episode: makes its environment, resets it, and renders its first observation.

Invariant: every environment that was made is closed once, however its episode ends. No token was sampled yet, so a
failure here selects nothing: another environment is tried.
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import structlog

from penstock.environments import Environment, EnvironmentFactory, Observation, Task
from penstock.errors import (
    EnvironmentFailedError,
    InvalidRequestError,
    OverloadedError,
    PenstockError,
    PoisonError,
    PromptTooLongError,
    UnavailableError,
)
from penstock.model.chat.chat_template import Renderer
from penstock.model.families.qwen_vl import ImageGrid
from penstock.records import Prompt
from penstock.runtime.backoff import Backoff
from penstock.runtime.process import others_code
from services.rollout.worker.environments.hosting.messages import (
    EnvironmentUnavailableError,
    ObservationTooLargeError,
)
from services.rollout.worker.environments.registry import EnvironmentRegistry
from services.rollout.worker.episodes.budget import Budget, OverBudgetError
from services.rollout.worker.episodes.clock import EpisodeClock
from services.rollout.worker.episodes.grading import Grading
from services.rollout.worker.episodes.rendering import Rendering
from services.rollout.worker.shared_rendering import SharedRendering

log = structlog.get_logger()

_CLOSE_TIMEOUT_S = 9.0
"""Longer than an environment elsewhere has for its `close`; see hosting/processes.py."""
_WAITS = Backoff(0.1, 5.0)
"""Pauses while a server of environments has no room. They do not count as time of the episode."""
_MAX_RESETS = 3
"""Times that an environment is made and reset before it counts as broken: a sample that fails without a token takes its
group with it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """An episode before its first turn."""

    environment: Environment
    """The environment, after its reset."""
    first: Observation
    ids: list[int]
    """Ids of the first observation."""
    budget: Budget
    """The budget after the first observation."""


class EpisodeStarter:
    """Begins episodes."""

    def __init__(
        self,
        *,
        renderer: Renderer,
        rendering: Rendering,
        environments: EnvironmentRegistry,
        context_length: int | None,
        grid: ImageGrid | None,
        wait_timeout_s: float,
    ) -> None:
        """Create a starter from these parts; they are those of `EpisodePlayer`."""
        self._longest_token_bytes = renderer.longest_token_bytes
        self._rendering = rendering
        self._environments = environments
        self._context_length = context_length
        self._grid = grid
        self._wait_timeout_s = wait_timeout_s

    @asynccontextmanager
    async def begun(
        self, prompt: Prompt, task: Task, clock: EpisodeClock, grading: Grading, shared: SharedRendering
    ) -> AsyncIterator[Beginning]:
        """Begin an episode of `prompt`, and close its environment when the context ends.

        `clock` is paused while there is no room for another environment.

        Raises:
            InvalidRequestError: the prompt, or the environment's beginning, can never be played.
            PoisonError: every environment that was made for it failed.
            UnavailableError: the same, because of an error of the operating system or the network.
            OverloadedError: a server of environments had no room for too long.
            DeadlineError: it took too long.
        """
        factory = self._environments.find(prompt.environment)
        waiting = time.monotonic()
        async with self._environments.room(prompt.environment):
            clock.stop_for(time.monotonic() - waiting)
            async with self._reset(factory, prompt, task, clock, grading, shared) as beginning:
                yield beginning

    @asynccontextmanager
    async def _reset(
        self,
        factory: EnvironmentFactory,
        prompt: Prompt,
        task: Task,
        clock: EpisodeClock,
        grading: Grading,
        shared: SharedRendering,
    ) -> AsyncIterator[Beginning]:
        num_tried, num_waits, give_up_at = 0, 0, time.monotonic() + self._wait_timeout_s
        while True:
            async with AsyncExitStack() as stack:
                try:
                    environment = await stack.enter_async_context(_closing(factory()))
                    async with clock.limit(f"the reset of environment {prompt.environment!r}"):
                        with others_code():
                            first = await environment.reset(task)
                    grading.require_sound()
                    budget = self._budget(prompt)
                    ids = await self._render(first, prompt, task, budget, shared)
                except OverBudgetError as error:
                    raise PromptTooLongError(
                        f"environment {prompt.environment!r} begins with {error}; see data.limits"
                    ) from None
                except ObservationTooLargeError as error:
                    raise PromptTooLongError(f"environment {prompt.environment!r} begins too large: {error}") from None
                except OverloadedError:
                    if time.monotonic() >= give_up_at:
                        raise
                    num_waits += 1
                except Exception as error:  # a boundary: environments are users' code
                    if isinstance(error, PenstockError) and not isinstance(error, EnvironmentFailedError):
                        raise
                    grading.require_sound()
                    num_tried += 1
                    reason = describe_failure(prompt.environment, error)
                    log.warning("environment.reset_failed", sample=task.id, error=reason, num_tried=num_tried)
                    if num_tried < _MAX_RESETS:
                        continue
                    may_pass = isinstance(error, OSError | EnvironmentUnavailableError)
                    raise (UnavailableError if may_pass else PoisonError)(
                        f"{reason}; its reset failed {num_tried} times"
                    ) from None
                else:
                    yield Beginning(environment=environment, first=first, ids=ids, budget=budget)
                    return
            pause_s = _WAITS.after(num_waits)
            await asyncio.sleep(pause_s)
            clock.stop_for(pause_s)

    async def _render(
        self, first: Observation, prompt: Prompt, task: Task, budget: Budget, shared: SharedRendering
    ) -> list[int]:
        if not isinstance(first, Observation):
            raise TypeError(f"its reset returned {type(first).__name__}; return an Observation")
        _check_prompt_images(first, prompt, task)

        def render(renderer: Renderer) -> list[int]:
            return renderer.render_prompt(
                first.messages,
                num_images=len(first.images),
                tools=first.tools,
                template_kwargs=prompt.chat_template_kwargs,
            )

        async def ids_of(num_bytes: int) -> list[int]:
            return await shared.ids_of(first, lambda: self._rendering.render(render, num_bytes=num_bytes))

        return await budget.add_prompt(first, ids_of)

    def _budget(self, prompt: Prompt) -> Budget:
        return Budget(
            prompt.limits,
            context_length=self._context_length,
            grid=self._grid,
            longest_token_bytes=self._longest_token_bytes,
        )


def describe_failure(environment: str, error: Exception) -> str:
    """Describe what an environment did wrong."""
    said = str(error) if isinstance(error, EnvironmentFailedError) else f"{type(error).__name__}: {error}"
    return f"environment {environment!r}: {said}"


def _check_prompt_images(first: Observation, prompt: Prompt, task: Task) -> None:
    """Check that the first observation's images begin with the prompt's, because placeholders pair in order."""
    if first.images[: len(task.images)] != task.images:
        raise InvalidRequestError(
            f"environment {prompt.environment!r} began with {len(first.images)} images that do not start with the "
            f"prompt's {len(task.images)}; show the prompt's images first, unchanged"
        )


@asynccontextmanager
async def _closing(environment: Environment) -> AsyncIterator[Environment]:
    try:
        yield environment
    finally:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                with others_code():
                    await environment.close()
        except Exception as error:  # noqa: BLE001 - a boundary, as above; the sample is complete
            log.warning("environment.close_failed", environment=type(environment).__name__, error=repr(error))
