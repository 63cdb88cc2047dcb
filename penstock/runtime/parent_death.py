"""A process that cannot outlive the one that started it."""

import ctypes
import functools
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded now: between fork and exec there must be no import


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent, `parent_pid`, ends in whatever way; end now if it has.

    It holds for this process only: its own children need the same, or their process group has to be killed. The kernel
    takes the thread that forked for the parent.
    """
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)


def dying_with_parent() -> Callable[[], None]:
    """A `preexec_fn` after which the child dies with this process; see `die_with`."""
    return functools.partial(die_with, os.getpid())
