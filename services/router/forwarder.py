"""Forwards calls to the replicas of a pool, from any frontend.

Unary calls and streams both run as streams on the engine, so that a replica that dies costs a call only its undelivered
tokens. Invariant: the caller sees one answer, as if from one engine.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import structlog

from penstock.clients.turn import RetryBudget, run_turn
from penstock.errors import MissingImageError, NotReadyError, OverloadedError, PenstockError, PromptTooLongError
from penstock.telemetry import metrics, spans
from services.router.attempt_span import AttemptSpan
from services.router.balancing import UNBOUNDED, Query
from services.router.resumable_stream import ResumableStream
from services.router.slots.shared_prefill import SharedPrefill
from services.router.slots.slot import Slot
from services.router.slots.slot_pool import SlotPool
from services.router.slots.wait_queue import Ticket
from services.router.tuning import Tuning

log = structlog.get_logger()

_MOVED = metrics.counter(
    "penstock_router_moved_calls_total",
    "Attempts after which a call went to another replica: it rejected the call, or was too small for it, or failed.",
    ("reason",),
)


class RequestForwarder:
    """Forwards calls to the slots of a pool."""

    def __init__(self, slots: SlotPool, tuning: Tuning) -> None:
        """Forward to `slots`."""
        self._slots = slots
        self._tuning = tuning
        self._shared_prefill = SharedPrefill()

    @property
    def context_length(self) -> int | None:
        """Maximum tokens of prompt and answer together that a replica takes; while there is none, the most that one
        took since there was none before. None: the leases do not say, or there was none yet."""
        slots = self._slots
        largest = slots.present.largest if slots.replicas else slots.present.last_largest
        return None if largest == UNBOUNDED else largest

    def forward(
        self,
        stream: ResumableStream,
        *,
        timeout_s: float,
        wait_s: float = 0.0,
        restore_images: Callable[[], Awaitable[None]] | None = None,
        size_bytes: int | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of the answer, from one replica after another until it is complete. Leaving early aborts the
        request in the engine.

        Args:
            stream: The call.
            timeout_s: Its deadline.
            wait_s: Seconds that it may wait while no replica can take it, if more than `router.wait_for_replica_s`.
            restore_images: Stores the call's images, in case an engine misses one.
            size_bytes: Memory that counts while the call waits, if other than that of `stream`: it may share some with
                others, and its caller may keep more for it.

        Raises:
            MissingImageError: an image is not stored, even after it was restored.
            InvalidRequestError: the request is invalid; raised by the call itself, the following by the iteration.
            PoisonError: too many replicas failed.
            PenstockError: no replica could answer it to the end.
        """
        query = stream.read_query(with_blocks=self._slots.balancer.reads_blocks)
        deadline = time.monotonic() + timeout_s
        size_bytes = stream.size_bytes if size_bytes is None else size_bytes
        ticket = Ticket(query=query, deadline=deadline, size_bytes=size_bytes, wait_s=wait_s)
        budget = RetryBudget(self._tuning.max_attempts)
        slots = _Slots(self._slots, ticket, budget, self._shared_prefill)

        def run() -> AsyncGenerator[bytes, None]:
            return run_turn(slots, stream, budget=budget, deadline=deadline)

        return run() if restore_images is None else _restoring(run, stream, restore_images)


async def _restoring(
    run: Callable[[], AsyncGenerator[bytes, None]], stream: ResumableStream, restore: Callable[[], Awaitable[None]]
) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of `run`. Restore an image that an engine misses, once without new tokens in between."""
    restored_at: int | None = None
    while True:
        try:
            async with contextlib.aclosing(run()) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        except MissingImageError as error:
            if restored_at == stream.num_tokens:
                raise
            restored_at = stream.num_tokens
            log.warning("image.restored", reason=str(error))
        await restore()


class _Slots:
    """The slots of one call (`penstock.clients.turn.SlotSource`)."""

    def __init__(self, slots: SlotPool, ticket: Ticket, budget: RetryBudget, shared_prefill: SharedPrefill) -> None:
        self._slots = slots
        self._ticket = ticket
        self._budget = budget
        self._shared_prefill = shared_prefill
        self._num_prompt_tokens = ticket.query.num_tokens
        self._num_attempts = 0

    async def take(self, num_tokens: int) -> Slot:
        if num_tokens:
            self._query.num_tokens = max(self._query.num_tokens, self._num_prompt_tokens + num_tokens)
        query = self._query
        self._num_attempts += 1
        attempt: dict[str, Any] = {"request": query.request_id, "attempt": self._num_attempts}
        if query.group_id:
            attempt["group"] = query.group_id
        with spans.recorded_unless_short("route.queued", **attempt) as about:
            slot = await self._slots.take(self._ticket)
            about["replica"] = slot.replica_id
        slot.span = AttemptSpan(about)
        if not num_tokens:
            timeout_s = self._ticket.deadline - time.monotonic()
            await self._shared_prefill.enter(slot, self._query.shared_prompt, timeout_s=timeout_s)
        return slot

    def find_larger(self, slot: Slot) -> bool:
        if slot.max_tokens == 0:
            return False
        self._query.num_tokens = slot.max_tokens + 1
        return not self._slots.is_too_long(self._query)

    def note_failure(self, slot: Slot, error: PenstockError, *, has_progressed: bool) -> None:
        self._ticket.last_error = error
        replica_id = slot.culprit.replica_id
        is_small = isinstance(error, PromptTooLongError)
        is_rejection = is_small or isinstance(error, NotReadyError | OverloadedError)
        _MOVED.labels("rejected" if is_rejection else "failed").inc()
        is_news = not is_rejection or (slot.culprit.is_first_rejection and not is_small)  # once per outage
        level = log.warning if is_news else log.debug
        level("generate.retried", request=self._query.request_id, replica_id=replica_id, error=str(error))
        self._query.excluded |= {replica_id}
        self._ticket.is_patient = self._budget.is_suspect
        if has_progressed:
            self._ticket.waited_s = 0.0

    @property
    def _query(self) -> Query:
        return self._ticket.query
