"""What processes may still take of the memory of a machine, a container or a job."""

from pathlib import Path

import pytest

from penstock.runtime.host.available_memory import available_memory, memory_here, read_cgroups


def test_memory_of_a_container() -> None:
    """Its limit counts, less what it uses; without one, what the machine has. The narrowest of several counts."""
    meminfo = "MemTotal:  32768 kB\nMemAvailable:  16384 kB\nHugePages_Total: 0\n"
    limited = {"memory.max": "8388608\n", "memory.current": "1048576\n"}
    assert available_memory(meminfo, []) == 16 * 2**20
    assert available_memory(meminfo, [{"memory.max": "max\n", "memory.current": "5\n"}]) == 16 * 2**20
    assert available_memory(meminfo, [limited]) == 7 * 2**20
    assert available_memory(meminfo, [{"memory.max": "8", "memory.current": "9"}]) == 0
    wider = {"memory.max": "9437184\n", "memory.current": "0\n"}
    assert available_memory(meminfo, [wider, limited, wider]) == 7 * 2**20


@pytest.mark.parametrize(
    ("folder", "limit", "usage", "cache", "own"),
    [
        ("", "memory.max", "memory.current", "inactive_file", "0::"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "4:memory:"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "2:hugetlb,memory:"),
    ],
    ids=["v2", "v1", "v1 with another controller"],
)
@pytest.mark.parametrize(
    ("group", "path"),
    [
        ("", "/"),  # a container with a namespace of groups
        ("slurm/job_1", "/slurm/job_1/step_0/user"),  # a job, whose limit is above its step
        ("", "/docker/1234"),  # a container that sees its own files under the host's path
    ],
    ids=["namespace", "job", "container"],
)
def test_memory_of_a_group_that_has_read_files(
    folder: str, limit: str, usage: str, cache: str, own: str, group: str, path: str, tmp_path: Path
) -> None:
    """Page cache counts as used in the control group, and the kernel reclaims it: of 8 MiB, 7 used and 6 of them cache,
    7 are free."""
    meminfo = "MemAvailable:  16384 kB\n"
    lines = f"3:cpuset:/elsewhere\n{own}{path}\n"
    assert list(read_cgroups(tmp_path, lines)) == []
    files = tmp_path / folder / group
    files.mkdir(parents=True, exist_ok=True)
    for name, text in (
        (limit, f"{8 * 2**20}\n"),
        (usage, f"{7 * 2**20}\n"),
        ("memory.stat", f"anon {2**20}\nfile {6 * 2**20}\n{cache} {6 * 2**20}\nactive_file 0\n"),
    ):
        (files / name).write_text(text)
    assert available_memory(meminfo, read_cgroups(tmp_path, lines)) == 7 * 2**20
    (files / limit).write_text("9223372036854771712\n")  # what v1 calls no limit
    assert available_memory(meminfo, read_cgroups(tmp_path, lines)) == 16 * 2**20


def test_this_machine_tells_its_memory() -> None:
    """Whatever its control groups are."""
    assert memory_here() > 0
