"""Memory that processes of this machine, or of this container, may still take."""

from collections.abc import Mapping
from pathlib import Path

_CGROUP_VERSIONS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""For cgroup v2 and v1: the files of the limit and of the usage, and memory.stat's name of the page cache that is
reclaimed first."""
_CGROUP = Path("/sys/fs/cgroup")


def memory_here() -> int:
    """Return the bytes that processes here may still take."""
    return available_memory(Path("/proc/meminfo").read_text(), read_cgroup(_CGROUP))


def available_memory(meminfo: str, cgroup: Mapping[str, str]) -> int:
    """Return the bytes that processes may still take: the machine's, or the container's if that has a limit.

    The page cache that the kernel reclaims first counts as free, as in kubelet and `docker stats`; otherwise a
    container that has read large files would seem full.

    Args:
        meminfo: The text of /proc/meminfo.
        cgroup: As `read_cgroup` returns it.
    """
    lines = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    available = int(lines["MemAvailable"].split()[0]) * 1024
    for limit, usage, cache in _CGROUP_VERSIONS:
        if cgroup.get(limit, "max").strip() == "max":
            continue
        stat = dict(line.split() for line in cgroup.get("memory.stat", "").splitlines())
        used = max(0, int(cgroup.get(usage, "0")) - int(stat.get(cache, "0")))
        available = max(0, min(available, int(cgroup[limit]) - used))
    return available


def read_cgroup(root: Path) -> dict[str, str]:
    """Return the files that limit memory under `root`, usually /sys/fs/cgroup, name to text; empty if none does."""
    for folder in (root, root / "memory"):
        names = {"memory.stat", *(name for version in _CGROUP_VERSIONS for name in version[:2])}
        found = {name: (folder / name).read_text() for name in sorted(names) if (folder / name).is_file()}
        if any(limit in found for limit, _, _ in _CGROUP_VERSIONS):
            return found
    return {}
