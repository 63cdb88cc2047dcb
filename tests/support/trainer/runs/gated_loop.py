"""A training loop whose computing, checkpoints and evaluations go on when the test says so."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.runtime.process import end_task
from services.trainer.admission.gate import Gate
from services.trainer.admission.group_state import Arrival
from services.trainer.admission.ledger import GroupLedger
from services.trainer.backend.base import Measure
from services.trainer.flow.batch_source import BatchSource
from services.trainer.flow.changes import Changes
from services.trainer.flow.crash_record import CrashRecord
from services.trainer.loop import TrainingLoop
from services.trainer.main import _run_beside_its_tasks
from services.trainer.position import Position
from services.trainer.telemetry.progress import Progress
from services.trainer.weight_sync.push_report import PushReport
from tests.support.trainer.runs.training_loops import UNUSED, training_loop
from tests.support.waiting import HANG_S, promptly


class GatedBackend:
    """Notes what it is told, and goes on with each chunk and update when the test says so."""

    def __init__(self) -> None:
        """Wait at the first chunk."""
        self._loop = asyncio.get_running_loop()
        self._calls: asyncio.Queue[Any] = asyncio.Queue()
        self._may_go_on = threading.Semaphore(0)
        self.problem: Exception | None = None
        """What the end of a step raises."""
        self.may_measure = threading.Event()
        """Set, unless metrics take until the test sets it."""
        self.may_measure.set()

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

    def add_demonstrations(self, sequences: Sequence[Any]) -> None:
        """Only note them."""
        self._loop.call_soon_threadsafe(self._calls.put_nowait, list(sequences))

    def finish_step(self) -> Measure:
        """Update likewise."""
        self._do("finish_step")
        if self.problem is not None:
            raise self.problem
        return self.measure

    def measure(self) -> dict[str, float]:
        """Compute metrics until the test says that it is enough."""
        assert self.may_measure.wait(HANG_S)
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
    moments: list[int] = field(default_factory=list)
    """The version of each checkpoint."""
    waited_for: list[bool] = field(default_factory=list)
    """Of each checkpoint, whether somebody waits to change the weights."""
    metrics: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Of each moment, by its version."""
    on_disk: asyncio.Event = field(default_factory=asyncio.Event)
    copies: bool = False
    """Whether the weights may change while it is written."""

    def moment(self, position: Position, metrics: Any = UNUSED) -> SimpleNamespace:
        """Step and version."""
        self.metrics[position.version] = metrics
        return SimpleNamespace(step=position.step, version=position.version)

    async def write(self, moment: SimpleNamespace, *, on_copied: Callable[[], None] | None) -> None:
        """Wait for the test."""
        self.moments.append(moment.version)
        self.waited_for.append(on_copied is not None)
        if self.copies and on_copied is not None:
            on_copied()
        await promptly(self.on_disk.wait())

    async def settle(self, moment: SimpleNamespace) -> None:
        """It is the newest."""
        self.saved_version = moment.version


class Loop(TrainingLoop):
    """Without replicas and metrics."""

    async def _copy_weights(self) -> Any:
        return UNUSED

    async def _push(self, weights: Any, measured: Any, clock: Any) -> None:
        self.position.announced_version = self.position.version

    def _describe(self, batch: Sequence[Any]) -> dict[str, Any]:
        return {}


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
        return PushReport(version=version, num_replicas=1, num_failed=0, num_bytes=1, push_s=0.0)


@dataclass
class GatedPublication(PromptPublication):
    """Pushes each version until the test says that it is pushed."""

    begun: list[int] = field(default_factory=list)
    """The versions whose push has begun."""
    may_end: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Released once for each push that may end."""

    async def publish(self, version: int, weights: Any) -> PushReport:
        """Wait for the test."""
        self.begun.append(version)
        await promptly(self.may_end.acquire())
        return await super().publish(version, weights)


class PushingLoop(TrainingLoop):
    """With pushes and the metrics that follow from them."""

    async def _copy_weights(self) -> Any:
        return SimpleNamespace(version=self.position.version)

    def _describe(self, batch: Sequence[Any]) -> dict[str, Any]:
        return {"num_tokens": 1.0}


@dataclass
class SlowSettlements(GatedCheckpoints):
    """Settles when the test says so; the files are written at once."""

    may_settle: asyncio.Event = field(default_factory=asyncio.Event)

    async def write(self, moment: SimpleNamespace, *, on_copied: Callable[[], None] | None) -> None:
        """It is on disk."""
        self.moments.append(moment.version)

    async def settle(self, moment: SimpleNamespace) -> None:
        """Wait for the test."""
        await promptly(self.may_settle.wait())
        self.saved_version = moment.version


class GatedEvaluator:
    """Evaluates the given steps, each until the test says that it is played."""

    def __init__(self, *steps: int, holds_out: bool = False, interrupted: tuple[int, int] | None = None) -> None:
        """Nothing has been evaluated; whether replicas are held out, and what an earlier trainer began."""
        self._due = set(steps)
        self.holds_out = holds_out
        self.interrupted = interrupted
        self.began: list[tuple[int, int]] = []
        self.done: list[int] = []
        self.is_played = asyncio.Event()

    def is_due(self, step: int) -> bool:
        """Until it is done."""
        return step in self._due

    async def go_on(self, *, has_received_all: Any) -> None:
        """Wait for the test."""
        assert self.interrupted is not None
        await promptly(self.is_played.wait())
        self.done.append(self.interrupted[0])

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


@dataclass
class Run:
    """A loop at work, and what the test moves."""

    ledger: GroupLedger[Any, Any]
    changes: Changes
    position: Position
    progress: Progress
    batches: BatchSource
    backend: GatedBackend
    checkpoints: GatedCheckpoints
    stop: asyncio.Event
    task: asyncio.Task[None]

    def finish(self, *indices: int) -> None:
        """Groups arrive, played with the present version."""
        for index in indices:
            ready = SimpleNamespace(index=index, sequences=(range(3), range(7)))
            played = SimpleNamespace(id=SimpleNamespace(message=f"run/{index}/0/epoch"))
            group = SimpleNamespace(ready=ready, images={}, played=played, received_at=0.0)
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
    publication: Callable[[Position], Any] = PromptPublication,
    feed: Callable[[], Awaitable[None]] | None = None,
    collect: Callable[[], Awaitable[None]] | None = None,
    max_staleness: int = 1,
    **settings: Any,
) -> AsyncIterator[Run]:
    """A loop of three steps; it pushes if there are `rows` for the metrics, and runs beside a feeder and a collector if
    there is `feed` or `collect`."""
    gate = Gate(max_staleness=max_staleness, groups_per_step=groups_per_step)
    ledger: GroupLedger[Any, Any] = GroupLedger(gate)
    position = Position(num_steps=3, step=0, version=1, announced_version=1)
    changes, backend, stop = Changes(), GatedBackend(), asyncio.Event()
    checkpoints = checkpoints or GatedCheckpoints()

    def admit() -> None:
        while ledger.num_admissible(position.num_steps_left, num_steps_ahead=position.num_steps_ahead):
            ledger.admit(position.announced_version or 0)

    batches = BatchSource(
        ledger=ledger,
        feeder=SimpleNamespace(wake=admit, run=feed or asyncio.Event().wait, num_unsent=0),  # type: ignore[arg-type]
        collector=SimpleNamespace(has_everything=UNUSED, run=collect or asyncio.Event().wait),  # type: ignore[arg-type]
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
        publication=publication(position),
        publisher=SimpleNamespace(num_live_replicas=1, keep_current=asyncio.Event().wait),
        metrics=rows,
        trackers=rows,
        **settings,
    )

    async def train() -> None:
        if feed is not None or collect is not None:
            await _run_beside_its_tasks(loop, stop)
            return
        async with asyncio.TaskGroup() as tasks:
            await loop._train_until(stop, tasks)

    admit()
    task = asyncio.create_task(train())
    try:
        yield Run(ledger, changes, position, loop.progress, batches, backend, checkpoints, stop, task)
    finally:
        backend.go_on(100)
        await end_task(task)
