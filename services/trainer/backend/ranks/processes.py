"""Starts the other ranks of a trainer on its machine, and notices when one dies or hangs.

Each shares a socket with rank 0. It writes its beat there every second, and ends when the socket is closed, which
happens when rank 0 ends in any way. A rank that is gone, silent or stuck cannot be replaced in the middle of a step:
the others wait for it in a collective that nothing interrupts. So the whole trainer ends, as if it had been killed;
what started it starts it again, and it goes on from its checkpoint.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import NoReturn, Self

import structlog

from penstock.runtime.process import EXIT_FAILURE
from services.trainer.backend.ranks import beats
from services.trainer.backend.ranks.beats import BEAT_S, Beat, BeatWatch, Pulse

log = structlog.get_logger()

_START_S = 300.0
"""For the first beat: torch is imported before it."""
_BLAME_S = 3.0
"""For a rank to end whose connections have closed. Shorter than `follower._REPORTING_S`: where all ranks fail alike,
rank 0 says why."""
_MOST_BYTES = 65536
_MODULE = "services.trainer.backend.ranks.follower"


class RankProcesses:
    """Ranks 1 to n - 1 as processes of this machine."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], sockets: Sequence[socket.socket]) -> None:
        """Use `start`."""
        self._processes = processes
        self._sockets = sockets
        self._closed = threading.Event()
        self._beats = BeatWatch()

    @classmethod
    def start(cls, size: int, *, store: int, device: str, pulse: Pulse) -> Self:
        """Start all but rank 0.

        Args:
            size: How many ranks there are, this one included.
            store: Descriptor of the file by which they find each other.
            device: cpu or cuda.
            pulse: That of this process.
        """
        processes, sockets = [], []
        for rank in range(1, size):
            ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            with theirs:
                command = [sys.executable, "-P", "-m", _MODULE]
                command += [str(each) for each in (rank, size, store, device, theirs.fileno())]
                processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        pass_fds=[store, theirs.fileno()],
                        # They import what this process can, a recipe's own functions included.
                        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    )
                )
            sockets.append(ours)
        started = cls(processes, sockets)
        for rank in range(1, size):
            threading.Thread(target=started._watch, args=(rank,), name=f"watch of rank {rank}", daemon=True).start()
        threading.Thread(target=started._judge, args=(pulse,), name="watch of all ranks", daemon=True).start()
        return started

    @property
    def are_own(self) -> bool:
        """Whether `close` ends them: it does."""
        return True

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return [process.pid for process in self._processes]

    def blame(self) -> None:
        """Let the watch over a rank that has ended end this process. Torch notices sooner that a rank is gone, and does
        not know why. If no rank has ended, return after a moment.
        """
        until = time.monotonic() + _BLAME_S
        is_over = False
        while not is_over:
            is_over = time.monotonic() >= until  # before the look: the machine may have stood still after the last one
            if any(process.poll() is not None for process in self._processes):
                self._closed.wait(_BLAME_S)
                return
            time.sleep(_BLAME_S / 100)

    def close(self) -> None:
        """End them. Blocks until they have ended, for a moment."""
        self._closed.set()
        for ours in self._sockets:
            ours.shutdown(socket.SHUT_RDWR)
            ours.close()
        for process in self._processes:
            try:
                process.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _watch(self, rank: int) -> None:
        """Return when the rank was ended on purpose; else end the trainer. For a thread."""
        process, ours = self._processes[rank - 1], self._sockets[rank - 1]
        ours.settimeout(_START_S)
        problem = ""
        while not problem and not self._closed.is_set():
            try:
                if said := ours.recv(_MOST_BYTES):
                    self._beats.hear(rank, Beat.decode(said))
                else:
                    code = process.wait()
                    problem = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
                ours.settimeout(beats.SILENCE_S)
            except TimeoutError:
                problem = f"gave no sign of life for {ours.gettimeout():g} s"
                process.kill()
            except OSError:
                problem = "is out of reach"
        if not self._closed.is_set():
            end_trainer(f"rank {rank} {problem}")

    def _judge(self, pulse: Pulse) -> None:
        """Return when the ranks were ended on purpose; end the trainer if they block each other. For a thread."""
        while not self._closed.wait(BEAT_S):
            self._beats.hear(0, pulse.beat())
            if (problem := self._beats.problem()) and not self._closed.is_set():
                end_trainer(problem)


def beat(to_rank_0: socket.socket, pulse: Pulse) -> None:
    """Tell rank 0 every second what this process is at; end the process when rank 0 is gone. For a thread."""
    to_rank_0.settimeout(BEAT_S)
    while True:
        try:
            to_rank_0.send(pulse.beat().encode())
            if not to_rank_0.recv(1):
                break
        except TimeoutError:  # nothing is ever sent here: a second has passed
            continue
        except OSError:
            break
    os._exit(0)  # a collective that waits for rank 0 would never end


def end_trainer(problem: str) -> NoReturn:
    """End this process, which is rank 0, at once: nothing else interrupts its collectives."""
    log.error("rank.lost", reason=problem)
    sys.stderr.write(f"error: {problem}; the trainer ends, and continues from its last checkpoint when started again\n")
    sys.stderr.flush()
    os._exit(EXIT_FAILURE)
