"""The process that worker processes are forked from: math-verify is imported and warm, nothing else runs in it.

    python -m services.reward.isolation.forkserver CONTROL_FD PARENT_PID MEMORY_LIMIT_BYTES

Over the control socket come `SPAWN` with a worker's socket, answered with the new worker's process id, and `REAP` for a
worker that was killed. A dead worker keeps its process id until it is reaped, so the server never kills another's
process. When the control socket closes, or the server ends in whatever way, this process ends and its workers with it.
"""

import gc
import os
import signal
import socket
import sys

from penstock.parent import die_with
from services.reward.grading.perform import perform
from services.reward.isolation.forkserver_protocol import COMMAND, REPLY, SPAWN
from services.reward.isolation.tasks import SymbolicGold, SymbolicTask
from services.reward.isolation.worker import work


def main() -> None:
    """Serve the control socket until it closes."""
    control_fd, parent_pid, memory_limit_bytes = map(int, sys.argv[1:])
    die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    _warm_up()
    gc.freeze()
    control.send(REPLY.pack(0))
    while True:
        message, fds, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        if not message:
            return
        command, pid = COMMAND.unpack(message)
        if command == SPAWN:
            control.send(REPLY.pack(_spawn(control, fds[0], memory_limit_bytes)))
        else:
            os.waitpid(pid, 0)


def _spawn(control: socket.socket, worker_fd: int, memory_limit_bytes: int) -> int:
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            die_with(parent_pid)
            control.close()
            work(socket.socket(fileno=worker_fd), memory_limit_bytes)
            status = 0
        finally:
            os._exit(status)
    os.close(worker_fd)
    return pid


def _warm_up() -> None:
    """Fill the parser's caches, which every worker then inherits."""
    for latex in (r"\frac{8\sqrt{3}}{3}", r"2 \pi", "(3, -2)", "x^2+2x+1", "5, 7", "[1, 2)"):
        gold = SymbolicGold(text=latex, use_text=False, value="", tolerance="0")
        perform(SymbolicTask(golds=(gold,), body=f"1 + {latex}", text=latex))


if __name__ == "__main__":
    main()
