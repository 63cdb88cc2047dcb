"""Supplies the groups of a step as they arrive: rejects stale ones, and takes those that the ledger's selection allows.

Invariants: there is no await between the staleness check and the choice of groups, so that no group can arrive in
between and be trained unchecked; a group that is waited for exists.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from penstock.bus.work_queue.consumer import Delivery
from services.trainer.admission.ledger import GroupLedger
from services.trainer.flow.changes import Changes
from services.trainer.flow.collector import Collector, Finished
from services.trainer.flow.failure_streak import FailureStreak
from services.trainer.flow.feeder import Feeder
from services.trainer.position import Position
from services.trainer.telemetry.episodes.log import EpisodeLog
from services.trainer.telemetry.step_metrics import StepClock

log = structlog.get_logger()

_SILENCE_S = 30.0
"""Seconds without any group, while waiting for a batch, after which the bus is asked whether the awaited groups still
exist. Asking is cheap and the answer is certain, so this only bounds the cost of a loss."""


_MAX_CHUNKS = 8
"""Most chunks of a batch. Each costs separate rows and another sum of all gradients: 32 groups of the demo take 0.22 s
of processor time in one chunk, 0.36 s in eight and 0.68 s in 32. With eight, at most an eighth of the batch is left to
compute when its last group arrives, if the others came early enough."""


@dataclass(slots=True, kw_only=True)
class BatchSource:
    """Supplies the groups of a run's batches, one batch at a time."""

    ledger: GroupLedger[Finished, Delivery]
    feeder: Feeder
    collector: Collector
    changes: Changes
    position: Position
    streak: FailureStreak
    streams: bool
    """Whether to supply the groups of a batch as they arrive, rather than together when the batch is complete."""
    pass_tokens: int = 0
    """Tokens of a forward pass, enough to be worth computing at once; all sequences of the groups count."""
    pads_passes: bool = False
    """Whether every forward pass takes as long as a full one, so that a smaller one is not worth computing."""
    silence_s: float = _SILENCE_S
    episodes: EpisodeLog | None = None
    """Keeps stale groups, for people to read."""

    async def next_chunk(self, clock: StepClock) -> list[Finished]:
        """Wait for groups of the batch that trains the weights of `position.version`, and take them, in order of index.

        With `streams`, take all groups that have arrived once they are worth computing (`is_chunk`) or complete the
        batch; otherwise take the whole batch. Report `finish_training` or `abort_training` to the ledger before the
        next batch.

        Args:
            clock: Measures the wait and its cause.

        Raises:
            DataError: an awaited group was lost too often.
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
        sequences = (sequence for finished in self.ledger.held(indices) for sequence in finished.ready.sequences)
        groups_per_step = self.ledger.gate.groups_per_step
        return is_chunk(
            len(indices),
            sum(map(len, sequences)),
            num_missing=groups_per_step - self.ledger.num_committed,
            groups_per_step=groups_per_step,
            pass_tokens=self.pass_tokens,
            pads_passes=self.pads_passes,
        )

    def _missing(self) -> str:
        """Return the metric of the wait's cause: groups in play, a push, or missing prompts."""
        groups_per_step = self.ledger.gate.groups_per_step
        if self.ledger.num_untrained - self.feeder.num_unsent >= groups_per_step:
            return "wait_s"
        if self.ledger.num_untrained < groups_per_step and self.position.num_steps_ahead:
            return "push_wait_s"
        return "data_wait_s"

    async def _exists(self) -> bool:
        """Return whether groups that are not in hand may still exist; True if the bus does not answer.

        A worker stores a group before it acks the prompt. So a group that is missing first from PROMPTS and then from
        GROUPS no longer exists: the server acknowledged it and then lost it, for example because its host died.
        """
        return await self.feeder.has_prompts() or not await self.collector.has_everything()

    def _reject_stale(self, version: int) -> None:
        for stale in self.ledger.reject_stale(version):
            log.warning(
                "group.rejected_stale",
                group=stale.group.played.id.message,
                staleness=version - stale.oldest_version,
                num_tokens=stale.num_tokens,
            )
            if self.episodes is not None:
                staleness = version - stale.oldest_version
                reason = f"{staleness} versions old, {self.ledger.gate.max_staleness} allowed"
                self.episodes.keep_left_out("stale", reason, stale.group.played, stale.group.images)


def is_chunk(
    num_groups: int,
    num_tokens: int,
    *,
    num_missing: int,
    groups_per_step: int,
    pass_tokens: int,
    pads_passes: bool = False,
) -> bool:
    """Return whether groups are worth computing before their batch is complete.

    They are if they are at least an eighth of the batch and fill a forward pass. In a batch of more than one pass, half
    of the groups that it lacks are enough in place of a full pass. Groups computed early would have to be computed
    anyway, so a chunk delays the batch only by its overhead. So it is enough to keep chunks few: a batch of two passes
    comes in four chunks, each half of the rest.

    Args:
        num_groups: Groups that can be committed now.
        num_tokens: Tokens of all their sequences.
        num_missing: Groups that the batch still lacks.
        groups_per_step: Size of a batch; all its groups are assumed to be as long as these.
        pass_tokens: Tokens of a forward pass.
        pads_passes: Whether every forward pass takes as long as a full one, so that a smaller one is not worth
            computing.
    """
    if num_groups < -(-groups_per_step // _MAX_CHUNKS):
        return False
    if num_tokens >= pass_tokens:
        return True
    fits_one_pass = num_tokens * groups_per_step <= pass_tokens * num_groups
    return not (pads_passes or fits_one_pass) and 2 * num_groups >= num_missing
