"""The training loop computes groups as they come, and lets nothing but the update wait for a checkpoint's files."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.runtime.process import end_task
from services.trainer.admission.gate import Gate
from services.trainer.admission.group_state import Arrival, GroupStatus
from services.trainer.admission.ledger import GroupLedger
from services.trainer.background import Lane
from services.trainer.flow.batch_source import BatchSource
from services.trainer.flow.changes import Changes
from services.trainer.flow.crash_record import CrashRecord
from services.trainer.loop import TrainingLoop
from services.trainer.position import Position
from services.trainer.telemetry.step_metrics import StepClock
from services.trainer.weight_sync.push_report import PushReport
from tests.support.trainer.training_loops import UNUSED, training_loop
from tests.support.waiting import HANG_S, promptly, settled


class GatedBackend:
    """Notes what it is told, and goes on with each chunk and update when the test says so."""

    def __init__(self) -> None:
        """Wait at the first chunk."""
        self._loop = asyncio.get_running_loop()
        self._calls: asyncio.Queue[Any] = asyncio.Queue()
        self._may_go_on = threading.Semaphore(0)

    async def next_call(self) -> Any:
        """What it is doing next: the indices of a chunk, or the name of a method."""
        return await promptly(self._calls.get())

    def go_on(self, num_calls: int = 1) -> None:
        """Let it end what it is doing, and the calls after it."""
        self._may_go_on.release(num_calls)

    def begin_step(self, policy_version: int) -> None:
        """Begin at once."""

    def accumulate(self, groups: Sequence[Any]) -> None:
        """Compute a chunk until the test says that it is enough."""
        self._do([group.index for group in groups])

    def finish_step(self) -> dict[str, float]:
        """Update likewise."""
        self._do("finish_step")
        return {"grad_norm": 1.0, "num_groups": 4.0, "num_groups_without_gradient": 0.0}

    def abort_step(self) -> None:
        """Only note it."""
        self._loop.call_soon_threadsafe(self._calls.put_nowait, "abort_step")

    def _do(self, what: Any) -> None:
        self._loop.call_soon_threadsafe(self._calls.put_nowait, what)
        assert self._may_go_on.acquire(timeout=HANG_S)


@dataclass
class GatedCheckpoints:
    """Writes each checkpoint until the test says that it is on disk."""

    saved_version: int | None = None
    write_s: float | None = None
    moments: list[Any] = field(default_factory=list)
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Of each moment, by its version."""
    on_disk: asyncio.Event = field(default_factory=asyncio.Event)

    def moment(self, position: Position, metrics: Any = UNUSED) -> int:
        """The version."""
        self.metrics[position.version] = metrics
        return position.version

    async def write(self, moment: int) -> None:
        """Wait for the test."""
        self.moments.append(moment)
        await promptly(self.on_disk.wait())

    async def settle(self, moment: int) -> None:
        """It is the newest."""
        self.saved_version = moment


class Loop(TrainingLoop):
    """Without replicas and metrics."""

    async def _copy_weights(self) -> Any:
        return UNUSED

    async def _push(self, weights: Any, metrics: dict[str, Any], clock: Any) -> None:
        self.position.announced_version = self.position.version

    def _describe(self, batch: Sequence[Any]) -> dict[str, Any]:
        return {}

    def _write_samples(self, finished: Any, step: int) -> None:
        pass


@dataclass
class Rows:
    """The metrics that were written."""

    written: list[dict[str, Any]] = field(default_factory=list)

    def write(self, row: dict[str, Any]) -> None:
        """Keep the row."""
        self.written.append(row)

    def log(self, row: dict[str, Any]) -> None:
        """Trackers get the same."""


@dataclass
class PromptPublication:
    """Pushes in no time."""

    position: Position

    async def publish(self, version: int, weights: Any) -> PushReport:
        """Announce it at once."""
        self.position.announced_version = version
        return PushReport(version=version, num_replicas=1, num_failed=0, num_bytes=1, push_s=0.0, pause_s=0.0)


class PushingLoop(TrainingLoop):
    """With pushes and the metrics that follow from them."""

    async def _copy_weights(self) -> Any:
        return SimpleNamespace(version=self.position.version)

    def _describe(self, batch: Sequence[Any]) -> dict[str, Any]:
        return {"num_tokens": 1.0}

    def _write_samples(self, finished: Any, step: int) -> None:
        pass


@dataclass
class SlowSettlements(GatedCheckpoints):
    """Settles when the test says so; the files are written at once."""

    may_settle: asyncio.Event = field(default_factory=asyncio.Event)

    async def write(self, moment: int) -> None:
        """It is on disk."""
        self.moments.append(moment)

    async def settle(self, moment: int) -> None:
        """Wait for the test."""
        await promptly(self.may_settle.wait())
        self.saved_version = moment


@dataclass
class Run:
    """A loop at work, and what the test moves."""

    ledger: GroupLedger[Any, Any]
    changes: Changes
    position: Position
    batches: BatchSource
    backend: GatedBackend
    checkpoints: GatedCheckpoints
    stop: asyncio.Event
    task: asyncio.Task[None]

    def finish(self, *indices: int) -> None:
        """Groups arrive, played with the present version."""
        for index in indices:
            ready = SimpleNamespace(index=index, sequences=(range(3), range(7)))
            group = SimpleNamespace(ready=ready, images={}, played=UNUSED)
            version = self.position.version
            arrival = Arrival(
                index=index, attempt=0, oldest_version=version, newest_version=version, num_tokens=1, group=group
            )
            assert self.ledger.hold(arrival)
        self.changes.notify()


@asynccontextmanager
async def running(
    folder: Path,
    *,
    streams: bool = True,
    groups_per_step: int = 4,
    pass_tokens: int = 0,
    pads_passes: bool = False,
    evaluator: Any = None,
    checkpoints: GatedCheckpoints | None = None,
    rows: Rows | None = None,
    **settings: Any,
) -> AsyncIterator[Run]:
    """A loop of three steps, with max_staleness 1; it pushes if there are `rows` for the metrics."""
    ledger: GroupLedger[Any, Any] = GroupLedger(Gate(max_staleness=1, groups_per_step=groups_per_step))
    position = Position(num_steps=3, step=0, version=1, announced_version=1)
    changes, backend, stop = Changes(), GatedBackend(), asyncio.Event()
    checkpoints = checkpoints or GatedCheckpoints()

    def admit() -> None:
        while ledger.num_admissible(position.num_steps_left, num_steps_ahead=position.num_steps_ahead):
            ledger.admit(position.announced_version or 0)

    batches = BatchSource(
        ledger=ledger,
        feeder=SimpleNamespace(wake=admit),  # type: ignore[arg-type]
        collector=SimpleNamespace(has_everything=UNUSED),  # type: ignore[arg-type]
        changes=changes,
        position=position,
        streak=UNUSED,
        streams=streams,
        pass_tokens=pass_tokens,
        pads_passes=pads_passes,
    )
    loop = training_loop(
        folder,
        batches=batches,
        backend=backend,
        crashes=CrashRecord(folder / "in_hand.json", run_id="run", is_resumed=False),
        checkpoints=checkpoints,
        evaluator=evaluator,
        loop_type=Loop if rows is None else PushingLoop,
        publication=PromptPublication(position),
        publisher=SimpleNamespace(num_live_replicas=1),
        metrics=rows,
        trackers=rows,
        **settings,
    )

    async def train() -> None:
        async with asyncio.TaskGroup() as tasks:
            await loop._train_until(stop, tasks)

    admit()
    task = asyncio.create_task(train())
    yield Run(ledger, changes, position, batches, backend, checkpoints, stop, task)
    backend.go_on(100)
    await end_task(task)


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


async def test_a_checkpoint_holds_up_the_update_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its files are written the next groups are computed; it is of the moment before them."""
    async with running(tmp_path, checkpoint_every=1) as run:
        free = Lane.free

        async def free_at_last(lane: Lane) -> None:
            """The files are on disk when the loop waits for them, not before."""
            if run.checkpoints.moments:
                run.checkpoints.on_disk.set()
            await free(lane)

        monkeypatch.setattr(Lane, "free", free_at_last)
        run.finish(0, 1, 2, 3)
        for what in ([0, 1, 2, 3], "finish_step"):
            assert await run.backend.next_call() == what
            run.backend.go_on()
        run.finish(4, 5, 6, 7)
        assert await run.backend.next_call() == [4, 5, 6, 7]
        assert run.checkpoints.moments == [2]
        assert not run.checkpoints.on_disk.is_set()
        run.backend.go_on()
        assert await run.backend.next_call() == "finish_step"
        assert run.checkpoints.saved_version == 2
        run.backend.go_on()


async def test_the_times_of_a_step_include_its_wait_for_the_checkpoint_before(tmp_path: Path) -> None:
    """Its push ends during that wait; its metrics are written when the step has ended."""
    checkpoints, rows = SlowSettlements(), Rows()
    async with running(tmp_path, checkpoints=checkpoints, rows=rows, checkpoint_every=1) as run:
        run.backend.go_on(100)
        for first in (0, 4):
            run.finish(*range(first, first + 4))
            while run.position.announced_version != first // 4 + 2:
                await asyncio.sleep(0)
        await settled()
        assert [row["step"] for row in rows.written] == [1]
        checkpoints.may_settle.set()
        while len(rows.written) < 2:
            await asyncio.sleep(0)
        assert rows.written[1]["checkpoint_wait_s"] == checkpoints.metrics[3]["checkpoint_wait_s"]


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


class GatedEvaluator:
    """Evaluates the given steps, each until the test says that it is played."""

    is_interrupted = False

    def __init__(self, *steps: int, holds_out: bool = False) -> None:
        """Nothing has been evaluated; whether replicas are held out."""
        self._due = set(steps)
        self.holds_out = holds_out
        self.began: list[tuple[int, int]] = []
        self.done: list[int] = []
        self.is_played = asyncio.Event()

    def is_due(self, step: int) -> bool:
        """Until it is done."""
        return step in self._due

    async def evaluate(
        self, step: int, version: int, *, has_received_all: Any, on_held_out: Callable[[], None] | None
    ) -> None:
        """Wait for the test."""
        self.began.append((step, version))
        if self.holds_out and on_held_out is not None:
            self._due.discard(step)
            on_held_out()
        await promptly(self.is_played.wait())
        self._due.discard(step)
        self.done.append(step)


async def test_an_update_waits_for_the_evaluation_of_the_weights_that_it_changes(tmp_path: Path) -> None:
    """The batch is computed meanwhile; afterwards the run goes on as without one."""
    evaluator = GatedEvaluator(0)
    async with running(tmp_path, evaluator=evaluator) as run:
        run.finish(0, 1, 2, 3)
        assert await run.backend.next_call() == [0, 1, 2, 3]
        assert evaluator.began == [(0, 1)]
        run.backend.go_on(2)
        await settled()
        assert (run.position.step, evaluator.done) == (0, [])
        evaluator.is_played.set()
        assert await run.backend.next_call() == "finish_step"
        assert evaluator.done == [0]


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
