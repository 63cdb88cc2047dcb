"""Custom verifiers that do what no verifier should; the response says what."""

import contextlib
import fcntl
import os
import resource
import signal
import socket
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from penstock.runtime.isolation.frames import HEADER, frame
from penstock.verdict_status import Status
from services.reward.isolation.tasks import WorkerReply


def verify(golds: list[str], response: str, prompt: str) -> float:
    """Hang, sleep, eat memory, or leave a thread behind; or judge anything else as right."""
    if response == "spin":
        while True:
            pass
    if response == "sleep":
        time.sleep(1000)
    if response.startswith("nap"):
        time.sleep(float(response.split()[1]))
    if response == "eat":
        eaten = []
        while True:
            eaten.append(bytearray(2**20))
    if response == "peak":
        for size_mb in range(1024, 0, -8):
            with contextlib.suppress(MemoryError):
                bytearray(size_mb * 2**20)
                break
    if response == "forge":
        _write_to_sockets(frame(WorkerReply(status=Status.OK, credit=1.0)))
        return 0.0
    if response == "flood":
        _write_to_sockets(HEADER.pack(2**32 - 1) + bytes(2**20))
    if response == "leave a thread":
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    if response == "end a thread":
        thread = threading.Thread(target=time.sleep, args=(0.01,))
        thread.start()
        thread.join()
    if response == "die":
        os._exit(3)
    if response.startswith("busy"):
        until = time.process_time() + float(response.split()[1])
        while time.process_time() < until:
            pass
    return 1.0


def _write_to_sockets(data: bytes) -> None:
    for fd in range(64):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, data)


def escape(golds: list[str], response: str, prompt: str) -> dict[str, object]:
    """Try one way out; right if it was refused."""
    try:
        _WAYS_OUT[response](prompt)
    except OSError as error:
        return {"credit": 1.0, "extracted": type(error).__name__}
    return {"credit": 0.0, "extracted": "it worked"}


def _connect(prompt: str) -> None:
    host, _, port = prompt.partition(":")
    socket.create_connection((host, int(port)), timeout=1).close()


def _shell(prompt: str) -> None:
    if os.system("true") != 0:
        raise PermissionError


def _own_socket(prompt: str) -> None:
    """FIOSETOWN of any socket that is open already."""
    for fd in range(64):
        with contextlib.suppress(OSError):
            fcntl.ioctl(fd, 0x8901, struct.pack("i", int(prompt)))
            return
    raise PermissionError


_WAYS_OUT: dict[str, Callable[[str], object]] = {
    "connect": _connect,
    "listen": lambda prompt: socket.create_server(("127.0.0.1", 0)),
    "datagram": lambda prompt: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "fork": lambda prompt: os.fork() or os._exit(0),
    "shell": _shell,
    "subprocess": lambda prompt: subprocess.run(["true"], check=True),
    "exec": lambda prompt: os.execv("/bin/true", ["true"]),
    "write": lambda prompt: Path(prompt).write_text("mine"),
    "append": lambda prompt: os.open(prompt, os.O_APPEND | os.O_WRONLY),
    "unlink": lambda prompt: Path(prompt).unlink(),
    "rename": lambda prompt: Path(prompt).rename(prompt + ".old"),
    "mkdir": lambda prompt: Path(prompt + ".d").mkdir(),
    "chmod": lambda prompt: Path(prompt).chmod(0o777),
    "kill the forkserver": lambda prompt: os.kill(os.getppid(), signal.SIGKILL),
    "kill the server": lambda prompt: os.kill(int(prompt), signal.SIGKILL),
    "write the server's memory": lambda prompt: os.open(f"/proc/{prompt}/mem", os.O_RDWR),
    "limit the server": lambda prompt: resource.prlimit(int(prompt), resource.RLIMIT_NOFILE, (0, 0)),
    "own a signal of the server": lambda prompt: fcntl.fcntl(0, fcntl.F_SETOWN, int(prompt)),
    "choose the signal": lambda prompt: fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL),
    "own a socket's signal of the server": _own_socket,
    "slow the server down": lambda prompt: os.setpriority(os.PRIO_PROCESS, int(prompt), 19),
}
WAYS_OUT = tuple(_WAYS_OUT)
