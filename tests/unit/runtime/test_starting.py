"""Programs that cannot be started, and what a person is told of it."""

import asyncio
import errno
import os

import pytest

from penstock.errors import SetupError
from penstock.runtime.starting import explained, start_program


async def test_a_thread_that_is_lacking_is_a_process_that_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both count towards one limit, and asyncio waits for each program in a thread of its own."""

    async def start(*_: str) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    with pytest.raises(BlockingIOError, match="can't start new thread"):
        await start_program("true")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EAGAIN, "ulimit -u"),
        (errno.ENOMEM, "free memory"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "sysctl fs.file-max"),
    ],
    ids=errno.errorcode.get,
)
def test_what_a_machine_lacks_is_told_with_the_remedy(number: int, remedy: str) -> None:
    """In one line; another error stays what it is."""
    told = explained("trainer", OSError(number, os.strerror(number)))
    assert isinstance(told, SetupError)
    assert str(told).startswith(f"trainer could not be started: {os.strerror(number)}; ")
    assert remedy in str(told)
    missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "nats-server")
    assert explained("nats", missing) is missing
