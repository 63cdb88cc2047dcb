"""The feeder: dataset rows, through the gate, to the PROMPTS queue.

Invariant: every group that the gate counts as outstanding is on the bus, in a worker's hands, or finished. A trainer
that starts again cannot know which, so it puts all of them back under ids of its own; the collector recognises what
comes twice.
"""

import asyncio
from dataclasses import dataclass

import structlog

from penstock.bus.connection import Bus
from penstock.errors import DataError, InvalidRequestError
from penstock.records import Prompt
from penstock.records.codec import encode
from services.trainer.admission.gate import Admission, Gate
from services.trainer.data.dataset import Dataset
from services.trainer.flow.collector import Collector

log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class Feeder:
    """Admits prompt groups as far as the gate allows."""

    dataset: Dataset
    gate: Gate
    collector: Collector
    bus: Bus
    run_id: str
    incarnation: str
    """This start of the trainer."""
    samples_per_group: int
    profile: str
    environment: str

    async def admit(self, version: int, *, num_steps_left: int) -> int:
        """Admit what the gate allows at the published `version` and return how many groups that was."""
        count = self.gate.num_admissible(num_steps_left)
        for _ in range(count):
            admission = self.gate.admit(version)
            # A trainer that died after its last checkpoint may have had this group played already.
            if not self.collector.holds(admission.index, admission.attempt):
                await self._publish(admission)
        return count

    async def readmit(self) -> None:
        """After a restart: put every outstanding group on the bus that is not finished, in place of what is there."""
        await self.bus.purge(self.bus.prompts)
        for admission in list(self.gate.outstanding.values()):
            if not self.collector.holds(admission.index, admission.attempt):
                await self._publish(admission)

    async def _publish(self, admission: Admission) -> None:
        row = await asyncio.to_thread(self.dataset.__getitem__, admission.index)
        prompt = Prompt(
            run_id=self.run_id,
            index=admission.index,
            attempt=admission.attempt,
            incarnation=self.incarnation,
            admitted_version=admission.version,
            num_samples=self.samples_per_group,
            messages=row.messages,
            images=row.images,
            golds=row.golds,
            profile=self.profile,
            environment=self.environment,
        )
        try:
            await self.bus.publish(self.bus.prompts, encode(prompt), message_id=prompt.message_id)
        except InvalidRequestError as error:
            raise DataError(f"the row at position {admission.index} of the data cannot be sent: {error}") from None
        log.debug("prompt.admitted", group=prompt.group_id, attempt=prompt.attempt)
