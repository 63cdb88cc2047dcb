"""The collector: finished groups from the GROUPS queue to the ledger.

Invariant: a message leaves the bus only when a checkpoint holds what became of its group, so that a crash brings back
exactly what the surviving weights have not seen.
"""

import asyncio
from dataclasses import dataclass, field

import structlog

from penstock.bus.consumer import Consumer, Delivery
from penstock.errors import CorruptMessageError, DataError, InvalidRequestError
from penstock.records import Group, parse_message_id
from penstock.records.codec import decode
from services.trainer.admission.ledger import Arrival, GroupLedger, GroupStatus
from services.trainer.policy.batch import GroupReader, TrainGroup

log = structlog.get_logger()

_FETCH_LIMIT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A group as it was played, and ready to train."""

    played: Group
    ready: TrainGroup


@dataclass(slots=True, kw_only=True)
class Collector:
    """Reads finished groups and reports them to the ledger."""

    consumer: Consumer
    ledger: GroupLedger[Finished, Delivery]
    reader: GroupReader
    run_id: str
    max_failures_in_a_row: int
    """More failed groups than this, with no sound one between them, end the run."""
    num_duplicate: int = 0
    """Copies of groups, since this trainer started."""
    num_foreign: int = 0
    """Groups of other runs, since this trainer started."""
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _caught_up: asyncio.Event = field(default_factory=asyncio.Event)
    _num_failures_in_a_row: int = 0

    async def run(self) -> None:
        """Take groups from the bus until cancelled.

        Raises:
            DataError: too many groups in a row failed; the message holds the last reason.
        """
        while True:
            deliveries = await self.consumer.fetch(_FETCH_LIMIT)
            for delivery in deliveries:
                await self._receive(delivery)
                self._arrived.set()
            if not deliveries and not self._caught_up.is_set() and await self.consumer.has_delivered_all():
                self._caught_up.set()

    async def wait_until_caught_up(self) -> None:
        """Return when everything that the bus held at the start is here."""
        await self._caught_up.wait()

    async def arrival(self, timeout_s: float) -> bool:
        """Wait for the next group, whatever becomes of it; return False if none arrives in time."""
        self._arrived.clear()
        try:
            await asyncio.wait_for(self._arrived.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

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
        if not await self._report(group):
            self.num_duplicate += 1
            log.info("group.duplicate_ignored", group=group.prompt.message_id)
        self.ledger.keep_receipt(group.prompt.index, delivery)

    async def _report(self, group: Group) -> bool:
        """Report a group to the ledger; return False if it is of no use."""
        index, attempt = group.prompt.index, group.prompt.attempt
        if not self.ledger.wants(index, attempt):
            return False
        if group.error:
            return self._fail(index, attempt, group.error)
        try:
            ready = await asyncio.to_thread(self.reader.read, group)
        except InvalidRequestError as error:
            raise DataError(str(error)) from None
        self._num_failures_in_a_row = 0
        return self.ledger.hold(
            Arrival(
                index=index,
                attempt=attempt,
                oldest_version=group.oldest_version,
                newest_version=group.newest_version,
                num_tokens=sum(sequence.num_own_tokens for sequence in ready.sequences),
                group=Finished(played=group, ready=ready),
            )
        )

    async def _bury(self, delivery: Delivery, reason: str) -> None:
        """Bury a message that nobody can read; its id still names the group that will not arrive."""
        match parse_message_id(delivery.message_id):
            case (self.run_id, index, attempt):
                self._fail(index, attempt, reason)
        await delivery.bury(reason)

    def _fail(self, index: int, attempt: int, reason: str) -> bool:
        if not self.ledger.drop(index, attempt, GroupStatus.FAILED):
            return False
        log.error("group.failed", index=index, attempt=attempt, reason=reason)
        self._num_failures_in_a_row += 1
        if self._num_failures_in_a_row > self.max_failures_in_a_row:
            raise DataError(
                f"{self._num_failures_in_a_row} groups in a row failed, more than trainer.max_failures_in_a_row = "
                f"{self.max_failures_in_a_row}; the last one, number {index}: {reason}"
            )
        return True
