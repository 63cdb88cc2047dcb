"""Groups that should have been kept and were not: counted, told, and no trouble for the run."""

import itertools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from penstock.records import Group
from services.trainer.telemetry.episodes.description import describe_group
from tests.support.trainer.episode_logs import group, index_of, open_log
from tests.support.waiting import HANG_S


def test_a_full_disk_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not kept is counted."""
    log = open_log(tmp_path, keep="all")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log._files, "add", fail)
    log.keep_trained(1, 1, [group(0), group(1)], None)
    log.keep_left_out("failed", "no reason", group(2).played)
    log.close()
    assert log.num_dropped == 3


def test_a_group_that_cannot_be_written_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone is counted and named; an error in choosing costs the batch, of which none is known to be kept."""
    log = open_log(tmp_path, keep="all")

    def fail(played: Group, *rest: Any, **more: Any) -> Any:
        if played.id.index == 1:
            raise RuntimeError("no such token")
        return describe_group(played, *rest, **more)

    monkeypatch.setattr("services.trainer.telemetry.episodes.log.describe_group", fail)
    with structlog.testing.capture_logs() as events:
        log.keep_trained(1, 1, [group(index) for index in range(4)], None)
        tokens: Any = SimpleNamespace(sample_N=None)
        log.keep_trained(2, 2, [group(4), group(5)], tokens)
        log.keep_trained(3, 3, [group(6)], None)
        log.close()
    assert [entry["index"] for entry in index_of(tmp_path)] == [0, 2, 3, 6]
    assert log.num_dropped == 1 + 2
    first, last = events
    assert (first["event"], first["group"]) == ("episodes.not_kept", group(1).played.id.message)
    assert (last["event"], last["num_groups"], last["num_unwritten_at_end"]) == ("episodes.dropped", 3, 0)


def test_a_portion_that_cannot_be_written_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its groups are counted, and no other."""
    log = open_log(tmp_path, keep="all")
    add, calls = log._files.add, itertools.count()

    def fail_second(*args: Any) -> None:
        if next(calls) == 1:
            raise OSError(28, "No space left on device")
        add(*args)

    monkeypatch.setattr(log._files, "add", fail_second)
    log.keep_trained(1, 1, [group(0), group(1)], None)
    log.keep_trained(2, 2, [group(2), group(3), group(4)], None)
    log.keep_trained(3, 3, [group(5)], None)
    log.close()
    assert [entry["index"] for entry in index_of(tmp_path)] == [0, 1, 5]
    assert log.num_dropped == 3


def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that hangs takes no more memory than a few batches, and the loop never waits for it."""
    monkeypatch.setattr("services.trainer.telemetry.episodes.log._MAX_WAITING_TOKENS", 100)
    log = open_log(tmp_path, keep="all")
    with monkeypatch.context() as hanging:
        hanging.setattr(log, "_waiting", SimpleNamespace(put=lambda job: None))
        for index in range(50):
            log.keep_left_out("stale", "old", group(index).played)
    assert log.num_dropped > 30
    log.close()


def test_what_is_not_written_at_the_end_is_counted_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk hangs, and the trainer does not wait for it without end; what comes later is counted, too."""
    monkeypatch.setattr("services.trainer.telemetry.episodes.log._CLOSE_TIMEOUT_S", 0.0)
    log, hangs, may_go_on = open_log(tmp_path, keep="all"), threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        hangs.set()
        may_go_on.wait(HANG_S)

    monkeypatch.setattr(log._files, "add", hang)
    with structlog.testing.capture_logs() as events:
        log.keep_trained(1, 1, [group(0), group(1)], None)
        log.keep_left_out("stale", "old", group(2).played)
        assert hangs.wait(HANG_S)
        for _ in range(2):
            log.close()
        log.keep_left_out("stale", "old", group(3).played)
    may_go_on.set()
    log._thread.join(HANG_S)
    assert log.num_dropped == 4
    assert [(each["event"], each["num_groups"], each["num_unwritten_at_end"]) for each in events] == [
        ("episodes.dropped", 3, 3)
    ]


def test_only_what_is_not_written_at_the_end_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step that is being written: not what the disk has, nor what was not to be kept."""
    monkeypatch.setattr("services.trainer.telemetry.episodes.log._CLOSE_TIMEOUT_S", 0.0)
    monkeypatch.setattr("services.trainer.telemetry.episodes.log._PORTION_BYTES", 1)
    log, hangs, may_go_on = open_log(tmp_path, keep="all"), threading.Event(), threading.Event()
    add, chosen, portions = log._files.add, log._chosen, itertools.count()

    def hang_then_fail(*args: Any) -> None:
        if next(portions) == 0:
            return add(*args)
        hangs.set()
        may_go_on.wait(HANG_S)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log._files, "add", hang_then_fail)
    monkeypatch.setattr(log, "_chosen", lambda batch: chosen(batch)[:3])
    log.keep_trained(1, 1, [group(index) for index in range(5)], None)
    assert hangs.wait(HANG_S)
    log.close()
    assert log.num_dropped == 2
    may_go_on.set()
    log._thread.join(HANG_S)
    assert log.num_dropped == 2


def test_what_waits_at_the_end_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk takes it; then nothing was dropped, and no line says so."""
    log, is_closing = open_log(tmp_path, keep="all"), threading.Event()
    add, put = log._files.add, log._waiting.put

    def write_at_the_end(*args: Any) -> None:
        assert is_closing.wait(HANG_S)
        add(*args)

    def note_end(job: Any) -> None:
        put(job)
        if job is None:
            is_closing.set()

    monkeypatch.setattr(log._files, "add", write_at_the_end)
    monkeypatch.setattr(log, "_waiting", SimpleNamespace(put=note_end, get=log._waiting.get))
    with structlog.testing.capture_logs() as events:
        for index in range(3):
            log.keep_left_out("stale", "old", group(index).played)
        log.close()
    assert [entry["index"] for entry in index_of(tmp_path)] == [0, 1, 2]
    assert (log.num_dropped, events) == (0, [])
