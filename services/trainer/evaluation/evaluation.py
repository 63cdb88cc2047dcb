"""One evaluation: all rows of all sets, each played once by one policy version, over the queues of a run.

Invariant: each row has exactly one outcome, even if messages are delivered twice, lost or given up.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack, suppress
from typing import Final, NamedTuple

import msgspec
import structlog

from penstock.bus.connection import Bus
from penstock.bus.image_store import ImageStore
from penstock.errors import DataError, InvalidRequestError, UnavailableError
from penstock.records import Group, GroupId
from penstock.records.codec import encode
from penstock.runtime.process import end_task
from services.trainer.data.rows.example import Example
from services.trainer.evaluation.outcome import PlayedPrompt, samples_of
from services.trainer.evaluation.sets import EvaluationSet

log = structlog.get_logger()

MAX_IN_PLAY: Final = 256
"""Most prompts that are published and not yet played: enough for every worker, few enough to store their images."""
_WAITING_SHARE: Final = 0.5
"""With held-out replicas, the prompts in play exceed what the replicas run at once by this share: some always wait for
a replica, and they take little of the workers' room from training."""
_PUBLISHES_AT_A_TIME: Final = 16
"""Prompts published concurrently: enough to hide the round trips; more would only queue up in the server."""
MAX_FAILURES_AT_FIRST: Final = 8
"""If this many first rows of a set all fail, its settings are wrong, and the other rows would fail too."""

SILENCE_S: Final = 30.0
"""Seconds without any group after which the bus is asked whether the awaited groups still exist."""

OnPlayed = Callable[[PlayedPrompt], Awaitable[None]]
"""Callback that takes a row's outcome."""
OnGroup = Callable[[str, int, Group], Awaitable[None]]
"""Callback that takes a row, by set and number, and its group while the bus still has the group's images."""


class FailureCheck:
    """Ends an evaluation if no row of a set can be played."""

    def __init__(self, played: Collection[tuple[str, int]] = ()) -> None:
        """Start with no outcomes but those of `played`: rows, by set and number, that had one without an error."""
        self._num_failed: Counter[str] = Counter()
        self._has_played = {set_name for set_name, _ in played}

    def add(self, outcome: PlayedPrompt) -> None:
        """Count an outcome.

        Raises:
            DataError: the first rows of its set all failed.
        """
        if not outcome.error:
            self._has_played.add(outcome.set_name)
        elif outcome.set_name not in self._has_played:
            self._num_failed[outcome.set_name] += 1
            if self._num_failed[outcome.set_name] >= MAX_FAILURES_AT_FIRST:
                raise DataError(
                    f"the first {MAX_FAILURES_AT_FIRST} prompts of evaluation.sets.{outcome.set_name} all failed; mend "
                    f"the set, or go on without it. The last one: {outcome.error}"
                )


class Evaluation:
    """An evaluation of one version: sends its prompts to the bus and takes its groups."""

    def __init__(
        self,
        sets: Mapping[str, EvaluationSet],
        *,
        bus: Bus,
        images: ImageStore,
        run_id: str,
        epoch: str,
        version: int,
        on_played: OnPlayed,
        has_received_all: Callable[[], Awaitable[bool]],
        silence_s: float = SILENCE_S,
        played: Collection[tuple[str, int]] = (),
        num_slots: int | None = None,
        on_group: OnGroup | None = None,
    ) -> None:
        """Evaluate on these parts.

        Args:
            sets: Sets to play.
            bus: The bus, whose queues the workers use.
            images: Stores the prompts' images.
            run_id: Unique identity of the evaluation.
            epoch: This start of the process.
            version: The only policy version that may play.
            on_played: Awaited with each row's outcome.
            has_received_all: Returns whether every group that the bus holds has been passed to `receive` or `fail`.
            silence_s: Seconds without a group after which to look for lost prompts.
            played: Rows, by set and number, that the version has already played.
            num_slots: Samples that the evaluation's replicas generate at once, 0 while it has lost them; None: it has
                all replicas.
            on_group: Awaited with each group that becomes a row's outcome, before its images are removed.
        """
        self._has_received_all = has_received_all
        self._silence_s = silence_s
        self._sent: dict[int, _Sent] = {}
        """The last attempt of each prompt, by index."""
        self._heard = asyncio.Event()
        """Set when a group arrives; cleared by `_replace_lost`."""
        self._sets = sets
        self._bus = bus
        self._images = images
        self._run_id = run_id
        self._epoch = epoch
        self._version = version
        self._on_played = on_played
        self._on_group = on_group
        rows = ((name, row) for name, each in sets.items() for row in range(len(each)))
        self._rows = [each for each in rows if each not in played]
        self._in_play: dict[int, PlayedPrompt] = {}
        """Prompts in play, without samples, by index in `_rows`."""
        self._free = asyncio.Semaphore(_max_in_play(sets, num_slots))
        self._failures = FailureCheck(played)
        self._num_left = len(self._rows)
        self._publishing = asyncio.Semaphore(_PUBLISHES_AT_A_TIME)
        """Acquired once for each prompt on its way to the bus: until it is there, a missing one is not lost."""
        self._is_done = asyncio.Event()
        self._has_ended = False

    async def run(self) -> None:
        """Publish every row as workers take them, and return when each row has an outcome.

        Once it has ended, also early, no outcome is passed on: a group that is being received has none.

        Raises:
            DataError: a row cannot be read or sent.
            SetupError: the server no longer has the queue.
        """
        replacing = asyncio.create_task(self._replace_lost())
        publishing = asyncio.create_task(self._publish_all())
        try:
            await asyncio.wait({replacing, publishing}, return_when=asyncio.FIRST_COMPLETED)
            if replacing.done():
                replacing.result()
            await publishing
        finally:
            self._has_ended = True
            await end_task(publishing)
            await end_task(replacing)

    def owns(self, group_id: GroupId) -> bool:
        """Return whether the group belongs to this evaluation."""
        return group_id.run_id == self._run_id and group_id.trainer_epoch == self._epoch

    async def receive(self, group: Group) -> None:
        """Take a group: publish a lost one again, ignore one whose row has an outcome.

        Raises:
            DataError: no row of its set can be played.
        """
        index = group.id.index
        self._heard.set()
        if not self.owns(group.id) or index not in self._in_play:
            log.info("evaluation.group_ignored", group=group.id.message)
        elif group.is_lost:
            log.warning("evaluation.group_lost", group=group.id.message, reason=group.error)
            await self._images.remove(group.id.scope)
            await self._publish(index, attempt=group.id.attempt + 1)
        elif group.error:
            await self.fail(group.id, group.error, group)
        elif {group.oldest_version, group.newest_version} != {self._version}:
            versions = f"{group.oldest_version} to {group.newest_version}"
            reason = f"it has tokens of policy versions {versions}, not only {self._version}"
            await self.fail(group.id, reason, msgspec.structs.replace(group, samples=(), error=reason))
        else:
            await self._show(group)
            played = msgspec.structs.replace(
                self._in_play.pop(index),
                samples=samples_of(group),
                versions=(group.oldest_version, group.newest_version),
            )
            await self._finish(group.id, played)

    async def fail(self, group_id: GroupId, reason: str, group: Group | None = None) -> None:
        """Give up a row that cannot be played; `group` is its group without samples, None if it cannot be read.

        Raises:
            DataError: no row of its set can be played.
        """
        if self.owns(group_id) and group_id.index in self._in_play:
            log.warning("evaluation.prompt_failed", group=group_id.message, reason=reason)
            await self._show(group or Group(id=group_id, num_samples=0, samples=(), worker_id="", error=reason))
            failed = msgspec.structs.replace(self._in_play.pop(group_id.index), error=reason)
            await self._finish(group_id, failed)

    async def _show(self, group: Group) -> None:
        if self._on_group is not None:
            await self._on_group(*self._rows[group.id.index], group)

    async def _finish(self, group_id: GroupId, outcome: PlayedPrompt) -> None:
        await self._images.remove(group_id.scope)
        if not self._has_ended:
            await self._on_played(outcome)
            self._count(outcome)

    def _count(self, outcome: PlayedPrompt) -> None:
        if self._has_ended:  # while it was written
            return
        self._failures.add(outcome)
        self._free.release()
        self._num_left -= 1
        if self._num_left == 0:
            self._is_done.set()

    async def _publish_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(len(self._rows)):
                    await self._free.acquire()
                    await self._publishing.acquire()
                    example = await self._read(index)
                    publishing = tasks.create_task(self._publish_one(index, example, attempt=0))
                    publishing.add_done_callback(lambda _: self._publishing.release())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        if self._rows:
            await self._is_done.wait()

    async def _replace_lost(self) -> None:
        """Publish again the prompts that are in neither queue. A worker stores a group before it acknowledges the
        prompt, so the server lost a group that is missing first from PROMPTS and then from GROUPS. Prompts of a
        training run are in the queue, too, so each one is looked for by itself."""
        while True:
            self._heard.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._heard.wait(), self._silence_s)
                continue
            async with AsyncExitStack() as none_on_its_way:
                for _ in range(_PUBLISHES_AT_A_TIME):
                    await none_on_its_way.enter_async_context(self._publishing)
                missing = await self._not_in_the_queue()
                if not missing or not await self._has_received_all():
                    continue
                lost = sorted(missing & self._in_play.keys())
            for index in lost:
                log.warning("evaluation.prompt_lost", index=index)
                await self._publish(index, attempt=self._sent[index].attempt + 1)

    async def _not_in_the_queue(self) -> set[int]:
        """Return the prompts in play that the queue no longer holds; none if the server does not answer."""
        missing = set[int]()
        with suppress(UnavailableError):
            for index in sorted(self._in_play):
                sent = self._sent[index]
                if not await self._bus.holds(self._bus.prompts, sent.message_id, sent.sequence):
                    missing.add(index)
        return missing

    async def _publish(self, index: int, *, attempt: int) -> None:
        async with self._publishing:
            await self._publish_one(index, await self._read(index), attempt=attempt)

    async def _read(self, index: int) -> Example:
        name, row = self._rows[index]
        return await asyncio.to_thread(self._sets[name].__getitem__, row)

    async def _publish_one(self, index: int, example: Example, *, attempt: int) -> None:
        name, row = self._rows[index]
        played = self._sets[name]
        if attempt and index not in self._in_play:
            return  # what was taken for lost has come
        group_id = GroupId(run_id=self._run_id, index=index, attempt=attempt, trainer_epoch=self._epoch)
        self._in_play[index] = played.described(row, example)
        try:
            hashes = await self._images.put_all(group_id.scope, example.images)
            prompt = played.prompt(row, example, group_id, version=self._version, images=hashes)
            stored = await self._bus.publish(self._bus.prompts, encode(prompt), message_id=group_id.message)
        except InvalidRequestError as error:
            played.refuse(row, error)
        self._sent[index] = _Sent(attempt, group_id.message, stored.sequence)


class _Sent(NamedTuple):
    attempt: int
    message_id: str
    sequence: int


def _max_in_play(sets: Mapping[str, EvaluationSet], num_slots: int | None) -> int:
    if num_slots is None:
        return MAX_IN_PLAY
    fewest = min(each.config.samples_per_prompt for each in sets.values())
    return min(MAX_IN_PLAY, max(1, math.ceil((1 + _WAITING_SHARE) * num_slots / fewest)))
