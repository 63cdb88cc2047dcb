"""Publishes the weights of one version at a time, beside training.

Invariants: a version is claimed before any replica holds its weights, and announced only when they are pushed; a
replaced trainer claims and announces nothing; groups are admitted only at a claimed version that replicas serve.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

from penstock.bus.buckets.lock import Lock
from penstock.v1.trainer_pb2 import PublishedVersion
from services.trainer.flow.feeder import Feeder
from services.trainer.position import Position
from services.trainer.telemetry.progress import Progress
from services.trainer.versions import PolicyVersions
from services.trainer.weight_sync.publisher import WeightPublisher
from services.trainer.weight_sync.push_report import PushReport
from services.trainer.weight_sync.snapshot import WeightSnapshot


@dataclass(slots=True, kw_only=True)
class Publication:
    """Claims, pushes and announces versions."""

    position: Position
    max_staleness: int
    lock: Lock
    """Only its holder may publish."""
    versions: PolicyVersions
    publisher: WeightPublisher
    feeder: Feeder
    """Admits groups at the served version."""
    progress: Progress
    checkpoints_folder: Path
    _announcing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def publish(self, version: int, weights: WeightSnapshot) -> PushReport:
        """Push `weights` as `version`, then announce it. Groups are admitted at it once half of the replicas serve it.

        Raises:
            SupersededError: another trainer has taken over.
            SetupError: the push is impossible as configured, or NATS has lost the run's state.
        """
        await self.lock.confirm()
        await self.versions.claim(self._describe(version))
        report = await self.publisher.publish(weights, on_half_served=lambda: self._serve(version))
        async with self._announcing:
            await self.lock.confirm()
            await self.versions.announce(self._describe(version))
            self.position.announced_version = self.progress.policy_version = version
        self._serve(version)
        return report

    def _serve(self, version: int) -> None:
        self.position.served_version = version
        self.feeder.wake()

    async def announce_checkpoint(self) -> None:
        """Announce the announced version again, with the current `progress.checkpoint_step`.

        Raises:
            SupersededError: another trainer has taken over.
        """
        async with self._announcing:
            if self.position.announced_version is not None:
                await self.lock.confirm()
                await self.versions.announce(self._describe(self.position.announced_version))

    def _describe(self, version: int) -> PublishedVersion:
        return PublishedVersion(
            policy_version=version,
            min_policy_version=max(0, version - self.max_staleness),
            run_id=self.progress.run_id,
            step=self.position.step_of(version),
            trainer_epoch=self.feeder.trainer_epoch,
            checkpoint_step=self.progress.checkpoint_step,
            checkpoint_folder=str(self.checkpoints_folder.absolute()),
        )
