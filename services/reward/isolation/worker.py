"""A worker process: compares one item at a time, within limits of memory and processor time, until its socket closes.

It keeps no deadline of its own: the server holds it and kills. The limits here are for when the server cannot.
"""

import resource
import socket
import time
from pathlib import Path

import msgspec

from services.reward.grading.perform import perform
from services.reward.isolation.tasks import HEADER, Task, WorkerReply, WorkerRequest, frame
from services.reward.verdict import Status

_NEARLY = 0.9
"""Address space used, as a share of the limit, from which a failed comparison counts as out of memory: sympy and
math-verify swallow MemoryError."""


def work(sock: socket.socket, memory_limit_bytes: int) -> None:
    """Answer requests from `sock` until it is closed, or until memory ran out: then the process is spoilt."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    decoder = msgspec.msgpack.Decoder(WorkerRequest)
    with sock.makefile("rb") as requests:
        while header := requests.read(HEADER.size):
            request = decoder.decode(requests.read(HEADER.unpack(header)[0]))
            cpu_limit_s = int(time.process_time()) + request.cpu_limit_s
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit_s, resource.RLIM_INFINITY))
            reply = _perform(request.task, memory_limit_bytes)
            sock.sendall(frame(reply))
            if reply.status is Status.OUT_OF_MEMORY:
                return


def _perform(task: Task, memory_limit_bytes: int) -> WorkerReply:
    try:
        reply = perform(task)
    except MemoryError:
        return WorkerReply(status=Status.OUT_OF_MEMORY)
    except Exception:  # noqa: BLE001 - the process's boundary: sympy raises anything at all on text that it cannot handle
        reply = WorkerReply(status=Status.UNPARSEABLE)
    if reply.credit == 0 and _peak_bytes() > _NEARLY * memory_limit_bytes:
        return WorkerReply(status=Status.OUT_OF_MEMORY)
    return reply


def _peak_bytes() -> int:
    """The most address space that this process had."""
    status = Path("/proc/self/status").read_bytes()
    return int(status.partition(b"VmPeak:")[2].split(maxsplit=1)[0]) * 1024
