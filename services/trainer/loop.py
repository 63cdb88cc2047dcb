"""The training loop: collect a batch, take an optimizer step, publish the weights, admit the next groups.

Invariants: one optimizer step per published version; groups are admitted only at a version that has been announced; a
checkpoint's weights, ledger and step are of one moment, and messages are acknowledged only after it is on disk.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from penstock.bus.consumer import Delivery
from penstock.bus.image_store import ImageStore
from penstock.bus.lock import Lock
from penstock.records import GroupId
from penstock.runtime.process import unless_stopped
from penstock.v1 import trainer_pb2
from penstock.v1.trainer_pb2 import PublishedVersion
from services.trainer.admission.ledger import GroupLedger
from services.trainer.backend.base import TrainBackend
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.config import TrainerConfig
from services.trainer.flow.batch_source import BatchSource
from services.trainer.flow.collector import Collector, Finished
from services.trainer.flow.crash_record import CrashRecord
from services.trainer.flow.feeder import Feeder
from services.trainer.replay.recorder import StepRecorder
from services.trainer.telemetry.episode_samples import write_group
from services.trainer.telemetry.metrics_log import MetricsLog
from services.trainer.telemetry.progress import Progress
from services.trainer.telemetry.step_metrics import StepClock, describe_batch, describe_groups, describe_push
from services.trainer.versions import PolicyVersions
from services.trainer.weight_sync.publisher import PushReport, WeightPublisher

log = structlog.get_logger()

_ACKS_AT_A_TIME = 64
_SAMPLES_EVERY = 10
"""Steps between groups that are written for people to read: enough to see the policy change, small beside the
checkpoints."""


@dataclass(slots=True, kw_only=True)
class TrainingLoop:
    """A run from its current step to its last."""

    config: TrainerConfig
    folder: Path
    base_model: Path
    """Folder of the model that the run began with; every checkpoint names it."""
    lock: Lock
    """Only its holder may publish and acknowledge."""
    versions: PolicyVersions
    progress: Progress
    backend: TrainBackend
    publisher: WeightPublisher
    ledger: GroupLedger[Finished, Delivery]
    feeder: Feeder
    collector: Collector
    images: ImageStore
    crashes: CrashRecord
    batches: BatchSource
    checkpoints: CheckpointStore
    metrics: MetricsLog
    recorder: StepRecorder | None
    """Keeps what `penstock replay` needs; None where trainer.record_groups is off."""
    version: int
    """The policy version published last; at first the one to publish the weights under."""
    step: int
    """Optimizer steps taken."""
    saved_version: int | None
    """The policy version in the newest checkpoint; None in a new run."""

    async def run(self, stop: asyncio.Event) -> None:
        """Train until the last step or until `stop`, and save a checkpoint at the end in both cases."""
        await self._publish(self.version)
        await unless_stopped(self._catch_up(), stop)
        while self.step < self.config.num_steps:
            clock = StepClock()
            batch = await unless_stopped(self._collect(), stop)
            if batch is None:
                break
            clock.lap("wait_s")
            metrics = await self._train(batch)
            clock.lap("train_s")
            report = await self._publish(self.version + 1)
            await self._admit()
            self._write_metrics(batch, metrics, report, clock)
            if self.step % self.config.checkpoint_every == 0:
                await self._save_checkpoint()
        if self.saved_version != self.version:
            await self._save_checkpoint()
        self.progress.phase = trainer_pb2.RUN_PHASE_FINISHED

    async def _catch_up(self) -> None:
        """After a restart: take what the bus holds, and publish the rest of the admitted groups again."""
        if self.saved_version is not None:
            await self.collector.wait_until_caught_up()
            await self.feeder.publish_again()

    async def _collect(self) -> list[Finished]:
        self.progress.phase = trainer_pb2.RUN_PHASE_COLLECTING
        return await self.batches.next(self.version, num_steps_left=self._num_steps_left)

    async def _train(self, batch: Sequence[Finished]) -> dict[str, Any]:
        self.progress.phase = trainer_pb2.RUN_PHASE_TRAINING
        if self.recorder is not None:
            played = [finished.played for finished in batch]
            images = {sha256: data for finished in batch for sha256, data in finished.images.items()}
            await asyncio.to_thread(self.recorder.record, self.step + 1, self.version, played, images)
        metrics: dict[str, Any] = await asyncio.to_thread(self._step, batch)
        if self.recorder is not None:
            metrics["weights_digest"] = (await asyncio.to_thread(self.backend.digests)).weights
        self.ledger.finish_training()
        self.step += 1
        if self.step % _SAMPLES_EVERY == 0 or self.step == 1:
            await asyncio.to_thread(self._write_samples, batch[0])
        return {"step": self.step, "num_steps": self.config.num_steps, "policy_version": self.version, **metrics}

    def _step(self, batch: Sequence[Finished]) -> dict[str, float]:
        groups = [finished.ready for finished in batch]
        with self.crashes.training([group.index for group in groups]):
            return self.backend.step(groups, self.version)

    def _write_samples(self, finished: Finished) -> None:
        example = self.feeder.dataset[finished.played.id.index]
        folder = self.folder / "samples" / f"step-{self.step:06d}"
        write_group(finished.played, example, finished.images, folder)

    async def _publish(self, version: int) -> PushReport:
        """Push the current weights as `version`, then announce it: from then on groups may be admitted at it."""
        self.progress.phase = trainer_pb2.RUN_PHASE_PUSHING
        weights = await asyncio.to_thread(lambda: self.publisher.take(version, self.backend.export()))
        await self.lock.confirm()
        await self.versions.claim(self._describe_version(version))
        report = await self.publisher.publish(weights)
        await self.lock.confirm()
        await self.versions.announce(self._describe_version(version))
        self.version = version
        self.progress.step, self.progress.policy_version = self.step, version
        return report

    def _describe_version(self, version: int) -> PublishedVersion:
        return PublishedVersion(
            policy_version=version,
            min_policy_version=max(0, version - self.config.max_staleness),
            run_id=self.progress.run_id,
            step=self.step,
            trainer_epoch=self.feeder.trainer_epoch,
            checkpoint_step=self.progress.checkpoint_step,
            checkpoint_folder=str(self.checkpoints.folder.absolute()),
        )

    async def _settle(self, delivery: Delivery) -> None:
        await delivery.ack()
        group_id = GroupId.parse(delivery.message_id)
        if group_id is not None:
            await self.images.remove(group_id.scope)

    @property
    def _num_steps_left(self) -> int:
        return self.config.num_steps - self.step

    async def _admit(self) -> None:
        await self.feeder.admit(self.version, num_steps_left=self._num_steps_left)
        self.progress.count_groups(self.ledger.counts, num_untrained=self.ledger.num_untrained)

    def _write_metrics(
        self, batch: Sequence[Finished], metrics: dict[str, Any], report: PushReport, clock: StepClock
    ) -> None:
        seconds = clock.seconds()
        self.metrics.write(
            metrics
            | describe_batch([finished.played for finished in batch])
            | describe_push(report, num_live_replicas=self.publisher.num_live_replicas)
            | describe_groups(
                self.ledger.counts,
                num_duplicate=self.collector.num_duplicate,
                num_unreadable=self.collector.num_unreadable,
            )
            | {
                "max_staleness": self.config.max_staleness,
                "output_tokens_per_s": metrics["num_tokens"] / seconds["step_s"],
            }
            | seconds
        )

    async def _save_checkpoint(self) -> None:
        self.progress.phase = trainer_pb2.RUN_PHASE_SAVING
        await self.lock.confirm()  # the folder may be a successor's by now
        ledger = self.ledger.checkpoint()
        state = {
            "run_id": self.progress.run_id,
            "step": self.step,
            "version": self.version,
            "base_model": str(self.base_model),
            "ledger": ledger.state,
        }
        started = time.monotonic()
        await asyncio.to_thread(self.checkpoints.save, self.step, state, self.backend.save)
        await self.lock.confirm()
        settled = self.ledger.settle(ledger)
        for first in range(0, len(settled), _ACKS_AT_A_TIME):
            await asyncio.gather(*(self._settle(delivery) for delivery in settled[first : first + _ACKS_AT_A_TIME]))
        self.progress.checkpoint_step, self.saved_version = self.step, self.version
        await self.lock.confirm()
        await self.versions.announce(self._describe_version(self.version))
        log.info(
            "checkpoint.saved",
            step=self.step,
            num_messages_acked=len(settled),
            elapsed_s=round(time.monotonic() - started, 3),
        )
