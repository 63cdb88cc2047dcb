"""Programs that cannot be started, and what a person is told of it."""

import asyncio
import errno
import os

import pytest

from penstock.errors import SetupError
from penstock.runtime.starting import explained, start_program


async def test_a_program_that_cannot_be_waited_for_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio waits for each program in a thread of its own, which it starts after the program: no OSError, which
    would mean that there is no program."""

    async def start(*_: str) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    with pytest.raises(SetupError, match=r"true cannot be waited for: can't start new thread; .*ulimit -u"):
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
