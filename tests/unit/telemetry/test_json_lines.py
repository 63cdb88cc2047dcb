"""Reading files of JSON lines while others write them."""

import errno
import os
from pathlib import Path

import pytest

from penstock.telemetry.json_lines import JsonLinesFollower, append_lines


def test_a_file_that_replaced_another_is_read_from_its_beginning(tmp_path: Path) -> None:
    """Even if it has the inode of the one before, which a file system gives to the next file, and is no shorter."""
    path = tmp_path / "index.jsonl"
    follower = JsonLinesFollower(path)
    path.write_text('{"number": 1}\n{"number": 2}\n{"num')
    assert [row["number"] for row in follower.poll()] == [1, 2]
    inode = path.stat().st_ino
    path.write_text('{"number": 2}\n{"number": 3}\n{"number": 4}\n')  # in place
    assert path.stat().st_ino == inode
    assert [row["number"] for row in follower.poll()] == [2, 3, 4]
    assert follower.generation == 1
    with path.open("a") as file:
        file.write('{"number": 5}\n')
    assert [row["number"] for row in follower.poll()] == [5]
    assert (follower.generation, len(follower.rows)) == (1, 4)


def test_only_the_fields_that_are_kept_take_memory(tmp_path: Path) -> None:
    """Of new lines, of a file that replaced another, and of a line that has none of them."""
    path = tmp_path / "metrics.jsonl"
    follower = JsonLinesFollower(path, keep={"step", "loss"}.__contains__)
    path.write_text('{"step": 1, "loss": 0.5, "groups": [1, 2]}\n')
    assert follower.poll() == follower.rows == [{"step": 1, "loss": 0.5}]
    path.write_text('{"step": 2, "groups": [1, 2]}\n{"groups": [3]}\n')
    assert follower.poll() == follower.rows == [{"step": 2}, {}]


def test_rows_share_the_memory_of_their_keys(tmp_path: Path) -> None:
    """A long run has a hundred thousand rows of the same sixty keys."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"reward_mean": 1.5}\n{"reward_mean": 2.5}\n')
    [(first,), (second,)] = JsonLinesFollower(path).poll()
    assert first is second


def test_lines_that_are_appended_behind_half_of_one_are_whole(tmp_path: Path) -> None:
    """Wherever a writer was killed: the lines before it are there, and those of the next writer."""
    path, whole = tmp_path / "metrics.jsonl", b'{"step": 1}\n{"step": 2}\n'
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        offset = append_lines(path, b'{"step": 8}\n{"step": 9}\n')
        num_before = (whole[:cut] + b"\n").count(b"}\n")  # one that lacks only its end is whole
        assert [row["step"] for row in JsonLinesFollower(path).poll()] == [*range(1, num_before + 1), 8, 9]
        assert path.read_bytes()[offset:] == b'{"step": 8}\n{"step": 9}\n'


def test_lines_are_appended_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk is full in the middle of them, and where the system writes them in parts."""
    path, write = tmp_path / "metrics.jsonl", os.write
    append_lines(path, b'{"step": 1}\n')

    def write_a_part(file: int, data: memoryview) -> int:
        return write(file, data[:5])

    def fill(file: int, data: memoryview) -> int:
        if len(data) < 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_a_part(file, data)

    with monkeypatch.context() as full:
        full.setattr(os, "write", fill)
        with pytest.raises(OSError, match="No space left"):
            append_lines(path, b'{"step": 2}\n')
        full.setattr(os, "write", write_a_part)
        append_lines(path, b'{"step": 3}\n')
    assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n'
