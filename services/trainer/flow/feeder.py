"""The feeder: publishes the examples that the ledger admits to the PROMPTS queue, beside training.

Invariant: every group that the ledger counts as admitted is on the bus, with a worker, or in hand. A restarted trainer
cannot know which, so it publishes those not in hand again, under message ids of its own epoch; the ledger recognises
groups that then arrive twice.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from penstock.bus.connection import Bus
from penstock.bus.failures import BUS_ERRORS
from penstock.bus.image_store import ImageStore
from penstock.errors import InvalidRequestError
from penstock.records import GroupId, Prompt, Sampling
from penstock.records.codec import encode
from penstock.telemetry import spans
from services.trainer.admission.filters import FilterReason
from services.trainer.admission.group_state import Admission, GroupStatus
from services.trainer.admission.ledger import GroupLedger
from services.trainer.admission.pools import Pool, Row, RowPools
from services.trainer.data.dataset import Dataset
from services.trainer.data.rows.example import Example
from services.trainer.flow.changes import Changes
from services.trainer.flow.filter_tally import FilterTally
from services.trainer.flow.row_reader import RowReader
from services.trainer.position import Position

log = structlog.get_logger()

_POOL_REASONS = {Pool.EASY: FilterReason.EASY_POOL, Pool.HARD: FilterReason.HARD_POOL}

_PUBLISHES_AT_A_TIME = 32
"""Prompts published concurrently: enough to hide the round trips; more would only queue up in the server."""


@dataclass(slots=True, kw_only=True)
class Feeder:
    """Publishes the prompts that the ledger admits. Close it after use."""

    dataset: Dataset
    ledger: GroupLedger[Any, Any]
    position: Position
    changes: Changes
    tally: FilterTally
    bus: Bus
    images: ImageStore
    sampling: Sampling
    run_id: str
    trainer_epoch: str
    """This start of the trainer."""
    samples_per_group: int
    pools: RowPools | None = None
    """Decides which rows are played less often; None: every row is played whenever it comes up."""
    admitted_at: float = field(default_factory=time.monotonic)
    """When a group was admitted last, by `time.monotonic()`; before the first one, when this was made."""
    publishing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while admitted prompts are on their way to the bus: until then a missing one is not lost."""
    num_unsent: int = 0
    """Admitted groups that are neither sent nor passed over: their rows are being read, or are on their way."""
    _wanted: asyncio.Event = field(default_factory=asyncio.Event)
    _reader: RowReader = field(init=False)

    def __post_init__(self) -> None:
        """Create what reads rows, without a thread."""
        self._reader = RowReader(self.dataset)

    def close(self) -> None:
        """Drop the reads of rows that have not begun. Blocks until the others have ended."""
        self._reader.close()

    async def run(self) -> None:
        """Admit groups whenever `wake` is called, until cancelled.

        Raises:
            DataError: a row of the data is invalid or too large to send, and `wrong_rows` is refuse.
        """
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self.admit()
            self._read_ahead()

    def wake(self) -> None:
        """Make `run` try to admit groups: replicas serve a new version, or a group made room."""
        self._wanted.set()

    async def admit(self) -> None:
        """Admit the groups that the gate allows at the newest version that is served.

        Raises:
            DataError: a row of the data is invalid or too large to send, and `wrong_rows` is refuse.
        """
        async with self.publishing:
            while self._num_admissible():
                if not (admissions := self._admit(await self._next_rows())):
                    return  # the next row is still being played
                self.changes.notify()  # one of them may have been in hand before it was admitted
                await self._publish(
                    [each for each in admissions if self.ledger.status(each.index) is GroupStatus.ADMITTED]
                )
                self.changes.notify()  # who waited for prompts now waits for groups

    async def _next_rows(self) -> list[Row]:
        """Return the rows of the most groups that the gate can admit, if there are pools."""
        if self.pools is None:
            return []
        first = self.ledger.next_index
        return await self._reader.rows_at(range(first, first + self.ledger.gate.capacity))

    def _read_ahead(self) -> None:
        """Read the rows for which the next step makes room. With pools it is not known beforehand which ones are
        played."""
        if self.pools is None:
            num_per_step, first = self.ledger.gate.groups_per_step, self.ledger.next_index
            num_left = self.position.num_steps_left * num_per_step - self.ledger.num_untrained
            self._reader.read_ahead(range(first, first + min(num_per_step, num_left)), on_read=self.wake)

    def _admit(self, rows: Sequence[Row]) -> list[Admission]:
        """Admit the groups that the gate allows, up to the first group whose row is still being played.

        Args:
            rows: Rows of the next groups, if there are pools.
        """
        version, first = self._admission_version(), self.ledger.next_index
        admissions = []
        for _ in range(self._num_admissible()):
            row = None
            if self.pools is not None and not self.ledger.has_rejected:
                row = rows[self.ledger.next_index - first]
                if self.pools.is_in_play(row):
                    break
            admissions.append(self.ledger.admit(version))
            if row is not None:
                self._draw(admissions[-1], row)
        if admissions:
            self.admitted_at = time.monotonic()
        return admissions

    def _draw(self, admission: Admission, row: Row) -> None:
        assert self.pools is not None
        is_in_hand = self.ledger.status(admission.index) is not GroupStatus.ADMITTED
        pool = self.pools.draw(admission.index, row, is_in_hand=is_in_hand)
        if pool is not None:
            self.ledger.filter_out(admission.index, admission.attempt, reason=_POOL_REASONS[pool])

    async def publish_again(self) -> None:
        """After a restart, publish every admitted group that is not in hand, replacing the contents of the queue.

        They are admitted at the current version, because none of their tokens will be older.
        """
        async with self.publishing:
            await self.bus.purge(self.bus.prompts)
            await self._publish(self.ledger.renew_unplayed(self._admission_version()))

    async def replace_lost(self) -> None:
        """Admit again every group that is not in hand; see `GroupLedger.readmit_lost`. Call it holding `publishing`."""
        admissions = self.ledger.readmit_lost(self._admission_version())
        for admission in admissions:
            log.warning("group.lost", index=admission.index, next_attempt=admission.attempt)
        await self._publish(admissions)

    async def has_prompts(self) -> bool:
        """Return whether the queue holds prompts, delivered to a worker or not; True if the server does not answer."""
        try:
            info = await self.bus.jetstream.stream_info(self.bus.prompts.name)
        except BUS_ERRORS:
            return True
        return info.state.messages > 0

    def _num_admissible(self) -> int:
        if self.position.admission_version is None:
            return 0
        return self.ledger.num_admissible(self.position.num_steps_left, num_steps_ahead=self.position.num_steps_ahead)

    def _admission_version(self) -> int:
        version = self.position.admission_version
        assert version is not None, "nothing is admitted before the first announcement"
        return version

    async def _publish(self, admissions: Sequence[Admission]) -> None:
        slots = asyncio.Semaphore(_PUBLISHES_AT_A_TIME)

        def end(_: asyncio.Task[None]) -> None:
            self.num_unsent -= 1
            slots.release()

        self.num_unsent = len(admissions)
        try:
            async with asyncio.TaskGroup() as tasks:
                for admission in admissions:
                    await slots.acquire()
                    tasks.create_task(self._publish_one(admission)).add_done_callback(end)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self.num_unsent = 0

    async def _publish_one(self, admission: Admission) -> None:
        began = time.monotonic()
        example = await self._reader.read(admission.index)
        if isinstance(example, FilterReason):
            self._pass_over(admission, example)
            return
        group_id = GroupId(
            run_id=self.run_id,
            index=admission.index,
            attempt=admission.attempt,
            trainer_epoch=self.trainer_epoch,
        )
        try:
            prompt = Prompt(
                id=group_id,
                admitted_version=admission.version,
                num_samples=self.samples_per_group,
                sampling=self._sampling(example),
                messages=example.messages,
                tools=example.tools,
                chat_template_kwargs=dict(example.chat_template_kwargs),
                images=await self.images.put_all(group_id.scope, example.images),
                golds=example.golds,
                profile=example.profile,
                environment=example.environment,
                limits=example.limits,
                extra=dict(example.extra),
            )
            await self.bus.publish(self.bus.prompts, encode(prompt), message_id=group_id.message)
            spans.record("group.admitted", began, group=group_id.message, version=admission.version)
        except InvalidRequestError as error:
            self._pass_over(admission, self.dataset.drop_unsendable(admission.index, error))
            await self.images.remove(group_id.scope)  # nobody settles the group
            return
        log.debug("prompt.admitted", group=group_id.group, attempt=group_id.attempt)

    def _sampling(self, example: Example) -> Sampling:
        if example.max_new_tokens is None:
            return self.sampling
        if example.max_new_tokens > self.sampling.max_new_tokens:
            raise InvalidRequestError(
                f"its max_new_tokens = {example.max_new_tokens} is above sampling.max_new_tokens = "
                f"{self.sampling.max_new_tokens}; raise the setting or lower the row's"
            )
        return msgspec.structs.replace(self.sampling, max_new_tokens=example.max_new_tokens)

    def _pass_over(self, admission: Admission, reason: FilterReason) -> None:
        """Filter a group whose row cannot be played, which makes room for the next one."""
        if self.ledger.filter_out(admission.index, admission.attempt, reason=reason):
            log.info("prompt.passed_over", index=admission.index, reason=reason)
            if self.pools is not None:
                self.pools.pass_over(admission.index)
            self.changes.notify()
            self.tally.filter_out(reason)  # last, since it may raise, and a checkpoint follows
