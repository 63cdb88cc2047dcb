"""The training loop: batch, optimizer step, push, next admission; and what a checkpoint must hold to go on from it.

Invariants: one optimizer step per published version; groups are admitted only at a version that has been announced; a
checkpoint's weights, gate and step are of one moment, and messages are acked only after it is on disk.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from nats.js.kv import KeyValue

from penstock.bus.connection import Bus
from penstock.runtime.process import unless_stopped
from penstock.v1 import trainer_pb2
from services.trainer.admission.gate import Gate
from services.trainer.config import TrainerConfig
from services.trainer.flow.collector import Collector, Finished
from services.trainer.flow.feeder import Feeder
from services.trainer.policy.checkpoint import CheckpointStore
from services.trainer.policy.optimizer import PolicyOptimizer
from services.trainer.push.publisher import PushReport, WeightPublisher
from services.trainer.replay.recorder import StepRecorder
from services.trainer.telemetry.episode_samples import write_group
from services.trainer.telemetry.metrics_log import MetricsLog
from services.trainer.telemetry.progress import Progress

log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class TrainingLoop:
    """A run from its current step to its last."""

    config: TrainerConfig
    folder: Path
    base_model: Path
    """Folder that the weights were loaded from first, for tokenizer and processor of a checkpoint."""
    bus: Bus
    policy_bucket: KeyValue
    """KV bucket in which versions are announced."""
    progress: Progress
    optimizer: PolicyOptimizer
    publisher: WeightPublisher
    gate: Gate
    feeder: Feeder
    collector: Collector
    checkpoints: CheckpointStore
    metrics: MetricsLog
    recorder: StepRecorder | None
    """Keeps what `penstock replay` needs; None where trainer.record_groups is off."""
    version: int
    """The policy version published last; at first the one to publish the weights under."""
    step: int
    """Optimizer steps taken."""
    saved_version: int | None
    """The policy version in the newest checkpoint; None where there is none, in a run that has just begun."""

    async def run(self, stop: asyncio.Event) -> None:
        """Train until the last step or until `stop`, with a checkpoint at the end in both cases."""
        await self._publish(self.version)
        if self.saved_version is not None:
            await self.collector.wait_until_caught_up()
            await self.feeder.readmit()
        await self._admit()
        while self.step < self.config.num_steps:
            started = time.monotonic()
            self.progress.phase = trainer_pb2.RUN_PHASE_COLLECTING
            batch = await unless_stopped(self.collector.next_batch(self.version, self._admit), stop)
            if batch is None:
                break
            collected = time.monotonic()
            row = await self._train(batch)
            trained = time.monotonic()
            report = await self._publish(self.version + 1)
            await self._admit()
            self.metrics.write(
                row
                | self._describe(batch, report)
                | {
                    "wait_s": collected - started,
                    "train_s": trained - collected,
                    "step_s": time.monotonic() - started,
                    "output_tokens_per_s": row["num_tokens"] / (time.monotonic() - started),
                }
            )
            if self.step % self.config.checkpoint_every == 0:
                await self._checkpoint()
        if self.saved_version != self.version:
            await self._checkpoint()
        self.progress.phase = trainer_pb2.RUN_PHASE_FINISHED

    async def _train(self, batch: Sequence[Finished]) -> dict[str, Any]:
        self.progress.phase = trainer_pb2.RUN_PHASE_TRAINING
        groups = [finished.ready for finished in batch]
        if self.recorder is not None:
            played = [finished.played for finished in batch]
            await asyncio.to_thread(self.recorder.record, self.step + 1, self.version, played)
        row: dict[str, Any] = await asyncio.to_thread(self.optimizer.step, groups, self.version)
        if self.recorder is not None:
            row["weights_digest"] = await asyncio.to_thread(self.optimizer.weights_digest)
        self.gate.trained(group.index for group in groups)
        self.step += 1
        if self.step % self.config.samples_every == 0 or self.step == 1:
            await asyncio.to_thread(write_group, batch[0].played, self.folder / "samples" / f"step-{self.step:06d}")
        return {"step": self.step, "num_steps": self.config.num_steps, "policy_version": self.version, **row}

    async def _publish(self, version: int) -> PushReport:
        """Push the weights of now as `version`, then announce it: from then on groups may be admitted at it."""
        self.progress.phase = trainer_pb2.RUN_PHASE_PUSHING
        weights = await asyncio.to_thread(lambda: self.publisher.take(version, self.optimizer.named_weights()))
        # Taken before any replica holds it: whoever dies in between, the number never stands for other weights.
        await self.bus.put(self.policy_bucket, "reserved", json.dumps({"version": version}).encode())
        report = await self.publisher.publish(weights)
        self.version = version
        announcement = {
            "version": version,
            "min_version": max(0, version - self.config.max_staleness),
            "run_id": self.progress.run_id,
            "step": self.step,
        }
        if folder := self.publisher.snapshots.folder_of(version):
            announcement["snapshot"] = str(folder)
        for key in (f"version.{version}", "current"):
            await self.bus.put(self.policy_bucket, key, json.dumps(announcement).encode())
        self.progress.step, self.progress.policy_version = self.step, version
        return report

    async def _admit(self) -> None:
        await self.feeder.admit(self.version, num_steps_left=self.config.num_steps - self.step)
        self._count()

    def _count(self) -> None:
        self.progress.num_outstanding_groups = len(self.gate.outstanding)
        self.progress.num_trained_groups = self.gate.num_trained
        self.progress.num_stale_groups = self.gate.num_rejected
        self.progress.num_failed_groups = self.gate.num_dropped

    async def _checkpoint(self) -> None:
        # State and messages are taken without an await between them: they are of the same moment.
        state = {
            "run_id": self.progress.run_id,
            "step": self.step,
            "version": self.version,
            "base_model": str(self.base_model),
            "gate": self.gate.state(),
        }
        unsettled = self.collector.take_unsettled()
        started = time.monotonic()
        await asyncio.to_thread(
            self.checkpoints.save, self.step, state, lambda folder: self.optimizer.save(folder, self.base_model)
        )
        for first in range(0, len(unsettled), 64):
            await asyncio.gather(*(delivery.ack() for delivery in unsettled[first : first + 64]))
        self.progress.checkpoint_step, self.saved_version = self.step, self.version
        log.info(
            "checkpoint.saved",
            step=self.step,
            num_groups_settled=len(unsettled),
            elapsed_s=round(time.monotonic() - started, 3),
        )

    def _describe(self, batch: Sequence[Finished], report: PushReport) -> dict[str, Any]:
        samples = [sample for finished in batch for sample in finished.played.samples]
        unjudged = [s.verdict.status for s in samples if s.verdict.status in ("TIMEOUT", "OUT_OF_MEMORY")]
        return {
            "groups": [finished.ready.index for finished in batch],
            "max_staleness": self.config.max_staleness,
            "num_unjudged_samples": len(unjudged),
            "num_truncated_samples": sum(sample.finish_reason == "length" for sample in samples),
            "num_cached_tokens": sum(sample.num_cached_tokens for sample in samples),
            "push_s": report.push_s,
            "push_pause_s": report.pause_s,
            "push_bytes": report.num_bytes,
            "push_failed_replicas": report.num_failed,
            "num_replicas": self.publisher.num_live_replicas,
            "push_replicas": report.num_replicas,
            "num_trained_groups": self.gate.num_trained,
            "num_stale_groups": self.gate.num_rejected,
            "num_failed_groups": self.gate.num_dropped,
            "num_stale_tokens": self.collector.num_rejected_tokens,
            "num_duplicate_groups": self.collector.num_duplicate,
        }
