"""Keeps cores awake during a measurement, and counts what they did.

An idle virtual core is taken away, and on many hosts it takes milliseconds to come back: a benchmark of shorter calls
measures the host. Here every core always has work: a process of the scheduling class SCHED_IDLE, which gets only idle
time. It is what `idle=poll` is to a kernel. Do not use it for work that keeps cores busy anyway: if two cores share a
physical one, the spinning takes some of the other's speed.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from penstock.runtime.children.parent_death import dying_with_parent

_SPIN = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"


@contextlib.contextmanager
def cores_awake() -> Iterator[None]:
    """Keep the cores awake during the context."""
    spinners = [
        subprocess.Popen([sys.executable, "-c", _SPIN], preexec_fn=dying_with_parent()) for _ in os.sched_getaffinity(0)
    ]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


class StolenTime:
    """The share of all cores' time that the host gave to others."""

    def __init__(self) -> None:
        """Count from this moment on."""
        self._before = _times()

    def share(self) -> float:
        """Return the share since the start, from 0 to 1."""
        spent = [now - before for now, before in zip(_times(), self._before, strict=True)]
        return spent[7] / max(1, sum(spent))


class BusyTime:
    """The time for which cores worked, for any process."""

    def __init__(self) -> None:
        """Count from this moment on."""
        self._before = _times()

    def core_s(self) -> float:
        """Return the core-seconds since the start."""
        spent = [now - before for now, before in zip(_times(), self._before, strict=True)]
        user, nice, system, _, _, irq, softirq, _ = spent
        return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _times() -> list[int]:
    """Return user, nice, system, idle, iowait, irq, softirq, steal; in ticks, of all cores."""
    return [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
