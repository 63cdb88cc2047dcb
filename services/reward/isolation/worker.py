"""A worker process: does one task at a time, within limits of memory, time and access, until its pipe closes.

It has no deadline of its own: the server keeps it and kills. The limits here are for when the server cannot.
"""

import math
import resource
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.runtime.isolation import sandbox
from penstock.runtime.isolation.frames import HEADER, frame, write_all
from penstock.runtime.isolation.limits import address_space_bytes, limit_process
from penstock.verdict_status import Status
from services.reward.isolation.tasks import Task, VerifierTask, WorkerReply, WorkerRequest
from services.reward.worker_tasks.perform import perform

_NEARLY = 0.9
"""Share of the memory limit from which a failed comparison counts as out of memory: sympy and math-verify
swallow MemoryError. The kernel keeps the peak of the process's life, so its worker is then replaced."""
_MAX_GROWTH_BYTES = 48 * 2**20
"""Maximum growth since the fork; beyond it, a worker is replaced."""
_THREAD_END_S = 0.1
"""For a joined thread to leave the kernel: on a busy machine it waits for a core first."""
_THREAD_LOOK_S = 0.002


def work(fd: int, memory_limit_bytes: int, *, is_confined: bool) -> None:
    """Answer requests from the socket `fd` until it is closed, or until the process is spoilt."""
    loaded_bytes = address_space_bytes()
    limit_process(memory_bytes=loaded_bytes + memory_limit_bytes)
    if is_confined:
        sandbox.enter()
    size_at_start = _resident_bytes()
    _, hard_cpu_limit_s = resource.getrlimit(resource.RLIMIT_CPU)
    decoder = msgspec.msgpack.Decoder(WorkerRequest)
    with open(fd, "rb") as requests:
        while header := requests.read(HEADER.size):
            request = decoder.decode(requests.read(HEADER.unpack(header)[0]))
            cpu_limit_s = math.ceil(time.process_time()) + request.cpu_limit_s
            if hard_cpu_limit_s != resource.RLIM_INFINITY:
                cpu_limit_s = min(cpu_limit_s, hard_cpu_limit_s)
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_limit_s, hard_cpu_limit_s))
            reply = _perform(request.task)
            has_grown = _resident_bytes() - size_at_start > _MAX_GROWTH_BYTES
            has_peaked = _ProcessStatus.read().peak_bytes > loaded_bytes + _NEARLY * memory_limit_bytes
            if has_peaked and reply.credit == 0 and not isinstance(request.task, VerifierTask):
                reply = WorkerReply(status=Status.OUT_OF_MEMORY)
            has_lowered_limit = resource.getrlimit(resource.RLIMIT_CPU)[1] != hard_cpu_limit_s
            is_spoilt = (
                has_grown
                or has_peaked
                or has_lowered_limit
                or reply.status is Status.OUT_OF_MEMORY
                or _has_threads_left()
            )
            reply = msgspec.structs.replace(reply, token=request.token, is_spoilt=is_spoilt)
            write_all(fd, frame(reply))
            if reply.is_spoilt:
                return


def _perform(task: Task) -> WorkerReply:
    try:
        return perform(task)
    except MemoryError:
        return WorkerReply(status=Status.OUT_OF_MEMORY)
    except Exception:  # noqa: BLE001 - the process's boundary: sympy raises anything at all on text that it cannot handle
        return WorkerReply(status=Status.UNPARSEABLE)


def _resident_bytes() -> int:
    """Return the memory of this process, including what it shares with the forkserver."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()


def _has_threads_left() -> bool:
    """Return whether there are other threads, which would see the next item; joined threads end in a moment."""
    until = time.monotonic() + _THREAD_END_S
    while _ProcessStatus.read().num_threads > 1:
        if time.monotonic() > until:
            return True
        time.sleep(_THREAD_LOOK_S)
    return False


class _ProcessStatus(NamedTuple):
    """The kernel's report about this process."""

    peak_bytes: int
    """Peak size of its address space."""
    num_threads: int

    @classmethod
    def read(cls) -> "_ProcessStatus":
        """Read the report."""
        lines = dict(line.split(b":", 1) for line in Path("/proc/self/status").read_bytes().splitlines())
        return cls(peak_bytes=int(lines[b"VmPeak"].split()[0]) * 1024, num_threads=int(lines[b"Threads"]))
