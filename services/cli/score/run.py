"""`penstock score`: reads responses and writes their verdicts in order, with a few windows in memory."""

import collections
import contextlib
import io
import os
import signal
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from penstock.clients import RewardClient
from penstock.errors import ConfigError, DataError
from penstock.runtime.security import Security
from penstock.v1 import reward_pb2
from services.cli.interruption import interruptible
from services.cli.json_lines import write_all
from services.cli.score.lines import INVALID, Line, LineReader, status_of, write_invalid, write_verdict
from services.cli.score.reward_caller import RewardCaller, Service, Verdicts
from services.reward.config import RewardConfig

_WINDOW_LINES = 500
_MAX_IN_FLIGHT = 4000
"""Lines sent but not yet verified; a service holds this many."""
_NUM_SHOWN = 5
"""Bad lines reported on standard error; the output has all of them."""
_EXIT_BAD_LINES = 1
_EXIT_BROKEN_PIPE = 128 + signal.SIGPIPE


@interruptible()
def score(*, source: Path | None, output: Path | None, profile: str, service: Service) -> int:
    """Verify the lines of `source` and write their verdicts; return the exit code: 1 if there were bad lines.

    Args:
        source: The file; None: standard input.
        output: File for the verdicts; None: standard output.
        profile: The profile of lines without one.
        service: The service that verifies.

    Raises:
        UserError: a file cannot be read or written, the profile is unknown, or no service answers.
        PenstockError: the service became unavailable; the output so far is complete and in order.
    """
    max_windows = _MAX_IN_FLIGHT // _WINDOW_LINES
    with contextlib.ExitStack() as stack:
        reading = stack.enter_context(_reading(source))
        _refuse_own_input(reading, output)
        caller = stack.enter_context(RewardCaller(service))
        known = caller.known_profiles()
        if profile not in known:
            raise ConfigError(f"--profile {profile} is unknown; known: {', '.join(sorted(known))}")
        writing = stack.enter_context(_writing(output))
        reader = LineReader(
            reading, name=str(source or "<stdin>"), profile=profile, known_profiles=known, max_lines=_WINDOW_LINES
        )
        tally = _Tally()
        show = stack.enter_context(_progress(_size_of(reading)))
        pending: collections.deque[tuple[list[Line], Verdicts]] = collections.deque()
        try:
            for window in reader.windows():
                if window:
                    pending.append((window, caller.verify([line.item for line in window if line.item is not None])))
                # While the input pauses, everything read so far is answered.
                while pending and (not window or len(pending) >= max_windows or pending[0][1].done()):
                    _write(writing, *pending.popleft(), tally)
                show(reader.num_bytes, tally.num_lines)
            while pending:
                _write(writing, *pending.popleft(), tally)
                show(reader.num_bytes, tally.num_lines)
            writing.close()  # NFS says only here that there is no room
        except BrokenPipeError:  # the reader has left, as in `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), writing.fileno())
            return _EXIT_BROKEN_PIPE
        except OSError as error:
            raise DataError(
                f"{source or 'standard input'} cannot be read to its end, or {output or 'standard output'} cannot be "
                f"written: {error.strerror}; {tally.num_lines} lines are done; make room, or give another file"
            ) from None
        except KeyboardInterrupt:
            sys.stderr.write(f"interrupted: {tally.num_lines} lines are done\n")
            raise
    sys.stderr.write(tally.summary())
    return _EXIT_BAD_LINES if tally.num_invalid else 0


def _write(writing: io.FileIO, lines: list[Line], verdicts: Verdicts, tally: "_Tally") -> None:
    judged = iter(verdicts.result())
    answered = [(line, None if line.item is None else next(judged)) for line in lines]
    written = (write_invalid(line) if verdict is None else write_verdict(line, verdict) for line, verdict in answered)
    write_all(writing.fileno(), b"".join(written))
    for line, verdict in answered:
        tally.add(line, verdict)


class _Tally:
    """Counts of the lines and their verdicts."""

    def __init__(self) -> None:
        self.num_lines = 0
        self.num_invalid = 0
        self._statuses: collections.Counter[str] = collections.Counter()
        self._sum = 0.0
        self._started = time.monotonic()
        self._errors: list[str] = []

    def add(self, line: Line, verdict: reward_pb2.Verdict | None) -> None:
        """Count one line; a line without a verdict is a bad one."""
        self.num_lines += 1
        if verdict is None:
            self.num_invalid += 1
            if len(self._errors) < _NUM_SHOWN:
                self._errors.append(line.error)
        else:
            self._sum += verdict.score
        self._statuses[INVALID if verdict is None else status_of(verdict)] += 1

    def summary(self) -> str:
        """Return the summary, bad lines first."""
        elapsed_s = time.monotonic() - self._started
        errors = "".join(f"bad line: {error}\n" for error in self._errors)
        if self.num_invalid > _NUM_SHOWN:
            errors += f"bad line: {self.num_invalid - _NUM_SHOWN} more, each with its error in the output\n"
        num_judged = self.num_lines - self.num_invalid
        mean = f"; mean score {self._sum / num_judged:.4f}" if num_judged else ""
        statuses = "".join(f"; {count} {status}" for status, count in self._statuses.most_common())
        rate = f"{self.num_lines / elapsed_s:.0f}/s"
        return f"{errors}scored {num_judged} of {self.num_lines} lines in {elapsed_s:.1f} s ({rate}){mean}{statuses}\n"


def _reading(path: Path | None) -> io.FileIO:
    try:
        file = io.FileIO(0 if path is None else path, "rb", closefd=path is not None)
    except OSError as error:
        raise DataError(f"{path or 'standard input'} cannot be read: {error.strerror}; give a file of lines") from None
    if file.isatty():
        sys.stderr.write("reading lines from the terminal; Ctrl-D ends them\n")
    return file


def _writing(path: Path | None) -> io.FileIO:
    try:
        return io.FileIO(1 if path is None else path, "wb", closefd=path is not None)
    except OSError as error:
        raise DataError(f"{path or 'standard output'} cannot be written: {error.strerror}; give another file") from None


def _refuse_own_input(reading: io.FileIO, output: Path | None) -> None:
    if output is not None and output.exists() and os.path.samestat(output.stat(), os.fstat(reading.fileno())):
        raise ConfigError(f"--output {output} is the file that is read; give another")


def _size_of(reading: io.FileIO) -> int | None:
    found = os.fstat(reading.fileno())
    return found.st_size if stat.S_ISREG(found.st_mode) else None


@contextlib.contextmanager
def _progress(total_bytes: int | None) -> Iterator[Callable[[int, int], None]]:
    """Show a bar if standard error is a terminal; yield a function of bytes read and lines written that moves it."""
    columns = (TextColumn("{task.fields[lines]} lines"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=total_bytes, lines=0)
        yield lambda num_bytes, num_lines: progress.update(bar, completed=num_bytes, lines=num_lines)


@contextlib.asynccontextmanager
async def running_at(address: str, security: Security) -> AsyncIterator[RewardClient]:
    """Yield a client of the service at `address`."""
    async with RewardClient(address, security=security) as client:
        yield client


@contextlib.asynccontextmanager
async def private_service(config: RewardConfig, security: Security) -> AsyncIterator[RewardClient]:
    """Yield a client of a service for this process alone."""
    from services.reward.server import running

    private = config.model_copy(update={"port": 0, "http_port": 0})
    async with (
        running(private, security=security) as service,
        RewardClient(service.rpc.address, security=security) as client,
    ):
        yield client
