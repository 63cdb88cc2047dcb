"""The process that environments are forked from: it imports their module and runs nothing else.

    python -m services.rollout.worker.environments.hosting.forkserver SETTINGS

`SETTINGS` is `ForkserverSettings` as JSON. Each forked process leads a process group. The group is killed when the
worker asks for it, when the process ends, and when the control socket closes because the worker has ended in any way.
The processes' output is read here, so that it never blocks them and never reaches the worker.
"""

import errno
import faulthandler
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from penstock.errors import ConfigError
from penstock.runtime.children.parent_death import die_with, outlive_parent
from services.rollout.worker.environments.hosting.episode_process import flush_output, serve_episode
from services.rollout.worker.environments.hosting.forkserver_protocol import (
    MAX_PACKET_BYTES,
    Command,
    Event,
    Exited,
    ForkserverSettings,
    Ready,
    Spawn,
    Spawned,
)
from services.rollout.worker.environments.loading import load_class, prepare

_OUTPUT_KEPT_BYTES = 3000
_READ_BYTES = 2**16
_MAX_LAST_READS = 64


def main() -> None:
    """Serve the control socket until it closes."""
    settings = msgspec.json.decode(sys.argv[1], type=ForkserverSettings)
    die_with(settings.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = settings.sys_path
    control = socket.socket(fileno=settings.control_fd)
    try:
        make = load_class(settings.path, settings.args)
        prepare(make)
    except ConfigError as error:
        control.send(msgspec.msgpack.encode(Ready(error=str(error)[: MAX_PACKET_BYTES // 8])))
        return
    # From here on a closing socket means that the worker is gone, and there may be processes to kill.
    outlive_parent()
    gc.freeze()
    control.send(msgspec.msgpack.encode(Ready()))
    _Forkserver(control, make).serve()


@dataclass(slots=True)
class _Child:
    pid: int
    pidfd: int
    output_fd: int
    output: bytes = b""

    def read(self) -> int:
        """Read its output, keep the last part, and return the number of bytes read."""
        try:
            data = os.read(self.output_fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        self.output = (self.output + data)[-_OUTPUT_KEPT_BYTES:]
        return len(data)


class _Forkserver:
    """Forks, reads and reaps."""

    def __init__(self, control: socket.socket, make: Callable[[], Any]) -> None:
        self._control = control
        self._make = make
        self._children: dict[int, _Child] = {}
        self._by_pidfd: dict[int, _Child] = {}
        self._by_output: dict[int, _Child] = {}
        self._poll = select.poll()  # unlike select it accepts descriptors of any number
        self._commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

    def serve(self) -> None:
        """Serve until the control socket closes."""
        self._poll.register(self._control, select.POLLIN)
        try:
            while True:
                for fd, _ in self._poll.poll():
                    if fd == self._control.fileno():
                        if not self._obey():
                            return
                    elif (writer := self._by_output.get(fd)) is not None:
                        if writer.read() == 0:
                            self._poll.unregister(fd)
                            del self._by_output[fd]
                    elif (ended := self._by_pidfd.get(fd)) is not None:
                        self._reap(ended)
        except ConnectionError:
            pass  # the worker is gone
        finally:
            for child in self._children.values():
                os.killpg(child.pid, signal.SIGKILL)

    def _obey(self) -> bool:
        packet, fds, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 1)
        if not packet:
            return False
        command = self._commands.decode(packet)
        if isinstance(command, Spawn):
            self._spawn(fds)
        elif command.pid in self._children:
            os.killpg(command.pid, signal.SIGKILL)
        return True

    def _spawn(self, channel: Sequence[int]) -> None:
        """Fork an episode's process, which serves `channel`: one socket, or none if no descriptor was left for it."""
        opened = [*channel]
        try:
            if not channel:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            [channel_fd] = channel
            output_fd, write_fd = os.pipe()
            opened += [output_fd, write_fd]
            # Of this process itself, to learn before the fork that there is room for the child's.
            opened.append(reserved_fd := os.pidfd_open(os.getpid()))
            parent_pid = os.getpid()
            pid = os.fork()
        except OSError as error:  # the other episodes go on
            for fd in opened:
                os.close(fd)
            self._tell(Spawned(pid=0, error=f"no process can be forked: {error.strerror}"))
            return
        os.close(reserved_fd)
        if pid == 0:
            os.close(output_fd)
            self._become_episode(channel_fd, write_fd, parent_pid)
        os.setpgid(pid, pid)  # both sides do so: neither may rely on being first
        os.close(write_fd)
        os.close(channel_fd)
        os.set_blocking(output_fd, False)
        child = _Child(pid, os.pidfd_open(pid), output_fd)
        self._children[pid] = self._by_pidfd[child.pidfd] = self._by_output[output_fd] = child
        self._poll.register(child.pidfd, select.POLLIN)
        self._poll.register(output_fd, select.POLLIN)
        self._tell(Spawned(pid=pid))

    def _become_episode(self, channel_fd: int, write_fd: int, parent_pid: int) -> NoReturn:
        """Serve one episode in the child process, then end it."""
        status = 1
        try:
            os.setpgid(0, 0)
            die_with(parent_pid)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # programs inherit what is ignored
            self._control.close()
            for child in self._children.values():
                os.close(child.pidfd)
                os.close(child.output_fd)
            self._children.clear()  # they are the server's to kill
            null_fd = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null_fd, 0), (write_fd, 1), (write_fd, 2)):
                os.dup2(source, target)
            os.close(null_fd)
            os.close(write_fd)
            faulthandler.enable()
            if (random := sys.modules.get("numpy.random")) is not None:
                random.seed()  # like Python's own generator, whose state would be the same in every fork
            with socket.socket(fileno=channel_fd) as channel:
                serve_episode(channel, self._make)
            status = 0
        except BaseException:  # noqa: BLE001 - the process's boundary: nothing must return to the server's loop
            traceback.print_exc()
        finally:
            try:
                flush_output()
            finally:
                os._exit(status)

    def _reap(self, child: _Child) -> None:
        os.killpg(child.pid, signal.SIGKILL)  # its children too; until it is reaped, no other process gets its number
        if child.output_fd in self._by_output:
            for _ in range(_MAX_LAST_READS):
                if child.read() == 0:
                    break
            self._poll.unregister(child.output_fd)
            del self._by_output[child.output_fd]
        self._poll.unregister(child.pidfd)
        _, status = os.waitpid(child.pid, 0)
        os.close(child.pidfd)
        os.close(child.output_fd)
        del self._children[child.pid], self._by_pidfd[child.pidfd]
        output = child.output.decode(errors="replace").strip()
        self._tell(Exited(pid=child.pid, status=os.waitstatus_to_exitcode(status), output=output))

    def _tell(self, event: Event) -> None:
        self._control.send(msgspec.msgpack.encode(event))


if __name__ == "__main__":
    main()
