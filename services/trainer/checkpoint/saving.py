"""Saves the state of one moment beside the run, and then lets go of the messages that it accounts for.

Invariants: weights, ledger and step are of one moment; messages are acknowledged only after the checkpoint is on disk,
and only by the trainer that holds the lock.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import structlog

from penstock.bus.buckets.lock import Lock
from penstock.bus.image_store import ImageStore
from penstock.bus.work_queue.consumer import Delivery
from penstock.records import GroupId
from services.trainer.admission.group_state import LedgerCheckpoint
from services.trainer.admission.ledger import GroupLedger
from services.trainer.admission.pools import RowPools
from services.trainer.backend.base import TrainBackend
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.flow.collector import Finished
from services.trainer.position import Position
from services.trainer.publication import Publication
from services.trainer.sft.batches import BatchesAhead
from services.trainer.telemetry.progress import Progress

log = structlog.get_logger()

_ACKS_AT_A_TIME = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The controller's state at the moment of a checkpoint; the weights are the backend's."""

    step: int
    version: int
    ledger: LedgerCheckpoint
    pools: Mapping[str, Any] | None
    """State of the row pools; None where there are none."""
    demonstration_position: int
    """At which the demonstrations of the next step begin; 0 where there are none."""
    metrics: Mapping[str, Any]
    """The step's metrics, for a `MetricsLog` that may not have them yet; empty if it has."""


@dataclass(slots=True, kw_only=True)
class CheckpointSaver:
    """Saves checkpoints of a run."""

    store: CheckpointStore
    base_model: Path
    """Folder of the model that the run began with; every checkpoint names it."""
    backend: TrainBackend
    ledger: GroupLedger[Finished, Delivery]
    pools: RowPools | None
    lock: Lock
    """Only its holder may write and acknowledge."""
    images: ImageStore
    publication: Publication
    progress: Progress
    saved_version: int | None
    """The policy version in the newest checkpoint; None in a new run."""
    demonstrations: BatchesAhead | None = None
    """None where steps learn none."""
    write_s: float | None = None
    """Seconds that writing the newest checkpoint took; None before the first of this process."""

    def moment(self, position: Position, metrics: Mapping[str, Any] = MappingProxyType({})) -> Moment:
        """Return this moment, between two steps; `metrics` are those of the last one, if they are not logged yet.

        Raises:
            ValueError: a batch is being trained.
        """
        return Moment(
            step=position.step,
            version=position.version,
            ledger=self.ledger.checkpoint(),
            pools=None if self.pools is None else self.pools.state(),
            demonstration_position=0 if self.demonstrations is None else self.demonstrations.position,
            metrics=metrics,
        )

    async def write(self, moment: Moment, *, on_copied: Callable[[], None] | None = None) -> None:
        """Write the checkpoint of `moment`.

        Args:
            moment: Of the weights as they are.
            on_copied: Called when the weights may change, which may be before this returns; None: they will not.

        Raises:
            SupersededError: another trainer has taken over; nothing was written.
        """
        await self.lock.confirm()  # the folder may be a successor's by now
        state: dict[str, Any] = {
            "run_id": self.progress.run_id,
            "step": moment.step,
            "version": moment.version,
            "base_model": str(self.base_model),
            "ledger": moment.ledger.state,
            "pools": moment.pools,
            "demonstration_position": moment.demonstration_position,
            "metrics": dict(moment.metrics),
        }
        started = time.monotonic()
        call_here = asyncio.get_running_loop().call_soon_threadsafe
        save = partial(self.backend.save, on_copied=None if on_copied is None else partial(call_here, on_copied))
        await asyncio.to_thread(self.store.save, moment.step, state, save)
        self.write_s = time.monotonic() - started
        log.info("checkpoint.saved", step=moment.step, elapsed_s=round(self.write_s, 3))

    async def settle(self, moment: Moment) -> None:
        """Acknowledge what the checkpoint of `moment`, now on disk, accounts for, and announce it.

        Raises:
            SupersededError: another trainer has taken over.
        """
        await self.lock.confirm()
        settled = self.ledger.settle(moment.ledger)
        for first in range(0, len(settled), _ACKS_AT_A_TIME):
            await asyncio.gather(*(self._release(delivery) for delivery in settled[first : first + _ACKS_AT_A_TIME]))
        self.progress.checkpoint_step, self.saved_version = moment.step, moment.version
        await self.publication.announce_checkpoint()
        log.debug("checkpoint.settled", step=moment.step, num_messages_acked=len(settled))

    async def _release(self, delivery: Delivery) -> None:
        await delivery.ack()
        group_id = GroupId.parse(delivery.message_id)
        if group_id is not None:
            await self.images.remove(group_id.scope)
