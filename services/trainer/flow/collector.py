"""The collector: finished groups, from the bus to the batch.

Invariants: a group is trained at most once (duplicates are recognised by index); no group is trained whose oldest token
is older than the bound, however it came to be so; a message leaves the bus only when a checkpoint holds what became of
its group, so that a crash brings back exactly what the surviving weights have not seen.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

from penstock.bus.consumer import Consumer, Delivery
from penstock.errors import CorruptMessageError, DataError, InvalidRequestError
from penstock.records import Group, Prompt, parse_message_id
from penstock.records.codec import decode
from services.trainer.admission.gate import Gate
from services.trainer.policy.batch import GroupReader, TrainGroup

log = structlog.get_logger()

_FETCH_LIMIT = 64
_WARN_EVERY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A group as it was played, and ready to train."""

    played: Group
    ready: TrainGroup


@dataclass(slots=True, kw_only=True)
class Collector:
    """Holds finished groups until the gate's selection takes them."""

    consumer: Consumer
    gate: Gate
    reader: GroupReader
    run_id: str
    max_failures_in_a_row: int
    """So many groups that could not be played, with none that could between them, end the run."""
    num_duplicate: int = 0
    """Groups that came again, since this trainer started."""
    num_foreign: int = 0
    """Groups of other runs that were found on the bus."""
    num_rejected_tokens: int = 0
    """The policy's own tokens in groups rejected as stale: whether long answers are the ones that are lost."""
    _held: dict[int, Finished] = field(default_factory=dict)
    _failed: dict[int, int] = field(default_factory=dict)  # index -> attempt: could not be played, not yet dropped
    _in_training: frozenset[int] = frozenset()
    _unsettled: list[tuple[int, Delivery]] = field(default_factory=list)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _caught_up: asyncio.Event = field(default_factory=asyncio.Event)
    _failures_in_a_row: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Take groups from the bus until cancelled.

        Raises:
            DataError: a group contradicts the model (the engine saw other image tokens, say), or too many in a row
                could not be played; the message holds the reason.
        """
        while True:
            deliveries = await self.consumer.fetch(_FETCH_LIMIT)
            for delivery in deliveries:
                await self._receive(delivery)
            self._arrived.set()
            if not deliveries and not self._caught_up.is_set() and await self.consumer.has_delivered_all():
                self._caught_up.set()

    async def wait_until_caught_up(self) -> None:
        """Return when all that the bus held at the start is here."""
        await self._caught_up.wait()

    def holds(self, index: int, attempt: int) -> bool:
        """Whether this group, or a later attempt at it, is here already: it need not be played again."""
        if index in self._in_training:
            return True
        finished = self._held.get(index)
        return (finished is not None and finished.ready.attempt >= attempt) or self._failed.get(index, -1) >= attempt

    async def next_batch(self, version: int, admit: Callable[[], Awaitable[object]]) -> list[Finished]:
        """Wait for the groups of the batch that trains the published `version`, and take them, in order of index.

        They must be trained before the next call. `admit` is called first, and again whenever groups were rejected or
        dropped: others are to be admitted in their place.
        """
        waited_s = 0.0
        while True:
            await admit()
            # No await from here to the choice: what arrives meanwhile could be stale.
            if self._reject_stale(version) + self._drop_failed():
                continue
            outstanding = self.gate.outstanding
            finished = {
                index: group.ready.oldest_version for index, group in self._held.items() if index in outstanding
            }
            selection = self.gate.select(finished, version)
            if selection.indices:
                self._in_training = frozenset(selection.indices)
                return [self._held.pop(index) for index in selection.indices]
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), _WARN_EVERY_S)
            except TimeoutError:
                waited_s += _WARN_EVERY_S
                log.warning("group.awaited", waited_s=waited_s, waiting_for=selection.waiting_for[:16], version=version)

    def take_unsettled(self) -> list[Delivery]:
        """The messages whose groups the state of now accounts for: ack them once a checkpoint holds that state.

        Groups that are held but not trained are in no checkpoint; their messages stay in hand.
        """
        waiting = self._held.keys() | self._failed.keys()
        settled = [delivery for index, delivery in self._unsettled if index not in waiting]
        self._unsettled = [(index, delivery) for index, delivery in self._unsettled if index in waiting]
        return settled

    async def _receive(self, delivery: Delivery) -> None:
        try:
            group = decode(delivery.payload, Group)
        except CorruptMessageError as error:
            await self._bury(delivery, str(error))
            return
        delivery.forget_payload()
        if group.prompt.run_id != self.run_id:
            self.num_foreign += 1
            await delivery.ack()
            return
        if group.error == "" and self._is_wanted(group.prompt):
            try:
                ready = await asyncio.to_thread(self.reader.read, group)
            except InvalidRequestError as error:
                raise DataError(str(error)) from None
            # Meanwhile another copy, or another attempt, may have been trained.
            if self._is_wanted(group.prompt):
                self._failures_in_a_row.clear()
                self._held[group.prompt.index] = Finished(played=group, ready=ready)
        elif group.error and self._is_wanted(group.prompt):
            self._fail(group.prompt.index, group.prompt.attempt, group.error)
        else:
            self.num_duplicate += 1
            log.info("group.duplicate_ignored", group=group.prompt.message_id)
        # Last: until now a checkpoint would have taken it for accounted for.
        self._unsettled.append((group.prompt.index, delivery))

    async def _bury(self, delivery: Delivery, reason: str) -> None:
        """Nobody can read it, but its id says which group will not come."""
        match parse_message_id(delivery.message_id):
            case (self.run_id, index, attempt) if self._is_awaited(index, attempt):
                self._fail(index, attempt, reason)
        await delivery.bury(reason)

    def _is_wanted(self, prompt: Prompt) -> bool:
        return self._is_awaited(prompt.index, prompt.attempt)

    def _is_awaited(self, index: int, attempt: int) -> bool:
        return self.gate.standing(index, attempt) != "done" and not self.holds(index, attempt)

    def _fail(self, index: int, attempt: int, reason: str) -> None:
        log.error("group.failed", index=index, attempt=attempt, reason=reason)
        self._failures_in_a_row.append(reason)
        self._failed[index] = attempt
        if len(self._failures_in_a_row) > self.max_failures_in_a_row:
            raise DataError(
                f"{len(self._failures_in_a_row)} groups in a row could not be played; the last one, number {index}: "
                f"{reason}"
            )

    def _drop_failed(self) -> int:
        dropped = [index for index in self._failed if index in self.gate.outstanding]
        for index in dropped:
            del self._failed[index]
            self.gate.dropped(index)
        return len(dropped)

    def _reject_stale(self, version: int) -> int:
        stale = [index for index in self._held if index in self.gate.outstanding and self._is_stale(index, version)]
        for index in stale:
            finished = self._held.pop(index)
            self.gate.rejected(index, finished.ready.attempt)
            num_tokens = sum(sequence.num_own_tokens for sequence in finished.ready.sequences)
            self.num_rejected_tokens += num_tokens
            staleness = version - finished.ready.oldest_version
            log.warning("group.rejected_stale", index=index, staleness=staleness, num_tokens=num_tokens)
        return len(stale)

    def _is_stale(self, index: int, version: int) -> bool:
        """Older than the bound, or of weights that were never published: nobody has those any more."""
        group = self._held[index].played
        return version - group.oldest_version > self.gate.max_staleness or group.newest_version > version
