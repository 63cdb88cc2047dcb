"""When the training loop evaluates, and what waits for it."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.telemetry import spans
from penstock.v1 import trainer_pb2
from services.trainer.admission.group_state import GroupStatus
from tests.support.trainer.runs.gated_loop import GatedEvaluator, running
from tests.support.waiting import promptly, settled, until


async def test_an_update_waits_for_the_evaluation_of_the_weights_that_it_changes(tmp_path: Path) -> None:
    """The batch is computed meanwhile; afterwards the run goes on as without one."""
    evaluator = GatedEvaluator(0)
    async with running(tmp_path, evaluator=evaluator) as run:
        run.finish(0, 1, 2, 3)
        assert await run.backend.next_call() == [0, 1, 2, 3]
        assert evaluator.began == [(0, 1)]
        run.backend.go_on(2)
        await until(lambda: run.progress.phase == trainer_pb2.RUN_PHASE_EVALUATING)
        assert (run.position.step, evaluator.done) == (0, [])
        assert run.progress.evaluated_at == 0.0
        evaluator.is_played.set()
        assert await run.backend.next_call() == "finish_step"
        assert evaluator.done == [0]
        assert run.progress.phase == trainer_pb2.RUN_PHASE_TRAINING
        assert run.progress.evaluated_at > 0.0


async def test_steps_go_on_beside_an_evaluation_that_holds_replicas_out(tmp_path: Path) -> None:
    """The next evaluation waits for the end of the one before, and so does the end of the run."""
    evaluator = GatedEvaluator(0, 2, holds_out=True)
    async with running(tmp_path, evaluator=evaluator) as run:
        run.checkpoints.on_disk.set()
        run.backend.go_on(100)
        for first in (0, 4):
            run.finish(*range(first, first + 4))
            while run.position.step < first // 4 + 1:
                await asyncio.sleep(0)
        run.finish(8, 9, 10, 11)
        await settled()
        assert (run.position.step, evaluator.began, evaluator.done) == (2, [(0, 1)], [])
        evaluator.is_played.set()
        await promptly(run.task)
        assert (run.position.step, evaluator.began, evaluator.done) == (3, [(0, 1), (2, 3)], [0, 2])


@pytest.fixture
def buffer() -> Iterator[spans.SpanBuffer]:
    """The spans of this process."""
    yield spans.open_buffer("trainer")
    spans.close_buffer()


@pytest.mark.parametrize("is_resumed", [False, True])
async def test_an_evaluation_has_a_span(tmp_path: Path, buffer: spans.SpanBuffer, is_resumed: bool) -> None:
    """Also one that goes on after a restart, beside the steps: the span of a trainer that was killed never ends."""
    evaluator = GatedEvaluator(3, holds_out=True, interrupted=(0, 1)) if is_resumed else GatedEvaluator(3)
    async with running(tmp_path, evaluator=evaluator) as run:
        run.checkpoints.on_disk.set()
        run.backend.go_on(100)
        for first in (0, 4, 8):
            run.finish(*range(first, first + 4))
            while run.position.step < first // 4 + 1:
                await asyncio.sleep(0)
        evaluator.is_played.set()
        await promptly(run.task)
    batch = json.loads(buffer.take_batch(len(buffer))[0])
    found = [about for name, _, _, about in batch["spans"] if name == "evaluation"]
    resumed = [{"step": 0, "version": 1}] if is_resumed else []
    assert found == [*resumed, {"step": 3, "version": 4}]
    assert evaluator.done == [each["step"] for each in found]


async def test_waiting_for_an_evaluation_is_the_phase_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """Alerts about steps that do not come excuse this phase only."""
    evaluator = GatedEvaluator(0, 2, holds_out=True)
    async with running(tmp_path, evaluator=evaluator, checkpoint_every=2) as run:
        run.backend.go_on(100)
        for first in (0, 4):
            run.finish(*range(first, first + 4))
            while run.position.step < first // 4 + 1:
                await asyncio.sleep(0)
        await until(lambda: run.checkpoints.moments)
        assert (run.checkpoints.moments, evaluator.began) == ([3], [(0, 1)])
        assert run.progress.phase == trainer_pb2.RUN_PHASE_EVALUATING
        run.checkpoints.on_disk.set()
        evaluator.is_played.set()
        run.finish(8, 9, 10, 11)
        await promptly(run.task)


async def test_an_evaluation_that_is_stopped_comes_again(tmp_path: Path) -> None:
    """Its step's weights are what the run continues from: the batch that was computed meanwhile is not trained."""
    evaluator = GatedEvaluator(0)
    async with running(tmp_path, evaluator=evaluator) as run:
        run.checkpoints.saved_version = 1
        run.finish(0, 1, 2, 3)
        assert await run.backend.next_call() == [0, 1, 2, 3]
        run.backend.go_on()
        run.stop.set()
        assert await run.backend.next_call() == "abort_step"
        await promptly(run.task)
        assert (run.position.step, evaluator.done, evaluator.is_due(0)) == (0, [], True)
        assert {run.ledger.status(index) for index in range(4)} == {GroupStatus.HELD}


async def test_without_a_stop_a_run_goes_on(tmp_path: Path) -> None:
    """Whatever the evaluator says while a batch is computed: a run that ends before its last step was stopped."""
    evaluator = GatedEvaluator(0, holds_out=True)
    async with running(tmp_path, evaluator=evaluator) as run:
        run.checkpoints.on_disk.set()
        run.finish(0, 1, 2, 3)
        assert await run.backend.next_call() == [0, 1, 2, 3]
        evaluator.is_due = lambda step: True  # type: ignore[method-assign]
        run.backend.go_on(2)
        assert await run.backend.next_call() == "finish_step"


async def test_the_last_evaluation_has_a_phase_of_its_own(tmp_path: Path) -> None:
    """Nothing else is done after the last step, and no step is missed; beside steps it has none."""
    evaluator = GatedEvaluator(0, 3, holds_out=True)
    async with running(tmp_path, evaluator=evaluator) as run:
        run.checkpoints.on_disk.set()
        run.backend.go_on(100)
        for first in (0, 4, 8):
            run.finish(*range(first, first + 4))
            while run.position.step < first // 4 + 1:
                await asyncio.sleep(0)
                assert run.progress.phase != trainer_pb2.RUN_PHASE_EVALUATING
        await settled()
        assert (run.progress.phase, evaluator.began) == (trainer_pb2.RUN_PHASE_EVALUATING, [(0, 1)])
        evaluator.is_played.set()
        await promptly(run.task)
        assert evaluator.done == [0, 3]


async def test_the_last_weights_are_evaluated_once_they_are_saved(tmp_path: Path) -> None:
    """A run that dies in its last evaluation then has it before it when it is continued."""
    evaluator = GatedEvaluator(3)
    evaluator.is_played.set()
    async with running(tmp_path, evaluator=evaluator) as run:
        run.checkpoints.on_disk.set()
        run.backend.go_on(100)
        for first in (0, 4, 8):
            run.finish(*range(first, first + 4))
            while run.position.step < first // 4 + 1:
                await asyncio.sleep(0)
        await promptly(run.task)
        assert (run.checkpoints.saved_version, evaluator.began, evaluator.done) == (4, [(3, 4)], [3])
