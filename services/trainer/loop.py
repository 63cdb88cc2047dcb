"""The training loop: compute groups as they come, update the weights, publish them; all else happens beside it.

    loop        groups of v | update | copy v+1 | groups of v+1 | update | copy v+2 | groups of v+2 ...
    push                                        | push and announce v+1 |           | push and announce v+2 ...
    feeder      admits whenever half of the replicas serve a version or a group makes room
    checkpoint                       | write | acknowledge       (every n steps)

While the backend computes a chunk of groups, others arrive and make the next chunk. If all are there at the start, the
batch is one chunk. Demonstrations of the step, if it learns any, are read meanwhile and computed with the update.

Invariants: one optimizer step per published version; at most one push and one checkpoint are under way; a checkpoint's
weights, ledger and step are of one moment, so an update waits until the one before is copied or written. An update also
waits until replicas are held out for the evaluation of the weights that it changes, or that evaluation has ended.
"""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from penstock.bus.work_queue.consumer import Delivery
from penstock.errors import DataError
from penstock.runtime.process import completed, end_task, unless_stopped
from penstock.telemetry import log as logging
from penstock.telemetry import spans
from penstock.v1 import trainer_pb2
from services.trainer.admission.ledger import GroupLedger
from services.trainer.backend.base import TrainBackend
from services.trainer.background import Lane
from services.trainer.checkpoint.saving import CheckpointSaver, Moment
from services.trainer.config import TrainerConfig
from services.trainer.data.named_section import named_section
from services.trainer.evaluation.evaluator import Evaluator
from services.trainer.flow.batch_source import BatchSource
from services.trainer.flow.collector import Collector, Finished
from services.trainer.flow.feeder import Feeder
from services.trainer.position import Position
from services.trainer.publication import Publication
from services.trainer.sft.batches import BatchesAhead, SftBatch
from services.trainer.step_computation import StepComputation
from services.trainer.telemetry.episode_metrics import describe_episodes
from services.trainer.telemetry.episodes.log import EpisodeLog, TrainedGroup
from services.trainer.telemetry.field_names import field_names
from services.trainer.telemetry.gradient_streak import GradientStreak
from services.trainer.telemetry.metrics_log import MetricsLog
from services.trainer.telemetry.progress import Progress
from services.trainer.telemetry.step_metrics import (
    StepClock,
    describe_batch,
    describe_filters,
    describe_groups,
    describe_pools,
    describe_push,
)
from services.trainer.telemetry.trace import TrainerTrace
from services.trainer.telemetry.trackers import Trackers
from services.trainer.weight_sync.publisher import WeightPublisher
from services.trainer.weight_sync.snapshot import WeightSnapshot

log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class TrainingLoop:
    """A run from its current step to its last."""

    config: TrainerConfig
    folder: Path
    progress: Progress
    position: Position
    backend: TrainBackend
    computation: StepComputation
    publisher: WeightPublisher
    publication: Publication
    ledger: GroupLedger[Finished, Delivery]
    feeder: Feeder
    collector: Collector
    batches: BatchSource
    checkpoints: CheckpointSaver
    metrics: MetricsLog
    trace: TrainerTrace
    trackers: Trackers
    episodes: EpisodeLog | None = None
    """Keeps groups for people to read; None where episodes.keep is off."""
    gradients: GradientStreak = field(default_factory=GradientStreak)
    evaluator: Evaluator | None = None
    """Measures the policy; None where the recipe does not evaluate."""
    demonstrations: BatchesAhead | None = None
    """Batches of demonstrations that steps learn beside their groups; None if they learn none."""
    on_step: Callable[[dict[str, Any]], None] = lambda row: None
    """Called with the row of each step, as it is in metrics.jsonl."""
    now: Callable[[], float] = time.monotonic
    """Reads the clock by which steps are timed, in seconds."""
    failure: DataError | None = None
    """The first that ended the run."""
    _may_update: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared while the weights that an evaluation plays must stay the published ones."""
    _is_copied: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared until a checkpoint has been copied, or written from the weights in place."""

    async def run(self, stop: asyncio.Event) -> None:
        """Train until the last step or until `stop`, and save a checkpoint at the end in both cases.

        Raises:
            DataError: a row is wrong, or groups fail too often; `stop` is set, and a checkpoint of the last step saved.
        """
        logging.bind(version=self.position.version)
        if self.evaluator is not None:
            await self.evaluator.open()
        async with asyncio.TaskGroup() as tasks:
            await self.publication.publish(self.position.version, await self._copy_weights())
            await self.until_wrong(lambda: unless_stopped(self._catch_up(), stop), stop)
            feeding = tasks.create_task(self.until_wrong(self.feeder.run, stop))
            try:
                await self._train_until(stop, tasks)
            finally:
                if self.demonstrations is not None:
                    await self.demonstrations.close()
            await end_task(feeding)
        self.progress.phase = trainer_pb2.RUN_PHASE_FINISHED

    async def until_wrong(self, work: Callable[[], Awaitable[object]], stop: asyncio.Event) -> None:
        """Call and await `work`. If data are wrong, the run ends in order, so that no step before that is lost: `stop`
        is set, and `run` raises the error once everything is saved."""
        try:
            await work()
        except DataError as error:
            self._fail(error, stop)

    def _fail(self, error: DataError, stop: asyncio.Event) -> None:
        if self.failure is None:
            log.error("run.ending", reason=str(error), remedy="it ends with this error once everything is saved")
            self.failure = error
        stop.set()

    async def _catch_up(self) -> None:
        """After a restart: take what the bus holds, and publish the rest of the admitted groups again."""
        if self.checkpoints.saved_version is not None:
            await self.collector.wait_until_caught_up()
            await self.publication.lock.confirm()  # the queue may be a successor's by now
            await self.feeder.publish_again()

    async def _train_until(self, stop: asyncio.Event, tasks: asyncio.TaskGroup) -> None:
        pushes, writes, settlements, evaluations = (Lane(tasks) for _ in range(4))
        self._may_update.set()
        self._is_copied.set()
        if self.evaluator is not None and (interrupted := self.evaluator.interrupted) is not None:
            evaluations.start(self._go_on_evaluating(*interrupted, stop))
        while self.position.num_steps_left and not stop.is_set():
            clock = StepClock(self.now)
            if self._is_evaluation_due():
                with self.progress.held_up(is_over=evaluations.is_free):
                    await evaluations.free()  # the one before, of an earlier version
                clock.lap("evaluation_wait_s")
                self._may_update.clear()
                evaluations.start(self._evaluate(pushes, stop, on_held_out=self._may_update.set))
            try:
                batch = await self._compute_batch(stop, clock)
                if batch is None:
                    break
                learned = await self._take_demonstrations(clock)
                with self.progress.held_up(is_over=self._may_update.is_set()):
                    await self._may_update.wait()
                clock.lap("evaluation_wait_s")
                if stop.is_set() and self._is_evaluation_due():  # it was stopped, and comes again when the run goes on
                    await self._abort_batch()
                    break
                await self._is_copied.wait()
                clock.lap("checkpoint_wait_s")
                measure = await self._update(batch, learned)
            except DataError as error:
                self._fail(error, stop)
                await self._abort_batch()
                break
            clock.lap("train_s")
            await pushes.free()
            weights = await self._copy_weights()
            clock.lap("push_wait_s")
            row = tasks.create_task(self._measured(measure, self._describe(batch)))
            del measure  # with the step's data, which would be kept through the next one
            pushes.start(self._push(weights, row, clock))
            if self.position.step % self.config.checkpoint_every == 0:
                await writes.free()
                await settlements.free()
                metrics = await row
                clock.lap("checkpoint_wait_s")
                self._is_copied.clear()
                timed = metrics | clock.seconds()
                moment = self.checkpoints.moment(self.position, timed | field_names(timed))
                self.progress.phase = trainer_pb2.RUN_PHASE_SAVING
                writes.start(self._write_checkpoint(moment, settlements, on_copied=self._is_copied.set))
            clock.stop()
        for lane in (pushes, writes, settlements):
            await lane.free()
        is_untrained = self.position.step == 0 and self.failure is not None
        if self.checkpoints.saved_version != self.position.version and not is_untrained:
            self.progress.phase = trainer_pb2.RUN_PHASE_SAVING
            await self._write_checkpoint(self.checkpoints.moment(self.position), settlements, on_copied=None)
            await settlements.free()
        with self.progress.held_up(is_over=evaluations.is_free):
            await evaluations.free()
        if not self.position.num_steps_left and self._is_evaluation_due() and self.failure is None:
            with self.progress.held_up(is_over=False):
                await self._evaluate(pushes, stop, on_held_out=None)
        if self.failure is not None:
            raise self.failure

    def _is_evaluation_due(self) -> bool:
        return self.evaluator is not None and self.evaluator.is_due(self.position.step)

    async def _evaluate(self, pushes: Lane, stop: asyncio.Event, *, on_held_out: Callable[[], None] | None) -> None:
        """Evaluate the weights of the last step, once they are announced, or until `stop`."""
        assert self.evaluator is not None, "nothing is due without an evaluator"
        step, version = self.position.step, self.position.version
        await pushes.free()
        evaluate = functools.partial(
            self.evaluator.evaluate,
            *(step, version),
            has_received_all=self.collector.has_everything,
            on_held_out=on_held_out,
        )
        with spans.recorded("evaluation", step=step, version=version):
            await self.until_wrong(lambda: unless_stopped(evaluate(), stop), stop)
        self._may_update.set()

    async def _go_on_evaluating(self, step: int, version: int, stop: asyncio.Event) -> None:
        """Go on with the evaluation of `step` that a kill or a stop interrupted, or until `stop`."""
        assert self.evaluator is not None, "nothing was interrupted without an evaluator"
        go_on = functools.partial(self.evaluator.go_on, has_received_all=self.collector.has_everything)
        with spans.recorded("evaluation", step=step, version=version):
            await self.until_wrong(lambda: unless_stopped(go_on(), stop), stop)

    async def _compute_batch(self, stop: asyncio.Event, clock: StepClock) -> list[Finished] | None:
        """Compute the groups of a step as they come; None, and no step, if `stop` is set while some are missing."""
        if self.demonstrations is not None:
            self.demonstrations.begin()
        await asyncio.to_thread(self.computation.begin, self.position.step + 1, self.position.version)
        batch: list[Finished] = []
        while len(batch) < self.ledger.gate.groups_per_step:
            self.progress.phase = trainer_pb2.RUN_PHASE_COLLECTING
            chunk = await unless_stopped(self.batches.next_chunk(clock), stop)
            if chunk is None:
                await self._abort_batch()
                return None
            self.progress.phase = trainer_pb2.RUN_PHASE_TRAINING
            for finished in chunk:
                group = finished.played.id.message
                spans.record("group.held", finished.received_at, group=group, step=self.position.step + 1)
            if self.computation.is_recorded:
                await self.publication.lock.confirm()
            await asyncio.to_thread(self.computation.accumulate, chunk)
            clock.lap("train_s")
            batch += chunk
        return batch

    async def _abort_batch(self) -> None:
        """Hold the groups of a begun step again, as if it had not begun."""
        await asyncio.to_thread(self.computation.abort)
        self.ledger.abort_training()

    async def _take_demonstrations(self, clock: StepClock) -> SftBatch | None:
        if self.demonstrations is None:
            return None
        with named_section("demonstrations"):
            taken = await self.demonstrations.take(is_last=self.position.num_steps_left == 1)
        if self.computation.is_recorded:
            await self.publication.lock.confirm()
        clock.lap("demonstration_wait_s")
        return taken

    async def _update(self, batch: Sequence[Finished], learned: SftBatch | None) -> Callable[[], dict[str, Any]]:
        measure = await asyncio.to_thread(self.computation.finish, batch, learned)
        facts: dict[str, Any] = {}
        if self.demonstrations is not None and learned is not None:
            self.demonstrations.learned(learned)
            facts |= {
                "num_passed_over_demonstrations": float(learned.num_passed_over),
                "demonstration_epoch": self.demonstrations.epoch,
            }
        step, version = self.position.step + 1, self.position.version
        self._keep_episodes(step, version, batch)
        self.ledger.finish_training()
        self.position.advance()
        logging.bind(version=self.position.version)
        self.progress.step = step
        facts |= {"step": step, "num_steps": self.position.num_steps, "policy_version": version}
        return lambda: facts | measure()

    async def _measured(self, measure: Callable[[], dict[str, Any]], described: dict[str, Any]) -> dict[str, Any]:
        """Compute the metrics of a step, beside its push and the next step."""
        metrics = await asyncio.to_thread(measure)
        return metrics | self.gradients.observe(metrics) | described

    def _keep_episodes(self, step: int, version: int, batch: Sequence[Finished]) -> None:
        if self.episodes is not None:
            groups = [TrainedGroup(played=each.played, ready=each.ready, images=each.images) for each in batch]
            self.episodes.keep_trained(step, version, groups, self.backend.step_tokens())

    def _describe(self, batch: Sequence[Finished]) -> dict[str, Any]:
        played, ready = [finished.played for finished in batch], [finished.ready for finished in batch]
        return (
            describe_batch(played)
            | describe_episodes(played)
            | describe_filters(played, ready, self.collector.tally.take())
            | describe_groups(
                self.ledger.counts,
                num_duplicate=self.collector.num_duplicate,
                num_unreadable=self.collector.num_unreadable,
            )
            | ({} if self.feeder.pools is None else describe_pools(self.feeder.pools.shares()))
            | {"max_staleness": self.config.max_staleness}
            | ({} if self.episodes is None else {"num_episodes_dropped": self.episodes.num_dropped})
        )

    async def _copy_weights(self) -> WeightSnapshot:
        self.progress.phase = trainer_pb2.RUN_PHASE_PUSHING
        version = self.position.version
        return await asyncio.to_thread(lambda: self.publisher.take(version, self.backend.export()))

    async def _push(self, weights: WeightSnapshot, measured: Awaitable[dict[str, Any]], clock: StepClock) -> None:
        """Publish the weights after a step, then write the step's metrics.

        A checkpoint holds them too, without those of the push: if the trainer dies in between, the next one writes
        them.
        """
        began = self.now()
        report = await self.publication.publish(weights.version, weights)
        push = ("push", began, self.now() - began)
        metrics = await measured
        seconds = await clock.final_seconds()  # a push may end while the loop waits for a checkpoint
        row = (
            metrics
            | describe_push(report, num_live_replicas=self.publisher.num_live_replicas)
            | {
                "output_tokens_per_s": metrics["num_tokens"] / seconds["step_s"],
                "trainer_idle_fraction": 1 - seconds["train_s"] / seconds["step_s"],
            }
            | ({} if self.checkpoints.write_s is None else {"checkpoint_write_s": self.checkpoints.write_s})
            | seconds
        )
        row |= field_names(row)
        await completed(self._tell(row, [*clock.spans, push]))

    async def _tell(self, row: dict[str, Any], parts: Sequence[tuple[str, float, float]]) -> None:
        await asyncio.to_thread(self.metrics.write, row)
        await asyncio.to_thread(self.trace.write, row["step"], parts)
        self.trackers.log(row)
        self.on_step(row)

    async def _write_checkpoint(
        self, moment: Moment, settlements: Lane, *, on_copied: Callable[[], None] | None
    ) -> None:
        with spans.recorded("checkpoint", step=moment.step):
            await self.checkpoints.write(moment, on_copied=on_copied)
        self._is_copied.set()
        settlements.start(self.checkpoints.settle(moment))
