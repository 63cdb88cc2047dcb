"""The collector: takes finished groups from the GROUPS queue to the ledger.

Invariant: a message leaves the bus only when a checkpoint holds its group's outcome, so that a crash brings back
exactly the groups that the surviving weights have not seen.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import structlog

from penstock.bus.buckets.lock import Lock
from penstock.bus.image_store import ImageStore
from penstock.bus.work_queue.consumer import Consumer, Delivery
from penstock.errors import CorruptMessageError, InvalidRequestError, MissingImageError
from penstock.names import TRAIN
from penstock.records import Group, GroupId
from penstock.records.codec import decode
from services.trainer.admission.config import FilterConfig
from services.trainer.admission.filters import FilterReason, Screening, screen
from services.trainer.admission.group_state import Arrival
from services.trainer.admission.judgement import is_judged, why_unjudged
from services.trainer.admission.ledger import GroupLedger
from services.trainer.admission.pools import RowPools, pass_rate
from services.trainer.batching.sequences import GroupReader, TrainGroup
from services.trainer.evaluation.evaluator import Evaluator
from services.trainer.flow.changes import Changes
from services.trainer.flow.crash_record import CrashRecord
from services.trainer.flow.failure_streak import FailureStreak
from services.trainer.flow.filter_tally import FilterTally
from services.trainer.telemetry.episodes.log import EpisodeLog

log = structlog.get_logger()

_FETCH_LIMIT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A group as it was played, and its form for training."""

    played: Group
    images: Mapping[str, bytes]
    """Encoded images of its samples, by content hash."""
    ready: TrainGroup
    received_at: float = field(default_factory=time.monotonic)
    """Time of `time.monotonic()`."""


@dataclass(slots=True, kw_only=True)
class Collector:
    """Reads finished groups and reports them to the ledger."""

    consumer: Consumer
    ledger: GroupLedger[Finished, Delivery]
    changes: Changes
    reader: GroupReader
    lock: Lock
    """Only its holder may acknowledge messages."""
    images: ImageStore
    run_id: str
    trainer_epoch: str
    """This start of the trainer. Groups of an earlier one that failed, or are filtered, come again until a checkpoint
    accounts for them; they do not end the run, because what made them so may be mended."""
    streak: FailureStreak
    """Ends the run when only failures and losses arrive."""
    crashes: CrashRecord
    """Records the groups that kill the trainer."""
    filters: FilterConfig
    tally: FilterTally
    """Ends the run when nearly everything is filtered."""
    temperature: float
    """At which the trainer computes log-probabilities. A group that was sampled at another one, for an earlier start of
    the run, is not taken: its prompt is published again."""
    evaluator: Evaluator | None = None
    """Takes the groups of evaluations."""
    pools: RowPools | None = None
    """Receives the pass rate of each row."""
    episodes: EpisodeLog | None = None
    """Keeps groups that are left out, for people to read."""
    on_received: Callable[[], None] = lambda: None
    """Called after each group. A failed or filtered group makes room for another."""
    num_duplicate: int = 0
    """Duplicate groups since this trainer started."""
    num_foreign: int = 0
    """Groups of other runs, or of another temperature, since this trainer started."""
    num_unreadable: int = 0
    """Unreadable groups since this trainer started. They count as failed too."""
    _evaluated: list[Delivery] = field(default_factory=list)
    """Groups of evaluations that are no longer needed, and wait for those fetched with them to be received."""
    _caught_up: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Take groups from the bus until cancelled.

        Raises:
            DataError: too many groups failed or were lost in a row; the message holds the last reason.
            SetupError: the server no longer has the groups or their images.
            SupersededError: another trainer has taken over.
        """
        while True:
            if not self._caught_up.is_set() and await self.has_everything():
                self._caught_up.set()
            for delivery in await self.consumer.fetch(_FETCH_LIMIT):
                await self._receive(delivery)
                self.changes.notify()
                self.on_received()
            if self._evaluated:
                await self._release(*self._evaluated)
                self._evaluated.clear()

    async def wait_until_caught_up(self) -> None:
        """Return when every message that the bus held at the start has been received."""
        await self._caught_up.wait()

    async def has_everything(self) -> bool:
        """Return whether the ledger knows every group that the bus holds; False if the bus does not answer."""
        return await self.consumer.has_delivered_all() and self.consumer.num_in_hand == self.ledger.num_receipts

    async def _receive(self, delivery: Delivery) -> None:
        try:
            group = decode(delivery.payload, Group)
        except CorruptMessageError as error:
            with structlog.contextvars.bound_contextvars(group=delivery.message_id):
                await self._receive_undecodable(delivery, str(error))
            return
        with structlog.contextvars.bound_contextvars(group=group.id.message):
            await self._take(delivery, group)

    async def _take(self, delivery: Delivery, group: Group) -> None:
        if group.purpose != TRAIN:
            if self.evaluator is not None:
                await self.evaluator.receive(group)
            self._evaluated.append(delivery)
            return
        index, attempt = group.id.index, group.id.attempt
        if self._is_foreign(group):
            self.num_foreign += 1
            log.info("group.foreign_ignored", temperature=group.temperature)
            await self._release(delivery)
            await self.images.remove(group.id.scope)  # no checkpoint settles the group
            return
        if not self.ledger.wants(index, attempt):
            is_of_use = False
        elif (reason := self.crashes.why_given_up(index)) is not None:
            await delivery.write_dead_letter(reason)
            untouched = msgspec.structs.replace(group, samples=(), error=reason)
            is_of_use = self._drop(untouched, reason)  # one death gives up a batch, so it adds to no streak
        elif group.is_lost:
            is_of_use = self._lose(group.id, group.error)
        elif group.error:
            is_of_use = self._fail(group, group.error)
        elif reason := why_unjudged(group):
            await delivery.write_dead_letter(reason)
            is_of_use = self._fail(group, reason)
        elif (reason := (screening := screen(group, self.filters)).reason) is not None:
            is_of_use = self._filter(group, reason, screening)
        else:
            try:
                images = await self.images.wait_for_all(group.id.scope, sorted(group.images))
                ready = await asyncio.to_thread(self._read, group, images, screening)
            except MissingImageError as error:
                is_of_use = self._lose(group.id, str(error))
            except InvalidRequestError as error:
                await self._give_up(delivery, group, str(error))
                return
            else:
                is_of_use = self._hold(group, images, ready, screening)
        if not is_of_use:
            self.num_duplicate += 1
            log.info("group.duplicate_ignored")
        delivery.forget_payload()
        self.ledger.keep_receipt(index, delivery)

    def _is_foreign(self, group: Group) -> bool:
        return group.id.run_id != self.run_id or group.temperature not in (None, self.temperature)

    async def _release(self, *deliveries: Delivery) -> None:
        """Acknowledge messages that no checkpoint accounts for; a replaced trainer would remove its successor's."""
        await self.lock.confirm()
        await asyncio.gather(*(delivery.ack() for delivery in deliveries))

    def _read(self, group: Group, images: Mapping[str, bytes], screening: Screening) -> TrainGroup:
        with self.crashes.reading(group.id.index):
            return self.reader.read(group, images).screened(screening)

    def _hold(self, group: Group, images: Mapping[str, bytes], ready: TrainGroup, screening: Screening) -> bool:
        self._end_streak(group)
        is_of_use = self.ledger.hold(
            Arrival(
                index=group.id.index,
                attempt=group.id.attempt,
                oldest_version=group.oldest_version,
                newest_version=group.newest_version,
                num_tokens=group.num_own_tokens,
                was_redelivered=group.num_deliveries > 1,
                affected=screening.affected,
                group=Finished(played=group, images=images, ready=ready),
            )
        )
        if is_of_use:
            rewards = (sample.reward for sample in group.samples)
            self.tally.keep(rewards, is_of_this_start=self._is_of_this_start(group.id))
            self._end_play(group)
        return is_of_use

    def _filter(self, group: Group, reason: FilterReason, screening: Screening) -> bool:
        """Leave a valid group out of training; its images are never fetched."""
        self._end_streak(group)
        is_of_use = self.ledger.filter_out(
            group.id.index,
            group.id.attempt,
            reason=reason,
            num_tokens=group.num_own_tokens,
            affected=screening.affected,
            was_redelivered=group.num_deliveries > 1,
        )
        if is_of_use:
            log.debug("group.filtered", reason=reason)
            self._end_play(group)
            if self.episodes is not None:
                self.episodes.keep_left_out("filtered", reason, group)
            # Last, since it may raise: the checkpoint that follows must know all that became of the group.
            rewards = (sample.reward for sample in group.samples)
            self.tally.filter_out(reason, rewards, is_of_this_start=self._is_of_this_start(group.id))
        return is_of_use

    def _end_streak(self, group: Group) -> None:
        """Count no failure in a row across a group that was judged; one that was only cut short says nothing."""
        if is_judged(group):
            self.streak.end()

    def _end_play(self, group: Group) -> None:
        if self.pools is not None:
            self.pools.end(group.id.index, pass_rate([sample.reward for sample in group.samples]))

    async def _receive_undecodable(self, delivery: Delivery, reason: str) -> None:
        """Give up the group that the message id names; bury a message that names none."""
        group_id = GroupId.parse(delivery.message_id)
        if group_id is not None and self.evaluator is not None and await self.evaluator.fail(group_id, reason):
            await delivery.write_dead_letter(reason)
            await self._release(delivery)
        elif group_id is not None and group_id.run_id == self.run_id:
            unread = Group(id=group_id, num_samples=0, samples=(), worker_id="", error=reason)
            await self._give_up(delivery, unread, reason)
        else:
            await self.lock.confirm()
            await delivery.bury(reason)

    async def _give_up(self, delivery: Delivery, group: Group, reason: str) -> None:
        """Report a group that cannot be read as failed, and keep a copy among the dead letters."""
        await delivery.write_dead_letter(reason)
        self.num_unreadable += 1
        self._fail(group, reason)
        delivery.forget_payload()
        self.ledger.keep_receipt(group.id.index, delivery)

    def _lose(self, group_id: GroupId, reason: str) -> bool:
        if not self.ledger.lose(group_id.index, group_id.attempt):
            return False
        log.warning("group.images_lost", reason=reason)
        if self._is_of_this_start(group_id):
            self.streak.lose([group_id.index], reason)
        return True

    def _fail(self, group: Group, reason: str) -> bool:
        if not self._drop(group, reason):
            return False
        if self._is_of_this_start(group.id):
            self.streak.fail(group.id.index, reason)
        return True

    def _is_of_this_start(self, group_id: GroupId) -> bool:
        return group_id.trainer_epoch == self.trainer_epoch

    def _drop(self, group: Group, reason: str) -> bool:
        if not self.ledger.fail(group.id.index, group.id.attempt):
            return False
        if self.pools is not None:
            self.pools.end(group.id.index, None)
        if self.episodes is not None:
            self.episodes.keep_left_out("failed", reason, group)
        log.error("group.failed", reason=reason)
        return True
