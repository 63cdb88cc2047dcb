"""The time of a step goes to what the step waited for."""

from pathlib import Path
from typing import Any

from penstock.v1 import trainer_pb2
from services.trainer.position import Position
from tests.support.trainer.runs.gated_loop import GatedCheckpoints, GatedEvaluator, GatedPublication, Rows, Run, running
from tests.support.trainer.runs.manual_clock import ManualClock
from tests.support.waiting import settled, until

NOTHING = dict.fromkeys(
    (
        "wait_s",
        "data_wait_s",
        "demonstration_wait_s",
        "push_wait_s",
        "checkpoint_wait_s",
        "evaluation_wait_s",
        "train_s",
    ),
    0.0,
)


async def collecting(run: Run) -> None:
    """The next step has begun, and waits for groups."""
    await until(lambda: run.progress.phase == trainer_pb2.RUN_PHASE_COLLECTING)
    await settled()


async def compute(run: Run, clock: ManualClock, what: Any, seconds: float) -> None:
    """Let the backend do `what`, and end it after some time."""
    assert await run.backend.next_call() == what
    clock.move(seconds)
    run.backend.go_on()


def assert_times(row: dict[str, Any], **seconds: float) -> None:
    """Nothing else took time."""
    assert {name: row[name] for name in NOTHING} == NOTHING | seconds
    assert row["step_s"] == sum(seconds.values())
    assert row["trainer_idle_fraction"] == 1 - seconds["train_s"] / row["step_s"]


async def test_waiting_for_groups_is_told_by_its_cause(tmp_path: Path) -> None:
    """A push that admission waits for, rows that are not admitted or not sent yet, groups in play."""
    clock, rows, pushes = ManualClock(), Rows(), list[GatedPublication]()

    def gated(position: Position) -> GatedPublication:
        pushes.append(GatedPublication(position))
        return pushes[0]

    async with running(tmp_path, rows=rows, publication=gated, max_staleness=0, now=clock) as run:
        feeder: Any = run.batches.feeder
        admit = feeder.wake
        await collecting(run)
        clock.move(1.0)
        run.finish(0, 1, 2, 3)
        await compute(run, clock, [0, 1, 2, 3], 2.0)
        await compute(run, clock, "finish_step", 4.0)

        await collecting(run)
        clock.move(8.0)
        feeder.wake = lambda: None
        pushes[0].may_end.release()
        await until(lambda: rows.written)
        run.changes.notify()
        await settled()
        clock.move(16.0)
        feeder.wake, feeder.num_unsent = admit, 4
        run.changes.notify()
        await settled()
        clock.move(32.0)
        feeder.num_unsent = 0
        run.changes.notify()
        await settled()
        clock.move(64.0)
        run.finish(4, 5, 6, 7)
        await compute(run, clock, [4, 5, 6, 7], 128.0)
        await compute(run, clock, "finish_step", 256.0)
        pushes[0].may_end.release()
        await until(lambda: len(rows.written) == 2)
        assert_times(rows.written[0], wait_s=1.0, train_s=6.0)
        assert_times(rows.written[1], push_wait_s=8.0, data_wait_s=48.0, wait_s=64.0, train_s=384.0)
        run.stop.set()
        run.checkpoints.on_disk.set()


async def test_rows_that_are_not_sent_hold_up_only_a_step_that_lacks_them(tmp_path: Path) -> None:
    """A batch is being played; the rows of the next one are still read."""
    clock, rows = ManualClock(), Rows()
    async with running(tmp_path, rows=rows, now=clock) as run:
        feeder: Any = run.batches.feeder
        feeder.num_unsent = 4
        await collecting(run)
        clock.move(1.0)
        run.finish(0, 1, 2, 3)
        await compute(run, clock, [0, 1, 2, 3], 2.0)
        await compute(run, clock, "finish_step", 4.0)
        await until(lambda: rows.written)
        assert_times(rows.written[0], wait_s=1.0, train_s=6.0)
        run.stop.set()
        run.checkpoints.on_disk.set()


async def test_an_update_that_waits_for_files_says_how_long(tmp_path: Path) -> None:
    """Not what passes while its groups are computed beside the writing."""
    clock, rows, checkpoints = ManualClock(), Rows(), GatedCheckpoints()
    async with running(tmp_path, rows=rows, checkpoints=checkpoints, checkpoint_every=1, now=clock) as run:
        run.finish(0, 1, 2, 3)
        await compute(run, clock, [0, 1, 2, 3], 1.0)
        await compute(run, clock, "finish_step", 2.0)
        run.finish(4, 5, 6, 7)
        await compute(run, clock, [4, 5, 6, 7], 4.0)
        await clock.read()
        clock.move(8.0)
        checkpoints.on_disk.set()
        await compute(run, clock, "finish_step", 16.0)
        await until(lambda: len(rows.written) == 2)
        assert_times(rows.written[0], train_s=3.0)
        assert_times(rows.written[1], checkpoint_wait_s=8.0, train_s=20.0)
        run.stop.set()


async def test_an_update_that_waits_for_an_evaluation_says_how_long(tmp_path: Path) -> None:
    """Not what passes while its groups are computed beside the evaluation."""
    clock, rows, evaluator = ManualClock(), Rows(), GatedEvaluator(0)
    async with running(tmp_path, rows=rows, evaluator=evaluator, now=clock) as run:
        run.finish(0, 1, 2, 3)
        await compute(run, clock, [0, 1, 2, 3], 1.0)
        await clock.read()
        clock.move(2.0)
        evaluator.is_played.set()
        await compute(run, clock, "finish_step", 4.0)
        await until(lambda: rows.written)
        assert_times(rows.written[0], evaluation_wait_s=2.0, train_s=5.0)
        run.stop.set()
        run.checkpoints.on_disk.set()
