"""`make test-ranks`: ranks of a trainer on two hosts, which are network namespaces of this machine. Needs root."""

from pathlib import Path

import pytest

from tests.e2e.test_torchrun import play_with_deaths
from tests.support.launch.hosts import missing, network_of_hosts
from tests.support.trainer.runs.torchrun_run import Host

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.leaves_behind("a process that is killed with -9 has no time to remove its temporary files", "file"),
]


def test_ranks_of_two_hosts_die_and_lose_nothing(tmp_path: Path) -> None:
    """All other processes are on the first host; the second one has a rank, and reaches the first by its address."""
    assert not missing(), missing()
    with network_of_hosts(tmp_path, "a", "b") as hosts:
        play_with_deaths(
            tmp_path, [Host(address=address, enter=hosts.enter(name)) for name, address in hosts.addresses.items()]
        )
