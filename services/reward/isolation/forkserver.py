"""The process that worker processes are forked from: math-verify is imported and warm, nothing else runs in it.

    python -m services.reward.isolation.forkserver SETTINGS

`SETTINGS` is `ForkserverSettings` as JSON. Over the control socket come `SPAWN` with a worker's socket, answered with
the new worker's process id, and `REAP` for a worker that was killed. A dead worker keeps its process id until then, so
the server never kills another's process. When the control socket closes, or the server ends in whatever way, this
process ends and its workers with it.
"""

import gc
import os
import select
import signal
import socket
import sys

import msgspec

from penstock.runtime.parent_death import die_with
from services.reward.isolation import sandbox
from services.reward.isolation.forkserver_protocol import (
    COMMAND,
    MAX_REPLY_BYTES,
    SPAWN,
    ForkserverReply,
    ForkserverSettings,
    encode_reply,
)
from services.reward.isolation.tasks import SymbolicGold, SymbolicTask
from services.reward.isolation.worker import work
from services.reward.worker_tasks.perform import perform, prepare

_REAP_INTERVAL_MS = 50


def main() -> None:
    """Serve the control socket until it closes."""
    settings = msgspec.json.decode(sys.argv[1], type=ForkserverSettings)
    die_with(settings.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=settings.control_fd)
    try:
        warning = _prepare(settings)
    except Exception as error:  # noqa: BLE001 - the process's boundary, and verifiers are the user's code: tell the server
        control.send(encode_reply(ForkserverReply(error=str(error)[: MAX_REPLY_BYTES // 8] or repr(error))))
        return
    gc.freeze()
    control.send(encode_reply(ForkserverReply(warning=warning)))
    is_confined = settings.sandbox != "off" and not warning
    killed: set[int] = set()
    asked = select.poll()  # unlike select it takes any number of a socket, and the server's open connections raise it
    asked.register(control, select.POLLIN)
    while True:
        is_asked = bool(asked.poll(_REAP_INTERVAL_MS if killed else None))
        killed = {pid for pid in killed if os.waitpid(pid, os.WNOHANG)[0] == 0}
        if not is_asked:
            continue
        try:
            message, fds, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        except ConnectionError:
            return
        if not message:
            return
        command, pid = COMMAND.unpack(message)
        if command == SPAWN:
            pid = _spawn(control, fds[0], settings.memory_limit_bytes, is_confined=is_confined)
            control.send(encode_reply(ForkserverReply(pid=pid)))
        else:
            killed.add(pid)


def _prepare(settings: ForkserverSettings) -> str:
    """Load and warm what workers inherit; return a warning if they cannot be confined."""
    prepare(settings.verifiers)
    _warm_up()
    reason = sandbox.probe() if settings.sandbox != "off" else ""
    if reason and settings.sandbox == "require":
        raise sandbox.SandboxError(f"worker processes cannot be confined ({reason}), and reward.sandbox is 'require'")
    return f"worker processes are not confined: {reason}" if reason else ""


def _spawn(control: socket.socket, worker_fd: int, memory_limit_bytes: int, *, is_confined: bool) -> int:
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            die_with(parent_pid)
            control.close()
            work(worker_fd, memory_limit_bytes, is_confined=is_confined)
            status = 0
        finally:
            os._exit(status)
    os.close(worker_fd)
    return pid


def _warm_up() -> None:
    """Fill the parser's caches, which every worker then inherits."""
    for latex in (r"\frac{8\sqrt{3}}{3}", r"2 \pi", "(3, -2)", "x^2+2x+1", "5, 7", "[1, 2)", "y=2x+1", r"\sin{2x}"):
        gold = SymbolicGold(text=latex, use_text=False, value="", tolerance="0")
        perform(SymbolicTask(golds=(gold,), body=f"1 + {latex}", text=latex))


if __name__ == "__main__":
    main()
