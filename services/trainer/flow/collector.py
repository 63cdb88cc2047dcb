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
from penstock.codec import decode
from penstock.errors import CorruptMessageError, DataError, InvalidRequestError
from penstock.records import Group
from services.trainer.flow.gate import Gate
from services.trainer.policy.batch import GroupReader, TrainGroup

log = structlog.get_logger()

_FETCH_LIMIT = 64
_WARN_EVERY_S = 30.0


@dataclass(slots=True, kw_only=True)
class Counts:
    """What arrived and was not trained, over the run."""

    num_stale: int = 0
    num_duplicate: int = 0
    num_failed: int = 0
    num_foreign: int = 0


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
    counts: Counts = field(default_factory=Counts)
    _held: dict[int, Finished] = field(default_factory=dict)
    _failed: dict[int, int] = field(default_factory=dict)  # index -> attempt: could not be played, not yet dropped
    _unsettled: list[tuple[int, Delivery]] = field(default_factory=list)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _failures_in_a_row: list[str] = field(default_factory=list)

    async def run(self) -> None:
        """Take groups from the bus until cancelled.

        Raises:
            DataError: a group contradicts the model (the engine saw other image tokens, say), or too many in a row
                could not be played; the message holds the reason.
        """
        while True:
            for delivery in await self.consumer.fetch(_FETCH_LIMIT):
                await self._receive(delivery)
            self._arrived.set()

    def holds(self, index: int, attempt: int) -> bool:
        """Whether this group, or a later attempt at it, is here already: it need not be played again."""
        finished = self._held.get(index)
        return (finished is not None and finished.ready.attempt >= attempt) or self._failed.get(index, -1) >= attempt

    async def next_batch(self, version: int, admit: Callable[[], Awaitable[object]]) -> list[Finished]:
        """Wait for the groups of the batch that trains the published `version`, and take them, in order of index.

        `admit` is called whenever groups may have been rejected or dropped: others are to be admitted in their place.
        """
        waited_s = 0.0
        while True:
            self._reject_stale(version)
            self._drop_failed()
            await admit()
            outstanding = self.gate.outstanding
            finished = {
                index: group.ready.oldest_version for index, group in self._held.items() if index in outstanding
            }
            selection = self.gate.select(finished, version)
            if selection.indices:
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
            await delivery.bury(str(error))
            return
        delivery.forget_payload()
        prompt = group.prompt
        if prompt.run_id != self.run_id:
            self.counts.num_foreign += 1
            await delivery.ack()
            return
        self._unsettled.append((prompt.index, delivery))
        standing = self.gate.standing(prompt.index, prompt.attempt)
        if standing == "done" or self.holds(prompt.index, prompt.attempt):
            self.counts.num_duplicate += 1
            log.info("group.duplicate_ignored", group=prompt.group_id, attempt=prompt.attempt)
        elif group.error:
            self._fail(group)
        else:
            self._failures_in_a_row.clear()
            try:
                ready = await asyncio.to_thread(self.reader.read, group)
            except InvalidRequestError as error:
                raise DataError(str(error)) from None
            self._held[prompt.index] = Finished(played=group, ready=ready)

    def _fail(self, group: Group) -> None:
        log.error("group.failed", group=group.prompt.group_id, reason=group.error)
        self.counts.num_failed += 1
        self._failures_in_a_row.append(group.error)
        self._failed[group.prompt.index] = group.prompt.attempt
        if len(self._failures_in_a_row) > self.max_failures_in_a_row:
            raise DataError(
                f"{len(self._failures_in_a_row)} groups in a row could not be played; the last one, "
                f"{group.prompt.group_id}: {group.error}"
            )

    def _drop_failed(self) -> None:
        for index in [index for index in self._failed if index in self.gate.outstanding]:
            del self._failed[index]
            self.gate.dropped(index)

    def _reject_stale(self, version: int) -> None:
        for index in [index for index in self._held if index in self.gate.outstanding]:
            group = self._held[index].ready
            staleness = version - group.oldest_version
            if staleness > self.gate.max_staleness:
                del self._held[index]
                self.gate.rejected(index, group.attempt)
                self.counts.num_stale += 1
                num_tokens = sum(sequence.num_own_tokens for sequence in group.sequences)
                log.warning("group.rejected_stale", index=index, staleness=staleness, num_tokens=num_tokens)
