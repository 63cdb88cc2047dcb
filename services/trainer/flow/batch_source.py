"""The next batch: admit, reject what is stale, and wait until the ledger's selection is in hand.

Invariant: the checks for staleness and the choice of the batch happen without an await between them, so that no group
can arrive in between and be trained unchecked.
"""

from dataclasses import dataclass

import structlog

from penstock.bus.consumer import Delivery
from services.trainer.admission.ledger import GroupLedger
from services.trainer.flow.collector import Collector, Finished
from services.trainer.flow.feeder import Feeder

log = structlog.get_logger()

_WARN_AFTER_S = 30.0
"""Seconds without any group, while a batch is waited for, that are worth a warning."""


@dataclass(slots=True, kw_only=True)
class BatchSource:
    """Gives the batches of a run, one after the other."""

    ledger: GroupLedger[Finished, Delivery]
    feeder: Feeder
    collector: Collector

    async def next(self, version: int, *, num_steps_left: int) -> list[Finished]:
        """Wait for the batch that trains the published `version`, and take it, in order of index.

        Report `finish_training` to the ledger before the next call.
        """
        waited_s = 0.0
        while True:
            await self.feeder.admit(version, num_steps_left=num_steps_left)
            self._reject_stale(version)
            if self.ledger.num_admissible(num_steps_left):
                continue
            selection = self.ledger.select(version)
            if selection.indices:
                return self.ledger.start_training(selection.indices)
            if await self.collector.arrival(_WARN_AFTER_S):
                waited_s = 0.0
            else:
                waited_s += _WARN_AFTER_S
                log.warning("group.awaited", waited_s=waited_s, indices=selection.waiting_for[:16])

    def _reject_stale(self, version: int) -> None:
        for stale in self.ledger.reject_stale(version):
            log.warning(
                "group.rejected_stale",
                index=stale.index,
                attempt=stale.attempt,
                staleness=version - stale.oldest_version,
                num_tokens=stale.num_tokens,
            )
