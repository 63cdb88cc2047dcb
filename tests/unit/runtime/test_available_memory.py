"""What processes may still take of the memory of a machine or a container."""

from pathlib import Path

import pytest

from penstock.runtime.host.available_memory import available_memory, read_cgroup


def test_memory_of_a_container() -> None:
    """Its limit counts, less what it uses; without one, what the machine has."""
    meminfo = "MemTotal:  32768 kB\nMemAvailable:  16384 kB\nHugePages_Total: 0\n"
    assert available_memory(meminfo, {}) == 16 * 2**20
    assert available_memory(meminfo, {"memory.max": "max\n", "memory.current": "5\n"}) == 16 * 2**20
    assert available_memory(meminfo, {"memory.max": "8388608\n", "memory.current": "1048576\n"}) == 7 * 2**20
    assert available_memory(meminfo, {"memory.max": "8", "memory.current": "9"}) == 0


@pytest.mark.parametrize(
    ("folder", "limit", "usage", "cache"),
    [
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
    ids=["v2", "v1"],
)
def test_memory_of_a_container_that_has_read_files(
    folder: str, limit: str, usage: str, cache: str, tmp_path: Path
) -> None:
    """Page cache counts as used in the control group, and the kernel reclaims it: of 8 MiB, 7 used and 6 of them cache,
    7 are free."""
    meminfo = "MemAvailable:  16384 kB\n"
    assert read_cgroup(tmp_path) == {}
    (tmp_path / folder).mkdir(exist_ok=True)
    for name, text in (
        (limit, f"{8 * 2**20}\n"),
        (usage, f"{7 * 2**20}\n"),
        ("memory.stat", f"anon {2**20}\nfile {6 * 2**20}\n{cache} {6 * 2**20}\nactive_file 0\n"),
    ):
        (tmp_path / folder / name).write_text(text)
    assert available_memory(meminfo, read_cgroup(tmp_path)) == 7 * 2**20
    (tmp_path / folder / limit).write_text("9223372036854771712\n")  # what v1 calls no limit
    assert available_memory(meminfo, read_cgroup(tmp_path)) == 16 * 2**20
