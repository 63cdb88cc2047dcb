"""Kills the OS process groups of a process that is gone. Run as a script; imports the standard library only.

That process, the owner, holds the other end of standard input. Each child writes `+<group>` there as it starts, and the
owner `-<group>` when nothing of the group is left. When the owner ends, however it ends, its end closes, and every
group that was named and not taken back is killed.
"""

import os
import signal
import sys
from collections.abc import Iterable


def groups_left(lines: Iterable[str]) -> set[int]:
    """The groups that are alive after `lines`."""
    groups: set[int] = set()
    for line in lines:
        if line.startswith("+"):
            groups.add(int(line[1:]))
        elif line.startswith("-"):
            groups.discard(int(line[1:]))
    return groups


def main() -> None:
    """Wait for the end of standard input, then kill."""
    for group in groups_left(sys.stdin):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
