"""Kills the OS process groups of a process that has ended. Run as a script; imports only the standard library.

That process, the owner, holds the other end of standard input. Each child writes `+<group>` there as it starts, and the
owner writes `-<group>` when nothing of the group is left. When the owner ends in any way, its end closes, and every
group that was added and not removed is killed.
"""

import os
import signal
import sys
from collections.abc import Iterable


def groups_left(lines: Iterable[str]) -> set[int]:
    """Return the groups that are alive after `lines`."""
    groups: set[int] = set()
    for line in lines:
        if line.startswith("+"):
            groups.add(int(line[1:]))
        elif line.startswith("-"):
            groups.discard(int(line[1:]))
    return groups


def main() -> None:
    """Wait for the end of standard input, then kill the groups that are left."""
    for group in groups_left(sys.stdin):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
