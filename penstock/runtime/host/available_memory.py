"""Memory that processes of this machine, of this container or of this job may still take."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_CGROUP_VERSIONS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""For cgroup v2 and v1: the files of the limit and of the usage, and memory.stat's name of the page cache that is
reclaimed first."""
_CGROUP = Path("/sys/fs/cgroup")


def memory_here() -> int:
    """Return the bytes that processes here may still take.

    Raises:
        OSError, KeyError, ValueError: the machine does not tell.
    """
    own = Path("/proc/self/cgroup").read_text()
    return available_memory(Path("/proc/meminfo").read_text(), read_cgroups(_CGROUP, own))


def available_memory(meminfo: str, cgroups: Iterable[Mapping[str, str]]) -> int:
    """Return the bytes that processes may still take: the machine's, or what the narrowest limit of a group leaves.

    The page cache that the kernel reclaims first counts as free, as in kubelet and `docker stats`; otherwise a
    container that has read large files would seem full.

    Args:
        meminfo: The text of /proc/meminfo.
        cgroups: As `read_cgroups` yields them.
    """
    lines = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    available = int(lines["MemAvailable"].split()[0]) * 1024
    for cgroup in cgroups:
        for limit, usage, cache in _CGROUP_VERSIONS:
            if cgroup.get(limit, "max").strip() == "max":
                continue
            stat = dict(line.split() for line in cgroup.get("memory.stat", "").splitlines())
            used = max(0, int(cgroup.get(usage, "0")) - int(stat.get(cache, "0")))
            available = max(0, min(available, int(cgroup[limit]) - used))
    return available


def read_cgroups(root: Path, own: str) -> Iterator[dict[str, str]]:
    """Yield the files that limit the memory of a process's control group, and of each group above it; name to text.

    A container usually sees its own group as the uppermost one; a job of Slurm and a service of systemd do not.

    Args:
        root: Usually /sys/fs/cgroup.
        own: The text of /proc/self/cgroup.
    """
    names = {"memory.stat", *(name for version in _CGROUP_VERSIONS for name in version[:2])}
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group.is_relative_to(top):
                found = {name: (group / name).read_text() for name in sorted(names) if (group / name).is_file()}
                if any(limit in found for limit, _, _ in _CGROUP_VERSIONS):
                    yield found
