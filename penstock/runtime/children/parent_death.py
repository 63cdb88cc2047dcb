"""Ends a process together with the one that started it."""

import ctypes
import functools
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here, because a child must not import between fork and exec


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent, `parent_pid`, ends in any way; exit now if it has ended.

    This covers only the process itself: its own children need the same, or their process group must be killed. To the
    kernel, the parent is the thread that forked.
    """
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with`, for a process that notices its parent's end itself and has work to do then."""
    if _LIBC.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def dying_with_parent() -> Callable[[], None]:
    """Return a `preexec_fn` after which the child dies with this process; see `die_with`."""
    return functools.partial(die_with, os.getpid())
