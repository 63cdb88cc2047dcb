"""A push goes on beside the next step, and no two pushes at once."""

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.trainer.position import Position
from services.trainer.telemetry.trace import FILE
from tests.support.trainer.runs.gated_loop import GatedPublication, Rows, running
from tests.support.trainer.runs.manual_clock import ManualClock
from tests.support.waiting import HANG_S, promptly, settled


async def test_the_next_step_is_computed_beside_a_push_and_its_own_push_waits(tmp_path: Path) -> None:
    """Chunks and update of the second step come while the first one's weights are on their way; only what it waits
    after that is `push_wait_s`."""
    pushes: list[GatedPublication] = []

    def gated(position: Position) -> GatedPublication:
        pushes.append(GatedPublication(position))
        return pushes[0]

    rows, clock = Rows(), ManualClock()
    async with running(tmp_path, rows=rows, publication=gated, now=clock) as run:
        for first in (0, 4):
            run.finish(*range(first, first + 4))
            for what in ([*range(first, first + 4)], "finish_step"):
                assert await run.backend.next_call() == what
                clock.move(1.0)
                run.backend.go_on()
        await clock.read()
        clock.move(8.0)
        assert run.position.step == 2
        assert pushes[0].begun == [2]
        assert rows.written == []
        pushes[0].may_end.release()
        while len(pushes[0].begun) < 2:
            await settled()
        assert (pushes[0].begun, run.position.announced_version) == ([2, 3], 2)
        run.checkpoints.on_disk.set()
        run.stop.set()
        pushes[0].may_end.release()
        await promptly(run.task)
        assert [row["step"] for row in rows.written] == [1, 2]
        assert [row["push_wait_s"] for row in rows.written] == [0.0, 8.0]
        assert [row["train_s"] for row in rows.written] == [2.0, 2.0]


async def test_metrics_hold_up_neither_a_push_nor_the_next_step(tmp_path: Path) -> None:
    """They are computed beside both; a row has them, and a checkpoint that is due waits for them."""
    pushes: list[GatedPublication] = []

    def gated(position: Position) -> GatedPublication:
        pushes.append(GatedPublication(position))
        return pushes[0]

    rows = Rows()
    async with running(tmp_path, rows=rows, publication=gated) as run:
        run.backend.may_measure.clear()
        for first in (0, 4):
            run.finish(*range(first, first + 4))
            for what in ([*range(first, first + 4)], "finish_step"):
                assert await run.backend.next_call() == what
                run.backend.go_on()
        assert (pushes[0].begun, rows.written) == ([2], [])
        run.backend.may_measure.set()
        run.checkpoints.on_disk.set()
        run.stop.set()
        pushes[0].may_end.release()
        pushes[0].may_end.release()
        await promptly(run.task)
    assert [(row["step"], row["num_groups"]) for row in rows.written] == [(1, 4.0), (2, 4.0)]


@dataclass
class SlowDisk(Rows):
    """Takes no row until the test says so."""

    may_write: threading.Event = field(default_factory=threading.Event)

    def write(self, row: dict[str, Any]) -> None:
        """Wait for the test."""
        assert self.may_write.wait(HANG_S)
        super().write(row)


async def test_a_disk_that_hangs_holds_up_no_group(tmp_path: Path) -> None:
    """The next step is computed while the last one's row is not written; the rows come in their order."""
    disk = SlowDisk()
    async with running(tmp_path, rows=disk) as run:
        for first in (0, 4):
            run.finish(*range(first, first + 4))
            for what in ([*range(first, first + 4)], "finish_step"):
                assert await run.backend.next_call() == what
                run.backend.go_on()
        assert disk.written == []
        run.checkpoints.on_disk.set()
        run.stop.set()
        disk.may_write.set()
        await promptly(run.task)
    assert [row["step"] for row in disk.written] == [1, 2]
    assert [json.loads(line)["step"] for line in (tmp_path / FILE).read_text().splitlines()] == [1, 2]
