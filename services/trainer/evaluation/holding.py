"""Holds replicas out of pushes while an evaluation plays, and keeps its weights on disk until it has ended.

    evaluations/step-000020/weights/    the weights of the evaluation's version

Invariant: while an evaluation holds replicas out, its complete weights are on disk. So if replicas or the trainer die,
the evaluation goes on with the same weights.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from services.trainer.weight_sync.held_out.hold_out import HoldOut
from services.trainer.weight_sync.held_out.kept_weights import KeptWeights, remove_kept
from services.trainer.weight_sync.held_out.record import HeldOutRecord
from services.trainer.weight_sync.publisher import WeightPublisher

log = structlog.get_logger()

FOLDER: Final = "evaluations"
_WEIGHTS: Final = "weights"
_STEP: Final = "step-"


def folder_of(run_folder: Path, step: int) -> Path:
    """Return the folder of the evaluation of `step`."""
    return run_folder / FOLDER / f"{_STEP}{step:06d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """An evaluation that held replicas out when the trainer ended."""

    step: int
    kept: KeptWeights


def find_interrupted(run_folder: Path, step: int, *, done: Collection[int]) -> Interrupted | None:
    """Return the evaluation to resume after the checkpoint of `step`, and remove the kept weights of others. Blocking.

    Weights of a later step are lost with the steps after the checkpoint; weights of a finished evaluation are useless.
    """
    found = None
    for folder in sorted((run_folder / FOLDER).glob(f"{_STEP}*/{_WEIGHTS}")):
        number = folder.parent.name.removeprefix(_STEP)
        kept = KeptWeights.find(folder) if number.isdecimal() and int(number) <= step else None
        if kept is None or int(number) in done:
            remove_kept(folder)
        else:
            found = Interrupted(step=int(number), kept=kept)
    return found


async def give_up_interrupted(run_folder: Path, record: HeldOutRecord) -> None:
    """Hold nothing out, and remove all weights that evaluations kept, for a run that no longer evaluates.

    Raises:
        SupersededError: another trainer has taken over.
    """
    if record.value.policy_version:
        await record.clear()
    await asyncio.to_thread(find_interrupted, run_folder, -1, done=())  # step -1 removes all of them


class ReplicaHolding:
    """Holds replicas out for the evaluations of a run, one evaluation at a time."""

    def __init__(self, publisher: WeightPublisher, record: HeldOutRecord, *, run_folder: Path, num: int) -> None:
        """Hold out `num` replicas; 0 holds out none."""
        self._publisher = publisher
        self._record = record
        self._run_folder = run_folder
        self._num = num

    async def begin(self, step: int, version: int) -> HoldOut | None:
        """Hold replicas out at `version`, the published one; return None if updates must wait instead.

        Raises:
            SupersededError: another trainer has taken over.
        """
        if self._num == 0:
            return None
        weights = self._publisher.current
        assert weights is not None, "something is published"
        assert weights.version == version, "nothing was published since"
        folder = folder_of(self._run_folder, step) / _WEIGHTS
        if not self._publisher.can_hold_out(self._num, version=version):
            _report_pause(
                step,
                f"no replica can be spared: {self._publisher.num_live_replicas} have loaded by now, and training "
                "needs one, or a PD pair, besides those held out",
            )
            return None
        try:
            kept = await asyncio.to_thread(KeptWeights.write, folder, weights)
        except OSError as error:
            _report_pause(step, f"the weights cannot be written to {folder}: {error}")
            await asyncio.to_thread(remove_kept, folder)
            return None
        hold_out = HoldOut(step=step, kept=kept, num=self._num, record=self._record)
        if not await self._publisher.hold_out(hold_out):
            _report_pause(step, "replicas have gone, and none can be spared any more")
            await asyncio.to_thread(remove_kept, folder)
            return None
        return hold_out

    async def go_on(self, interrupted: Interrupted) -> HoldOut:
        """Hold out again what an earlier trainer held out. Call before anything is published.

        Raises:
            SupersededError: another trainer has taken over.
        """
        hold_out = HoldOut(
            step=interrupted.step,
            kept=interrupted.kept,
            num=max(1, self._num),
            record=self._record,
            replica_ids=frozenset(self._record.value.replica_ids),
        )
        await self._publisher.go_on_holding_out(hold_out)
        return hold_out

    async def end(self, step: int) -> None:
        """Hold nothing out, and remove the kept weights of `step`; the replicas catch up on their own.

        Raises:
            SupersededError: another trainer has taken over.
        """
        await self._publisher.release_held_out()  # first: until then it may write the record
        await self.clear()
        await asyncio.to_thread(remove_kept, folder_of(self._run_folder, step) / _WEIGHTS)

    async def clear(self) -> None:
        """Clear the record of held-out replicas, so that routers forget them. The publisher must have released them.

        Raises:
            SupersededError: another trainer has taken over.
        """
        if self._record.value.policy_version:
            await self._record.clear()


def _report_pause(step: int, reason: str) -> None:
    log.warning(
        "evaluation.pauses_training",
        step=step,
        reason=reason,
        effect="the next update waits until the evaluation has ended",
    )
