"""Lines of `penstock score` that are nearly too much to read, and lines that do not come."""

import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.score.lines import Line, LineReader
from tests.support.waiting import HANG_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the lines are."""
    return tmp_path / "lines.jsonl"


def read(path: Path, *texts: str) -> list[Line]:
    path.write_text("\n".join(texts))
    with io.FileIO(path) as source:
        reader = LineReader(source, name="in", profile="math", known_profiles={"math"}, max_lines=500)
        return [line for window in reader.windows() for line in window]


def test_a_long_deadline_is_the_longest(path: Path) -> None:
    """However many digits it has."""
    (line,) = read(path, f'{{"id": 1, "gold": "5", "response": "5", "deadline_s": 1{"0" * 400}}}')
    assert line.item is not None
    assert line.item.deadline_s == 1e6


def test_a_field_that_is_nested_as_deeply_as_can_be_read_is_told(path: Path) -> None:
    """To show it takes a few more calls than to read it."""
    depths = range(900, 1000)
    lines = read(path, *(f'{{"id": 1, "gold": "5", "response": {"[" * n}{"]" * n}}}' for n in depths))
    assert len(lines) == len(depths)
    assert all(line.item is None and line.error.startswith("in:") for line in lines)


class InterruptError(Exception):
    """A signal was handled. KeyboardInterrupt would end the tests."""


def test_a_signal_that_interrupts_no_call_ends_the_wait_for_input() -> None:
    """As in the moment before the wait. Here it comes to another thread, and Python handles it in this one."""
    reading, writing = os.pipe()
    was_handled = threading.Event()

    def handle(*_: object) -> None:
        raise InterruptError

    def interrupt() -> None:
        time.sleep(0.5)  # by then the main thread waits; if not, the test proves less
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        was_handled.wait(HANG_S)
        os.close(writing)  # what waits for input without an end would never return

    def wait_interrupted(windows: Iterator[list[Line]]) -> None:
        other.start()
        next(windows)

    handler = signal.signal(signal.SIGUSR1, handle)
    other = threading.Thread(target=interrupt)
    try:
        with io.FileIO(reading) as source:
            windows = LineReader(source, name="in", profile="math", known_profiles={"math"}, max_lines=500).windows()
            assert next(windows) == []  # the input pauses
            with pytest.raises(InterruptError):
                wait_interrupted(windows)
            is_open = other.is_alive()
    finally:
        was_handled.set()
        other.join()
        signal.signal(signal.SIGUSR1, handler)
    assert is_open
