"""A process that worker processes are forked from: it has imported what they need, and runs nothing else.

    python -m MODULE SETTINGS WORKERS

`MODULE` calls `serve`. `SETTINGS` is `ForkserverSettings` as JSON; `WORKERS` is the module's own. The control socket
carries `SPAWN` with a worker's socket, answered with the new worker's process id, and `REAP` for a worker that was
killed. A dead worker keeps its process id until then, so the server never kills another process by mistake. Each worker
leads a process group, which includes the programs that an unconfined worker starts. When the control socket closes,
because the server has ended in any way, this process and these groups end.
"""

import errno
import gc
import os
import select
import signal
import socket
import traceback
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from penstock.runtime.children.parent_death import die_with, outlive_parent
from penstock.runtime.isolation import sandbox
from penstock.runtime.isolation.forkserver_protocol import (
    AT_THE_LIMIT,
    COMMAND,
    MAX_REPLY_BYTES,
    SPAWN,
    ForkserverReply,
    ForkserverSettings,
    encode_reply,
)

Work: TypeAlias = Callable[[int, bool], None]
"""A worker's main function: it gets its socket, and whether it must confine itself."""

_REAP_INTERVAL_MS = 50


def serve(encoded_settings: str, *, prepare: Callable[[], None], work: Work) -> None:
    """Serve the control socket until it closes.

    Args:
        encoded_settings: `ForkserverSettings` as JSON.
        prepare: Loads what workers inherit.
        work: Called in each worker, which ends when it returns.
    """
    settings = msgspec.json.decode(encoded_settings, type=ForkserverSettings)
    die_with(settings.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=settings.control_fd)
    try:
        prepare()
        warning = _check_sandbox(settings)
    except Exception as error:  # noqa: BLE001 - the process's boundary, and verifiers are the user's code: tell the server
        control.send(encode_reply(ForkserverReply(error=str(error)[: MAX_REPLY_BYTES // 8] or repr(error))))
        return
    outlive_parent()  # a closing socket says that the server is gone, and there may be groups to kill
    gc.freeze()
    control.send(encode_reply(ForkserverReply(warning=warning)))
    workers: set[int] = set()
    try:
        _obey(control, workers, work, is_confined=settings.sandbox != "off" and not warning)
    finally:
        for pid in workers:
            os.killpg(pid, signal.SIGKILL)


def _obey(control: socket.socket, workers: set[int], work: Work, *, is_confined: bool) -> None:
    """Do what the control socket says until it closes; keep `workers`, the process ids that are not reaped."""
    killed: set[int] = set()
    asked = select.poll()  # select has no room for descriptors above 1023, which the server's connections reach
    asked.register(control, select.POLLIN)
    while True:
        is_asked = bool(asked.poll(_REAP_INTERVAL_MS if killed else None))
        reaped = {pid for pid in killed if os.waitpid(pid, os.WNOHANG)[0] != 0}
        killed -= reaped
        workers -= reaped
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
            reply = _spawn(control, fds, work, is_confined=is_confined)
            if reply.pid:
                workers.add(reply.pid)
            control.send(encode_reply(reply))
        else:
            killed.add(pid)


def _check_sandbox(settings: ForkserverSettings) -> str:
    """Return a warning if workers cannot be confined.

    Raises:
        SandboxError: they cannot be, but must be.
    """
    reason = sandbox.probe() if settings.sandbox != "off" else ""
    if reason and settings.sandbox == "require":
        raise sandbox.SandboxError(
            f"worker processes cannot be confined ({reason}), and sandbox is 'require'; run where containers may use "
            "seccomp, or leave out what requires it"
        )
    return f"worker processes are not confined: {reason}" if reason else ""


def _spawn(control: socket.socket, fds: Sequence[int], work: Work, *, is_confined: bool) -> ForkserverReply:
    """Fork a worker that serves the socket in `fds`, which is empty if no descriptor was left for it."""
    if not fds:
        return ForkserverReply(error=f"no worker can be forked: {os.strerror(errno.EMFILE)}")
    [worker_fd] = fds
    parent_pid = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:  # no process or memory is left; the other workers go on
        os.close(worker_fd)
        remedy = f"; {AT_THE_LIMIT}" if error.errno == errno.EAGAIN else ""
        return ForkserverReply(error=f"no worker can be forked: {error.strerror}{remedy}")
    if pid == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            die_with(parent_pid)
            control.close()
            work(worker_fd, is_confined)
            status = 0
        except BaseException:  # noqa: BLE001 - the process's boundary: nothing must return to the server's loop
            traceback.print_exc()
        finally:
            os._exit(status)
    os.setpgid(pid, pid)  # both sides do so: neither may rely on being first
    os.close(worker_fd)
    return ForkserverReply(pid=pid)
