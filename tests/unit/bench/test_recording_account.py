"""What recording counts of its own processor time, and what is said of it."""

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nats.aio.client import Client

from bench.demo.processor_time import SCHEDULERS
from bench.recording import account as account_module
from bench.recording import counted
from bench.recording.account import Account, Part, read_accounts
from bench.recording.report import describe
from bench.recording.turns import Estimate, Turn, Turns, while_on
from penstock.bus import span_stream
from penstock.telemetry import spans
from services.trainer.loop import TrainingLoop
from services.trainer.telemetry import span_files
from services.trainer.telemetry.episodes.files import EpisodeFiles
from services.trainer.telemetry.episodes.log import EpisodeLog


class Clock:
    """The time that a thread has computed, which only tests let pass."""

    def __init__(self) -> None:
        """Start at any time."""
        self.now = 1_000

    def work(self, seconds: int) -> None:
        """Compute for some seconds."""
        self.now += seconds * 10**9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of accounts."""
    clock = Clock()
    monkeypatch.setattr(account_module, "time", SimpleNamespace(thread_time_ns=lambda: clock.now))
    return clock


@pytest.fixture
def account(tmp_path: Path) -> Iterator[Account]:
    """The account of a worker."""
    with closing(Account(tmp_path, "worker")) as account:
        yield account


def seconds(folder: Path) -> dict[tuple[str, str], float]:
    """What other processes read, without what is zero."""
    return {key: total for key, total in read_accounts(folder).items() if total}


def test_calls_count_by_process_and_part(account: Account, clock: Clock, tmp_path: Path) -> None:
    """Also those that fail; what is between them does not, and processes of a kind are added up."""

    def fail() -> None:
        clock.work(2)
        raise ValueError("after two seconds")

    account.timed(Part.RECORD, clock.work)(3)
    clock.work(100)
    with pytest.raises(ValueError, match="after two"):
        account.timed(Part.RECORD, fail)()
    account.timed(Part.SEND, clock.work)(5)
    (tmp_path / "worker.1").write_bytes(bytes(8 * len(Part)))
    (tmp_path / "router.2").write_bytes((7 * 10**9).to_bytes(8, "little") + bytes(8 * (len(Part) - 1)))
    assert seconds(tmp_path) == {("worker", "makes spans"): 5, ("worker", Part.SEND): 5, ("router", "makes spans"): 7}


async def test_a_coroutine_counts_what_it_computes_itself(account: Account, clock: Clock, tmp_path: Path) -> None:
    """Not what other tasks compute while it waits; it returns and is cancelled as without an account."""
    started, is_cancelled = asyncio.Event(), False

    async def work() -> str:
        clock.work(1)
        await asyncio.sleep(0)
        clock.work(2)
        await asyncio.sleep(0)
        return "done"

    async def work_until_cancelled() -> None:
        nonlocal is_cancelled
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled = True
            clock.work(40)

    async def disturb() -> None:
        for _ in range(5):
            clock.work(100)
            await asyncio.sleep(0)

    found, _ = await asyncio.gather(account.timed_steps(Part.SEND, work)(), disturb())
    assert found == "done"
    assert seconds(tmp_path) == {("worker", Part.SEND): 3}
    task = asyncio.create_task(account.timed_steps(Part.SEND, work_until_cancelled)())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_cancelled
    assert seconds(tmp_path) == {("worker", Part.SEND): 43}


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What records, as before after the test."""
    for owner, name in (
        *((spans, "record"), (span_stream, "_keep_sending"), (Client, "_flusher"), (Client, "_read_loop")),
        *((span_files, "_collect"), (span_files.SpanFiles, "append"), (TrainingLoop, "_keep_episodes")),
        *((EpisodeLog, name) for name in ("keep_left_out", "_chosen", "_describe")),
        (EpisodeFiles, "add"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    yield
    spans.close_buffer()


@pytest.mark.usefixtures("recording")
async def test_a_connection_counts_if_it_is_for_spans(
    account: Account, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tasks are as those of any other connection of the process."""

    async def work(_: Client) -> None:
        clock.work(10)

    async def keep_sending() -> None:
        clock.work(1)
        await asyncio.create_task(Client._flusher(Client()))

    monkeypatch.setattr(Client, "_flusher", work)
    monkeypatch.setattr(span_stream, "_keep_sending", keep_sending)
    counted.count_spans(account)
    await asyncio.create_task(Client._flusher(Client()))
    assert seconds(tmp_path) == {}
    keep_counted: Any = span_stream._keep_sending
    await asyncio.create_task(keep_counted())
    assert seconds(tmp_path) == {("worker", Part.SEND): 11}
    await asyncio.create_task(Client._flusher(Client()))
    assert seconds(tmp_path) == {("worker", Part.SEND): 11}


@pytest.mark.usefixtures("recording")
def test_every_part_of_recording_counts(
    account: Account, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once, although one calls another."""
    nothing: Any = None
    for owner, name in ((span_files.SpanFiles, "append"), (EpisodeFiles, "add"), (EpisodeLog, "_chosen")):
        monkeypatch.setattr(owner, name, lambda _: clock.work(1))
    monkeypatch.setattr(EpisodeLog, "_describe", lambda _: clock.work(20))
    monkeypatch.setattr(TrainingLoop, "_keep_episodes", lambda _: clock.work(300))
    monkeypatch.setattr(spans, "record", lambda *_: clock.work(4000))
    counted.count_spans(account)
    counted.count_trainer(account)
    spans.record("turn", 0.0)
    methods: tuple[Any, ...] = (
        *(span_files.SpanFiles.append, EpisodeFiles.add, EpisodeLog._chosen, EpisodeLog._describe),
        TrainingLoop._keep_episodes,
    )
    for method in methods:
        method(nothing)
    assert seconds(tmp_path) == {
        ("worker", Part.RECORD): 4000,
        ("worker", Part.WRITE): 1,
        ("worker", Part.HAND_OVER): 300,
        ("worker", Part.KEEP): 22,
    }


def test_a_turn_has_what_was_counted_in_its_steps() -> None:
    """As the mean of a step; a process may come later."""
    counted_s = {("worker", "makes spans"): 1.0}
    turns = Turns(lambda _: None, dict, lambda: dict(counted_s), num_pairs=1, num_steps=2, settle_s=1.0)
    turns.add_step(0.0)
    counted_s["worker", "makes spans"] = 5.0
    turns.add_step(1.0)
    counted_s |= {("worker", "makes spans"): 8.0, ("router", "makes spans"): 1.0}
    turns.add_step(2.0)
    turns.add_step(3.0)
    (turn,) = turns.measured
    assert turn.recorded_s == {("worker", "makes spans"): 1.5, ("router", "makes spans"): 0.5}
    assert turn.total_recorded_s == 2.0


def test_errors_of_two_measures_add_up() -> None:
    """By hand: 3 and 4 are 5; the fewer values count."""
    found = Estimate(mean=10.0, error=3.0, num=20) + Estimate(mean=5.0, error=4.0, num=12)
    assert found == Estimate(mean=15.0, error=5.0, num=12)
    assert found.share_of(100.0) == Estimate(mean=0.15, error=0.05, num=12)


def turns_of(counted_ms: list[float], server_ms: list[float]) -> list[Turn]:
    """Pairs of turns of 2 core-s, of which a scheduler uses one; what is counted and nats-server's more in each."""
    turns = []
    for found_ms, server in zip(counted_ms, server_ms, strict=True):
        parts = {("worker", "makes spans"): found_ms / 1e3, ("trainer", "writes spans"): 0.001}
        off = {SCHEDULERS: 1.0, "worker": 0.95, "nats-server": 0.05}
        on = off | {"nats-server": 0.05 + server / 1e3}
        turns.append(Turn(is_on=True, step_s=1.0, core_s=on, recorded_s=parts))
        turns.append(Turn(is_on=False, step_s=1.0, core_s=off, recorded_s={("worker", "makes spans"): 0.0002}))
    return turns


@pytest.mark.parametrize(
    ("counted_ms", "said"),
    [
        (9.0, "0.75% ± 0.02% of 2.000 core-s/step, standard errors of 10 turns; at most 1%: yes"),
        (14.0, "1.00% ± 0.02% of 2.000 core-s/step, standard errors of 10 turns; at most 1%: cannot be told"),
        (19.0, "1.25% ± 0.02% of 2.000 core-s/step, standard errors of 10 turns; at most 1%: no"),
    ],
)
def test_the_bar_is_told_by_what_is_counted_and_by_the_server(counted_ms: float, said: str) -> None:
    """By hand: c + 1 ms that are counted, 5 ms of the server, each ± 1.054 / sqrt(10) ms, of 2 core-s."""
    compared = turns_of([0.0] * 10, [4.0, 6.0] * 5)
    counted = turns_of([counted_ms - 1, counted_ms + 1] * 5, [50.0] * 10)
    lines = list(describe(compared, counted, 0.01))
    assert lines[-1] == f"counted, with nats-server: {said}"
    assert f"| all that is counted | | {counted_ms + 1:.2f} ± 0.33 |" in lines
    assert "| nats-server, compared | | 5.00 ± 0.33 |" in lines
    assert f"| all | | {counted_ms + 6:.2f} ± 0.47 |" in lines
    assert f"| worker | makes spans | {counted_ms:.3f} ± 0.333 |" in lines
    assert "| trainer | writes spans | 1.000 ± 0.000 |" in lines


def test_what_turns_without_recording_count_is_not_its_cost() -> None:
    """They only say what connections take that carry nothing."""
    found = while_on(turns_of([9.0, 9.0], [0.0, 0.0]), lambda turn: turn.total_recorded_s)
    assert (found.mean, found.num) == (pytest.approx(0.01), 2)
