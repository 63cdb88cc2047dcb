"""The groups of a step, as they come: reject what is stale, and take what the ledger's selection allows.

Invariants: the checks for staleness and the choice of groups happen without an await between them, so that no group can
arrive in between and be trained unchecked; a group that is waited for exists.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from penstock.bus.consumer import Delivery
from services.trainer.admission.ledger import GroupLedger
from services.trainer.flow.changes import Changes
from services.trainer.flow.collector import Collector, Finished
from services.trainer.flow.failure_streak import FailureStreak
from services.trainer.flow.feeder import Feeder
from services.trainer.position import Position
from services.trainer.telemetry.step_metrics import StepClock

log = structlog.get_logger()

_SILENCE_S = 30.0
"""Seconds without any group, while a batch is waited for, after which the bus is asked whether what is awaited still
exists. Asking is cheap, and the answer is certain, so this only bounds what a loss costs."""


_MAX_CHUNKS = 8
"""Chunks of a batch, at most. Each costs rows of its own and another sum of all gradients: 32 groups of the demo take
0.22 s of processor time in one chunk, 0.36 s in eight and 0.68 s in 32. With eight, an eighth of the batch is left to
compute when its last group arrives."""


@dataclass(slots=True, kw_only=True)
class BatchSource:
    """Gives the groups of a run's batches, one batch after the other."""

    ledger: GroupLedger[Finished, Delivery]
    feeder: Feeder
    collector: Collector
    changes: Changes
    position: Position
    streak: FailureStreak
    streams: bool
    """Give the groups of a batch as they come, or all together when the batch is complete."""
    min_chunk_tokens: int = 0
    """Fewest tokens of a chunk, all sequences of its groups together; a smaller one would be a forward pass of its own
    that could have been part of the next."""
    silence_s: float = _SILENCE_S

    async def next_chunk(self, clock: StepClock) -> list[Finished]:
        """Wait for groups of the batch that trains the weights of `position.version`, and take them, in order of index.

        With `streams` these are all that are there, not fewer than an eighth of the batch and `min_chunk_tokens` unless
        they complete it; else they are the whole batch. Report `finish_training` or
        `abort_training` to the ledger before the next batch.

        Args:
            clock: Measures the wait, and what it was for.

        Raises:
            DataError: a group that is waited for was lost too often.
        """
        version, waited_s = self.position.version, 0.0
        while True:
            self._reject_stale(version)
            self.feeder.wake()
            selection = self.ledger.select(version)
            if selection.is_complete or (self.streams and self._is_chunk(selection.indices)):
                return self.ledger.commit(selection.indices)
            missing = self._missing()
            has_changed = await self.changes.wait(self.silence_s)
            clock.lap(missing)
            if has_changed:
                waited_s = 0.0
                continue
            waited_s += self.silence_s
            log.warning("group.awaited", waited_s=waited_s, indices=selection.waiting_for[:16])
            async with self.feeder.publishing:
                if not await self._exists():
                    self.streak.lose(selection.waiting_for, "the bus holds neither its prompt nor the finished group")
                    await self.feeder.replace_lost()

    def _is_chunk(self, indices: Sequence[int]) -> bool:
        """Return whether these groups are worth computing before the batch is complete."""
        if len(indices) < -(-self.ledger.gate.groups_per_step // _MAX_CHUNKS):
            return False
        sequences = (sequence for finished in self.ledger.held(indices) for sequence in finished.ready.sequences)
        return not self.min_chunk_tokens or sum(map(len, sequences)) >= self.min_chunk_tokens

    def _missing(self) -> str:
        """Return the metric for what keeps the batch from being full: groups in play, a push, or prompts."""
        if self.ledger.num_untrained >= self.ledger.gate.groups_per_step:
            return "wait_s"
        return "push_wait_s" if self.position.num_steps_ahead else "data_wait_s"

    async def _exists(self) -> bool:
        """Return whether a group that is not in hand is anywhere; True if the bus does not answer.

        A worker stores a group before it acks the prompt. So a group that is in neither queue, if PROMPTS is looked at
        first, is nowhere: the server acknowledged it and then lost it, as when its host dies.
        """
        return await self.feeder.has_prompts() or not await self.collector.has_everything()

    def _reject_stale(self, version: int) -> None:
        for stale in self.ledger.reject_stale(version):
            log.warning(
                "group.rejected_stale",
                index=stale.index,
                attempt=stale.attempt,
                staleness=version - stale.oldest_version,
                num_tokens=stale.num_tokens,
            )
