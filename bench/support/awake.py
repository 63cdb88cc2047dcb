"""Cores that are not put to sleep while something is measured.

A virtual core that has nothing to do is taken away, and on many hosts it takes milliseconds to come back: a benchmark
of calls that take less measures the host. Here every core has something to do: a process of the scheduling class
SCHED_IDLE, which gets only the time that nobody else wants. It is what `idle=poll` is to a kernel. Not for what keeps
cores busy anyway: where two of them share a physical one, the spinning takes some of the other's speed.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from penstock.runtime.parent_death import dying_with_parent

_SPIN = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"


@contextlib.contextmanager
def cores_awake() -> Iterator[None]:
    """Have them so for the time of the context."""
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
    """Which share of all cores' time the host gave to others."""

    def __init__(self) -> None:
        """Count from now on."""
        self._before = _times()

    def share(self) -> float:
        """From 0 to 1, since the start."""
        spent = [now - before for now, before in zip(_times(), self._before, strict=True)]
        return spent[7] / max(1, sum(spent))


def _times() -> list[int]:
    """user, nice, system, idle, iowait, irq, softirq, steal; in ticks, of all cores."""
    return [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
