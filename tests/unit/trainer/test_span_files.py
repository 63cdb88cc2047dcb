"""The files of spans in the run folder: readable however they end, and bounded."""

import json
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.bus.span_stream import StoredBatch
from services.trainer.telemetry.span_files import SpanFiles
from services.view.trace_reader import TraceReader


def _batch(sequence: int) -> StoredBatch:
    batch = {
        "process": "worker-0", "host": "a", "pid": 1, "start": "abc", "number": sequence, "dropped": 0,
        "sent": 1000.0, "spans": [["turn", 999.0 + sequence, 0.5, {"turn": sequence}]],
    }  # fmt: skip
    return StoredBatch(sequence=sequence, stored_at=1000.0, payload=json.dumps(batch).encode())


def test_a_restarted_trainer_continues_behind_the_last_whole_line(tmp_path: Path) -> None:
    """Cut at any byte, the folder is read up to its last whole line, and nothing is read twice from the bus."""
    SpanFiles(tmp_path, max_bytes=2**20).append([_batch(1), _batch(2)])
    (path,) = (tmp_path / "trace").glob("spans-*")
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        expected = 2 if size == len(whole) else 1 if size >= first else None
        assert SpanFiles(tmp_path, max_bytes=2**20).last_sequence() == expected
        assert len(TraceReader(tmp_path).read().spans) == (expected or 0)


def test_a_new_file_is_begun_behind_one_that_was_cut(tmp_path: Path) -> None:
    """A line that follows half of another one is not lost with it."""
    SpanFiles(tmp_path, max_bytes=2**20).append([_batch(1)])
    (path,) = (tmp_path / "trace").glob("spans-*")
    path.rename(path.with_name("spans-0000000000001.jsonl"))
    with path.with_name("spans-0000000000001.jsonl").open("ab") as file:
        file.write(b'{"sequence":2,"stor')
    SpanFiles(tmp_path, max_bytes=2**20).append([_batch(2)])
    assert [span.attributes["turn"] for span in TraceReader(tmp_path).read().spans] == [1, 2]


def test_the_oldest_files_are_deleted(tmp_path: Path) -> None:
    """The folder stays below its bound."""
    for sequence in range(1, 60):
        files = SpanFiles(tmp_path, max_bytes=4000)
        files.append([_batch(sequence)])
        (path,) = [each for each in (tmp_path / "trace").glob("spans-*") if not each.stem.startswith("spans-0000")]
        path.rename(path.with_name(f"spans-{sequence:013d}.jsonl"))
    paths = sorted((tmp_path / "trace").glob("spans-*"))
    assert sum(path.stat().st_size for path in paths) <= 4000
    assert files.last_sequence() == 59
    assert len(paths) > 5


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond it, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_files_that_somebody_deletes_are_begun_anew(tmp_path: Path) -> None:
    """To make room, while the run goes on; with their folder too."""
    files = SpanFiles(tmp_path, max_bytes=2**20)
    files.append([_batch(1)])
    shutil.rmtree(tmp_path / "trace")
    files.append([_batch(2)])
    files.append([_batch(3)])
    assert [span.attributes["turn"] for span in TraceReader(tmp_path).read().spans] == [2, 3]


def test_what_a_full_disk_cuts_off_is_written_once_there_is_room(tmp_path: Path) -> None:
    """Nothing is there twice, and no line is lost with half of another one."""
    files = SpanFiles(tmp_path, max_bytes=2**20)
    files.append([_batch(1)])
    (path,) = (tmp_path / "trace").glob("spans-*")
    with file_size_limit(path.stat().st_size + 20), pytest.raises(OSError, match="File too large"):
        files.append([_batch(2), _batch(3)])
    files.append([_batch(2), _batch(3)])
    assert [span.attributes["turn"] for span in TraceReader(tmp_path).read().spans] == [1, 2, 3]
