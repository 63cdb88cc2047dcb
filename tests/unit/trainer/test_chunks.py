"""Which groups the training loop computes together while others still arrive."""

import asyncio
from pathlib import Path

import pytest
import structlog

from services.trainer.admission.group_state import GroupStatus
from services.trainer.algorithm.config import AlgorithmConfig
from services.trainer.algorithm.presets import PRESETS
from services.trainer.assembly import _streams
from services.trainer.config import TrainerConfig
from services.trainer.telemetry.step_metrics import StepClock
from tests.support.trainer.runs.gated_loop import running
from tests.support.waiting import promptly, settled


async def test_groups_that_arrive_while_others_are_computed_make_the_next_chunk(tmp_path: Path) -> None:
    """One alone, then what came meanwhile in order of index, then the last; a batch that is there is one chunk."""
    async with running(tmp_path) as run:
        run.finish(2)
        assert await run.backend.next_call() == [2]
        assert run.ledger.status(2) is GroupStatus.TRAINING
        run.finish(7, 1)
        run.backend.go_on()
        assert await run.backend.next_call() == [1, 7]
        run.backend.go_on()
        run.finish(0)
        assert await run.backend.next_call() == [0]
        run.finish(3, 4, 5, 6)
        run.backend.go_on()
        assert await run.backend.next_call() == "finish_step"
        run.backend.go_on()
        assert await run.backend.next_call() == [3, 4, 5, 6]


async def test_a_chunk_is_an_eighth_of_the_batch_or_what_completes_it(tmp_path: Path) -> None:
    """Of 20 groups at least three; two that complete the batch are taken, too."""
    async with running(tmp_path, groups_per_step=20) as run:
        run.finish(*range(6))
        assert await run.backend.next_call() == list(range(6))
        run.stop.set()  # the test takes over
        waiting = asyncio.create_task(run.batches.next_chunk(StepClock()))
        run.finish(6, 7)
        await settled()
        assert not waiting.done()
        run.finish(8)
        assert len(await promptly(waiting)) == 3
        run.finish(*range(9, 18))
        await run.batches.next_chunk(StepClock())
        waiting = asyncio.create_task(run.batches.next_chunk(StepClock()))
        run.finish(18)
        await settled()
        assert not waiting.done()
        run.finish(19)
        assert len(await promptly(waiting)) == 2


async def test_a_chunk_is_a_forward_pass(tmp_path: Path) -> None:
    """Groups of ten tokens, of which three are too few; the fourth makes a pass, of a batch of twelve."""
    async with running(tmp_path, pass_tokens=31, groups_per_step=12) as run:
        run.finish(0, 1)
        run.finish(2)
        await settled()
        assert run.ledger.status(2) is GroupStatus.HELD
        run.finish(3)
        assert await run.backend.next_call() == [0, 1, 2, 3]


async def test_a_chunk_of_less_than_a_forward_pass_is_half_of_what_the_batch_lacks(tmp_path: Path) -> None:
    """Of eight groups four, two, one and one, so that only one is left to compute when the last arrives."""
    async with running(tmp_path, pass_tokens=75, groups_per_step=8) as run:
        for chunk in ([0, 1, 2, 3], [4, 5], [6], [7]):
            for index in chunk[:-1]:
                run.finish(index)
                await settled()
                assert run.ledger.status(index) is GroupStatus.HELD
            run.finish(chunk[-1])
            assert await run.backend.next_call() == chunk
            run.backend.go_on()
        assert await run.backend.next_call() == "finish_step"


async def test_a_batch_that_fits_one_forward_pass_is_computed_at_once(tmp_path: Path) -> None:
    """Each part of it would be a pass of its own."""
    async with running(tmp_path, pass_tokens=40) as run:
        run.finish(0, 1, 2)
        await settled()
        assert run.ledger.status(0) is GroupStatus.HELD
        run.finish(3)
        assert await run.backend.next_call() == [0, 1, 2, 3]


async def test_where_passes_are_padded_a_chunk_is_never_less(tmp_path: Path) -> None:
    """It would take as long as a full one: half of the batch is not enough."""
    async with running(tmp_path, pass_tokens=31, pads_passes=True) as run:
        run.finish(0, 1, 2)
        await settled()
        assert run.ledger.status(0) is GroupStatus.HELD
        run.finish(3)
        assert await run.backend.next_call() == [0, 1, 2, 3]


async def test_without_streaming_nothing_is_computed_before_the_batch_is_there(tmp_path: Path) -> None:
    """Then it is one chunk, in order of index, of the earliest deadlines."""
    async with running(tmp_path, streams=False) as run:
        run.finish(7)
        run.finish(2, 1)
        run.finish(0)
        assert await run.backend.next_call() == [0, 1, 2, 7]


@pytest.mark.parametrize("streaming", [True, False])
def test_batches_are_streamed_unless_a_group_depends_on_the_others(streaming: bool) -> None:
    """The log names the setting for which they are not; nothing is logged where the recipe asks for no streaming."""
    whole = {
        "decoupled_ppo": "algorithm.advantage.norm = 'batch'",
        "cispo": "algorithm.advantage.norm = 'batch_std'",
        "m2po": "algorithm.rejection.kind = 'm2po'",
    }
    for preset in PRESETS:
        with structlog.testing.capture_logs() as logs:
            streams = _streams(TrainerConfig(streaming=streaming), AlgorithmConfig.model_validate({"preset": preset}))
        assert streams is (streaming and preset not in whole), preset
        assert [entry["event"] for entry in logs] == ["batches.not_streamed"] * (streaming and preset in whole)
        assert all(entry["reason"].startswith(f"with {whole[preset]} ") for entry in logs)
