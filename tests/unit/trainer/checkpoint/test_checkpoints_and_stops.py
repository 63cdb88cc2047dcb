"""Nothing but the update waits for a checkpoint's files, and a stop keeps what has arrived."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import DataError
from services.trainer.admission.group_state import GroupStatus
from tests.support.trainer.runs.gated_loop import GatedCheckpoints, GatedEvaluator, Rows, Run, SlowSettlements, running
from tests.support.waiting import promptly, settled, until


async def test_a_checkpoint_holds_up_the_update_only(tmp_path: Path) -> None:
    """While its files are written the next groups are computed; it is of the moment before them."""
    async with running(tmp_path, checkpoint_every=1) as run:
        run.finish(0, 1, 2, 3)
        for what in ([0, 1, 2, 3], "finish_step"):
            assert await run.backend.next_call() == what
            run.backend.go_on()
        run.finish(4, 5, 6, 7)
        assert await run.backend.next_call() == [4, 5, 6, 7]
        assert run.checkpoints.moments == [2]
        run.backend.go_on()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(run.backend.next_call(), 0.2)
        run.checkpoints.on_disk.set()
        assert await run.backend.next_call() == "finish_step"
        assert run.checkpoints.saved_version == 2
        run.backend.go_on()


async def test_a_checkpoint_that_is_copied_holds_up_nothing_but_the_next(tmp_path: Path) -> None:
    """The update comes while its files are written; the next checkpoint waits for them."""
    checkpoints = GatedCheckpoints(copies=True)
    async with running(tmp_path, checkpoints=checkpoints, checkpoint_every=1) as run:
        for first in (0, 4):
            run.finish(*range(first, first + 4))
            for what in ([*range(first, first + 4)], "finish_step"):
                assert await run.backend.next_call() == what
                run.backend.go_on()
        while run.position.step < 2:
            await asyncio.sleep(0)
        await settled()
        assert (checkpoints.moments, checkpoints.saved_version) == ([2], None)
        checkpoints.on_disk.set()
        while checkpoints.saved_version != 3:
            await asyncio.sleep(0)
        assert (checkpoints.moments, checkpoints.waited_for) == ([2, 3], [True, True])
        run.stop.set()
        await promptly(run.task)


async def test_the_times_of_a_step_include_its_wait_for_the_checkpoint_before(tmp_path: Path) -> None:
    """Its push ends during that wait; its metrics are written when the step has ended."""
    checkpoints, rows = SlowSettlements(), Rows()
    async with running(tmp_path, checkpoints=checkpoints, rows=rows, checkpoint_every=1) as run:
        run.backend.go_on(100)
        for first in (0, 4):
            run.finish(*range(first, first + 4))
            while run.position.announced_version != first // 4 + 2:
                await asyncio.sleep(0)
        await until(lambda: rows.written)
        await settled()
        assert [row["step"] for row in rows.written] == [1]
        checkpoints.may_settle.set()
        await until(lambda: len(rows.written) == 2)
        run.stop.set()
        await promptly(run.task)
        assert rows.written[1]["checkpoint_wait_s"] == checkpoints.metrics[3]["checkpoint_wait_s"]


async def test_a_checkpoint_has_its_steps_numbers_under_other_frameworks_names_too(tmp_path: Path) -> None:
    """The row of a step whose push was interrupted is the checkpoint's."""
    async with running(tmp_path, checkpoint_every=1) as run:
        run.backend.go_on(100)
        run.finish(0, 1, 2, 3)
        await until(lambda: 2 in run.checkpoints.metrics)
        row = run.checkpoints.metrics[2]
        assert row["actor/grad_norm"] == row["grad_norm"] == 1.0
        assert row["timing_s/step"] == row["step_s"]
        run.checkpoints.on_disk.set()
        run.stop.set()
        await promptly(run.task)


async def test_a_run_that_is_stopped_in_a_batch_keeps_its_groups(tmp_path: Path) -> None:
    """The step is aborted; the last checkpoint is of the weights before it and has the groups still to be trained."""
    async with running(tmp_path) as run:
        run.finish(0, 3)
        assert await run.backend.next_call() == [0, 3]
        run.stop.set()
        run.backend.go_on()
        assert await run.backend.next_call() == "abort_step"
        run.checkpoints.on_disk.set()
        await promptly(run.task)
        assert run.checkpoints.moments == [1]
        assert run.position.step == 0
        assert [run.ledger.status(index) for index in (0, 3)] == [GroupStatus.HELD] * 2
        assert run.ledger.checkpoint().state["counts"]["trained"] == 0


async def test_a_stop_does_not_throw_away_a_batch_that_is_there(tmp_path: Path) -> None:
    """All that is missing arrives while the rest is computed: the step is taken, and is the last."""
    async with running(tmp_path) as run:
        run.finish(0)
        assert await run.backend.next_call() == [0]
        run.stop.set()
        run.finish(1, 2, 3)
        run.backend.go_on()
        for what in ([1, 2, 3], "finish_step"):
            assert await run.backend.next_call() == what
            run.backend.go_on()
        run.checkpoints.on_disk.set()
        await promptly(run.task)
        assert (run.position.step, run.checkpoints.moments) == (1, [2])


@pytest.mark.parametrize("part", ["feed", "collect"])
async def test_wrong_data_end_the_run_after_a_checkpoint(tmp_path: Path, part: str) -> None:
    """A row to which the feeder comes steps after the last checkpoint, or groups that fail too often; the step that has
    begun is given up."""
    is_wrong = asyncio.Event()

    async def work() -> None:
        await is_wrong.wait()
        raise DataError("row 7 is wrong")

    async with running(tmp_path, **{part: work}) as run:
        run.finish(0, 1, 2, 3)
        for what in ([0, 1, 2, 3], "finish_step"):
            assert await run.backend.next_call() == what
            run.backend.go_on()
        run.finish(4)
        assert await run.backend.next_call() == [4]
        is_wrong.set()
        await settled()
        run.backend.go_on()
        assert await run.backend.next_call() == "abort_step"
        run.checkpoints.on_disk.set()
        assert await failure_of(run) == "row 7 is wrong"
        assert run.checkpoints.moments == [2]


async def failure_of(run: Run) -> str:
    """The only error of a run that has ended in order."""
    error: BaseException
    with pytest.raises(ExceptionGroup) as caught:
        await promptly(run.task)
    error = caught.value
    while isinstance(error, ExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, DataError)
    assert run.stop.is_set()
    return str(error)


async def test_wrong_data_at_the_start_leave_no_checkpoint(tmp_path: Path) -> None:
    """Of a model that has learned nothing; the corrected data need not fit it."""

    async def feed() -> None:
        raise DataError("row 0 is wrong")

    async with running(tmp_path, feed=feed) as run:
        assert await failure_of(run) == "row 0 is wrong"
        assert run.checkpoints.moments == []


async def test_a_wrong_row_of_an_evaluation_ends_the_run_after_a_checkpoint(tmp_path: Path) -> None:
    """The steps beside which it is played are kept."""

    class Wrong(GatedEvaluator):
        async def evaluate(self, *_: Any, **__: Any) -> None:
            raise DataError("row 5500 of evaluation.sets.held_out is wrong")

    async with running(tmp_path, evaluator=Wrong(1), checkpoint_every=99) as run:
        run.finish(0, 1, 2, 3)
        for what in ([0, 1, 2, 3], "finish_step"):
            assert await run.backend.next_call() == what
            run.backend.go_on()
        run.checkpoints.on_disk.set()
        assert await failure_of(run) == "row 5500 of evaluation.sets.held_out is wrong"
        assert run.checkpoints.moments == [2]


async def test_data_that_only_a_whole_batch_shows_to_be_wrong_cost_their_step(tmp_path: Path) -> None:
    """Such as an advantage of a person's own that is no number; the steps before are kept. Nobody waits to change the
    weights of this last checkpoint."""
    async with running(tmp_path, checkpoint_every=99) as run:
        for first, problem in ((0, None), (4, DataError("advantages must be finite numbers"))):
            run.finish(*range(first, first + 4))
            for what in ([*range(first, first + 4)], "finish_step"):
                assert await run.backend.next_call() == what
                run.backend.problem = problem
                run.backend.go_on()
        assert await run.backend.next_call() == "abort_step"
        run.checkpoints.on_disk.set()
        assert await failure_of(run) == "advantages must be finite numbers"
        assert (run.checkpoints.moments, run.checkpoints.waited_for) == ([2], [False])
