"""The feeder: examples of the data set, as far as the ledger admits them, to the PROMPTS queue.

Invariant: every group that the ledger counts as admitted is on the bus, with a worker, or in hand. A trainer that
starts again cannot know which, so it publishes those not in hand again, under message ids of its own epoch; the ledger
recognises what then arrives twice.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import structlog

from penstock.bus.connection import Bus
from penstock.bus.failures import BUS_ERRORS
from penstock.bus.image_store import ImageStore
from penstock.errors import DataError, InvalidRequestError
from penstock.records import GroupId, Prompt, Sampling
from penstock.records.codec import encode
from services.trainer.admission.ledger import Admission, GroupLedger, GroupStatus
from services.trainer.data.dataset import Dataset

log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class Feeder:
    """Publishes the prompts that the ledger admits."""

    dataset: Dataset
    ledger: GroupLedger[Any, Any]
    bus: Bus
    images: ImageStore
    sampling: Sampling
    run_id: str
    trainer_epoch: str
    """This start of the trainer."""
    samples_per_group: int
    profile: str
    environment: str

    async def admit(self, version: int, *, num_steps_left: int) -> None:
        """Admit what the gate allows at the published `version`.

        Raises:
            DataError: a row of the data is wrong, or too large to send.
        """
        while self.ledger.num_admissible(num_steps_left):
            admission = self.ledger.admit(version)
            if self.ledger.status(admission.index) is GroupStatus.ADMITTED:
                await self._publish(admission)

    async def publish_again(self) -> None:
        """After a restart: publish every admitted group that is not in hand, in place of what the queue holds."""
        await self.bus.purge(self.bus.prompts)
        for admission in self.ledger.unplayed():
            await self._publish(admission)

    async def replace_lost(self, version: int) -> None:
        """Admit every group again that is not in hand; see `GroupLedger.readmit_lost`."""
        for admission in self.ledger.readmit_lost(version):
            log.warning("group.lost", index=admission.index, next_attempt=admission.attempt)
            await self._publish(admission)

    async def has_prompts(self) -> bool:
        """Return whether the queue holds prompts, with a worker or not; True if the server does not answer."""
        try:
            info = await self.bus.jetstream.stream_info(self.bus.prompts.name)
        except BUS_ERRORS:
            return True
        return info.state.messages > 0

    async def _publish(self, admission: Admission) -> None:
        example = await asyncio.to_thread(self.dataset.__getitem__, admission.index)
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
                sampling=self.sampling,
                messages=example.messages,
                images=tuple([await self.images.put(group_id.scope, image) for image in example.images]),
                golds=example.golds,
                profile=self.profile,
                environment=self.environment,
            )
            await self.bus.publish(self.bus.prompts, encode(prompt), message_id=group_id.message)
        except InvalidRequestError as error:
            raise DataError(f"the row at position {admission.index} of the data cannot be sent: {error}") from None
        log.debug("prompt.admitted", group=group_id.group, attempt=group_id.attempt)
