"""Plays one turn as a stream, so that a turn that ends early keeps the tokens it has.

A turn has two clocks. Before its first chunk (it is in the router's or an engine's queue or in prefill, or no server
answers) only the wait timeout runs. From its first chunk on, the turn's own budget runs; when that is used up, the turn
ends with the tokens it has. The first token is delivered at once. The router replaces a replica that dies inside a
turn; this is not visible here, and the replacement's queue counts as playing.

Invariant: a turn with tokens never fails, unless a person must change something. Only a turn without any raises.
"""

import asyncio
import dataclasses
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Protocol

import structlog

from penstock.clients.resumable import ResumableTurn
from penstock.errors import (
    DeadlineError,
    MissingImageError,
    NotReadyError,
    OverloadedError,
    PenstockError,
    PromptTooLongError,
    UnavailableError,
    UserError,
)
from penstock.v1 import generate_pb2
from services.rollout.worker import metrics

log = structlog.get_logger()

CHUNK_TOKENS = 64
"""Tokens of a chunk. A turn that is cut loses the tokens of an incomplete chunk: fewer than these, and none older than
a second; of a long turn, fewer than one in 16."""
WAIT_TIMEOUT_S = 900.0
"""Maximum seconds that a turn waits while no replica works on it, and a group for its verdicts: longer than an engine
takes to load a large model. A sample without a token by then puts its group back for another delivery; one with tokens
ends with them."""
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
_SERVER_SLACK_S = 5.0
"""Seconds by which servers' deadlines exceed ours: ours ends the stream, theirs cleans up after a lost caller."""


class Generator(Protocol):
    """Streams a turn: `penstock.clients.GenerateClient`."""

    def stream(
        self, request: generate_pb2.GenerateRequest, *, timeout_s: float
    ) -> AsyncGenerator[generate_pb2.GenerateChunk, None]:
        """Yield the turn's chunks; the last has a finish reason."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn that produced at least one token."""

    response: generate_pb2.GenerateResponse
    """All its tokens. Its finish reason is DEADLINE if time ran out, and LENGTH if no replica had room for more."""
    waited_s: float
    """Seconds before the first chunks: queues, retries and prefill."""
    generated_s: float
    """Seconds from the first chunk to the last."""
    failure: str = ""
    """Not empty if the turn broke or failed in every replica that continued it, or lost an image for good: its tokens
    are sound, but it has no end."""


@dataclasses.dataclass(slots=True)
class _Progress:
    """Combined progress of a turn's attempts."""

    resumable: ResumableTurn
    give_up_at: float
    """Time of `time.monotonic()` at which a waiting turn gives up; it moves on with each token."""
    waited_s: float = 0.0
    generated_s: float = 0.0
    failure: str = ""
    refusal: str = ""
    """Why the last attempt was refused; empty if it was not."""
    restored_at: int | None = None
    """Number of tokens when the images were last stored again."""


class TurnPlayer:
    """Plays turns against a router, or a single engine."""

    def __init__(self, generator: Generator, *, wait_timeout_s: float) -> None:
        """Play with `generator`; a turn may wait `wait_timeout_s` while no replica works on it."""
        self._generator = generator
        self._wait_timeout_s = wait_timeout_s
        self._failing = False

    async def play(
        self,
        request: generate_pb2.GenerateRequest,
        *,
        budget_s: float,
        restore_images: Callable[[float], Awaitable[None]],
    ) -> Turn:
        """Play `request`, for at most `budget_s` seconds from its first chunk on.

        `restore_images` stores the request's images again, unless that happened after its argument, a time of
        `time.monotonic()`: the start of the attempt that missed one. If no token came since, and an image is missing
        again, the turn ends.

        Raises:
            MissingImageError: an image is lost for good.
            InvalidRequestError: the request can never succeed.
            PoisonError: it broke every replica that tried it.
            DeadlineError: no token came within the wait timeout, and the last attempt was still waiting;
                UnavailableError, OverloadedError and NotReadyError if it was refused.
            UserError: a person must change something, a wrong token for example, also after tokens came.
            PenstockError: the server broke its contract, or it crashed in every replica that tried it.
        """
        progress = _Progress(ResumableTurn(request), time.monotonic() + self._wait_timeout_s)
        resumable, backoff_s = progress.resumable, _FIRST_BACKOFF_S
        while not resumable.is_finished:
            num_before, began = resumable.num_tokens, time.monotonic()
            try:
                await self._attempt(progress, budget_s)
            except (UnavailableError, OverloadedError, NotReadyError) as error:
                progress.refusal = str(error)
                if resumable.num_tokens > num_before:
                    backoff_s, progress.give_up_at = _FIRST_BACKOFF_S, time.monotonic() + self._wait_timeout_s
                pause_s = backoff_s * random.uniform(0.5, 1.0)
                if time.monotonic() + pause_s < progress.give_up_at:
                    self._report_failing(error)
                    await asyncio.sleep(pause_s)
                    progress.waited_s, backoff_s = progress.waited_s + pause_s, min(_MAX_BACKOFF_S, 2 * backoff_s)
                elif resumable.num_tokens == 0:
                    raise
                else:
                    resumable.cut(generate_pb2.FINISH_REASON_DEADLINE)
            except PenstockError as error:
                if isinstance(error, MissingImageError) and progress.restored_at != resumable.num_tokens:
                    log.warning("images.stored_again", request=request.request_id, reason=str(error))
                    progress.restored_at = resumable.num_tokens
                    await restore_images(began)
                    progress.give_up_at = time.monotonic() + self._wait_timeout_s
                    continue
                if resumable.num_tokens == 0 or isinstance(error, UserError):
                    raise
                progress.failure = "" if isinstance(error, PromptTooLongError | DeadlineError) else str(error)
                is_full = isinstance(error, PromptTooLongError)
                resumable.cut(generate_pb2.FINISH_REASON_LENGTH if is_full else generate_pb2.FINISH_REASON_DEADLINE)
        self._failing = False
        metrics.count_turn(waited_s=progress.waited_s, generated_s=progress.generated_s)
        return Turn(
            response=resumable.response(),
            waited_s=progress.waited_s,
            generated_s=progress.generated_s,
            failure=progress.failure,
        )

    async def _attempt(self, progress: _Progress, budget_s: float) -> None:
        """Stream the rest of the turn; cut it when the budget is used up.

        Raises:
            DeadlineError: no chunk came before `progress.give_up_at`.
            PenstockError: as the stream does.
        """
        started, resumable = time.monotonic(), progress.resumable
        began: float | None = None
        wait_s = max(0.0, progress.give_up_at - started)
        timeout_s = wait_s + budget_s + _SERVER_SLACK_S
        try:
            async with (
                aclosing(self._generator.stream(resumable.remaining(), timeout_s=timeout_s)) as chunks,
                asyncio.timeout(wait_s) as limit,
            ):
                async for chunk in chunks:
                    if began is None:
                        began = time.monotonic()
                        limit.reschedule(asyncio.get_running_loop().time() + budget_s - progress.generated_s)
                    resumable.add(chunk)
        except TimeoutError:
            if began is None:
                refused = f"; the attempt before was refused: {progress.refusal}" if progress.refusal else ""
                wait = f"no token came within {self._wait_timeout_s:g} s"
                raise DeadlineError(f"{wait}; add engines, or lower worker.concurrency{refused}") from None
            if not resumable.is_finished:
                resumable.cut(generate_pb2.FINISH_REASON_DEADLINE)
        except PenstockError:
            if not resumable.is_finished:  # only the call's own status was missing then
                raise
        finally:
            now = time.monotonic()
            progress.waited_s += (now if began is None else began) - started
            progress.generated_s += 0.0 if began is None else now - began

    def _report_failing(self, error: Exception) -> None:
        """Log one warning when a server stops answering, not one for each of a thousand turns."""
        level = log.debug if self._failing else log.warning
        level("turn.retried", reason=str(error))
        self._failing = True
